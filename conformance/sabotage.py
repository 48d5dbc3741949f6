"""Two classic faults of a tuner, for the test that the suite notices them."""

from __future__ import annotations

from typing import Any

from frozencore.adapter.layer import FrozenCoreLinear


def sabotage(fault: str) -> None:
    """``unmerge``: forgets that it merged and leaves the weight. ``scale``: merges without the factor alpha / r."""
    if fault == "unmerge":
        FrozenCoreLinear.unmerge = lambda self: self.merged_adapters.clear()  # type: ignore[method-assign]
    elif fault == "scale":
        scaled = FrozenCoreLinear.get_delta_weight

        def unscaled(self: Any, adapter_name: str) -> Any:
            return scaled(self, adapter_name) / self.frozencore_scale[adapter_name]

        FrozenCoreLinear.get_delta_weight = unscaled  # type: ignore[method-assign]
    else:
        raise SystemExit(f"A fault is unmerge or scale, but {fault!r} came.")
