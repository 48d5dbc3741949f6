"""Check that a base model is the one that an adapter was made on, by a few values of each adapted weight.

Values are stored instead of a hash, because a model may be loaded in another dtype, and float32 -> float16 -> bfloat16
does not round like float32 -> bfloat16. In the same dtype values must be equal; between two dtypes they may differ by
the rounding of both. A quantised, sharded or empty (meta) weight has no values, so nothing is recorded or compared.

A merged layer has kept its original weight, whose values are read. Of a sharded weight, those are kept that were read
when the layer was wrapped.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frozencore.errors import ArtifactError

NUM_SAMPLES = 8  # per weight, evenly spaced from the first to the last value
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}  # fmt: skip


def sample_weight(weight: Any) -> Tensor | None:
    """Read some values of a plain weight, in its dtype; None for a quantised, sharded or missing weight."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_meta or weight.dtype not in _DTYPES.values():
        return None
    if weight.numel() < NUM_SAMPLES:
        return None
    positions = [i * (weight.numel() - 1) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
    return weight.detach().flatten()[positions]


def record_base(samples: Mapping[str, Tensor | None]) -> dict[str, str] | None:
    """Make the record of a base model from the samples by layer name; None if a layer has no sample."""
    found = [samples[name] for name in sorted(samples)]
    plain = [sample for sample in found if sample is not None]
    if not plain or len(plain) < len(found):
        return None
    values = torch.cat([sample.float().cpu() for sample in plain]).numpy().astype("<f4")
    coarsest = max((sample.dtype for sample in plain), key=lambda dtype: torch.finfo(dtype).eps)
    return {
        "dtype": str(coarsest).removeprefix("torch."),
        "values": base64.b64encode(values.tobytes()).decode("ascii"),
    }


def differing_layer(recorded: Mapping[str, Any], samples: Mapping[str, Tensor | None]) -> str | None:
    """The first layer whose weight differs from the record; None if all agree or cannot be compared."""
    present = record_base(samples)
    if present is None:
        return None
    theirs, mine = _read(recorded), _read(present)
    if theirs[0].shape != mine[0].shape:
        return None  # layers differ; their names are checked elsewhere
    bad = np.flatnonzero(~(np.abs(theirs[0] - mine[0]) <= _tolerance(theirs, mine)))
    return sorted(samples)[bad[0] // NUM_SAMPLES] if len(bad) else None


_Values = tuple["np.ndarray[Any, np.dtype[np.float64]]", torch.dtype]


def _tolerance(one: _Values, other: _Values) -> Any:
    if one[1] == other[1]:
        return 0.0
    rounding = sum(torch.finfo(dtype).eps for _, dtype in (one, other)) / 2
    smallest = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for _, dtype in (one, other))
    return rounding * np.maximum(np.abs(one[0]), np.abs(other[0])) + smallest


def _read(recorded: Mapping[str, Any]) -> _Values:
    try:
        values = np.frombuffer(base64.b64decode(recorded["values"], validate=True), dtype="<f4").astype(np.float64)
        dtype = _DTYPES[recorded["dtype"]]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ArtifactError(
            f"The adapter's record of its base model is malformed ({error}). Save or download it again."
        ) from error
    return values, dtype
