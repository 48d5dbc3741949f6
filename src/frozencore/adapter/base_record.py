"""A record of the base model that an adapter or a basis was made on: a few values of each adapted weight.

Values are stored instead of a hash, because a model may be loaded in another dtype, and float32 -> float16 -> bfloat16
does not round like float32 -> bfloat16. In the same dtype values must be equal; between two dtypes they may differ by
the rounding of both. A quantised, sharded or empty (meta) weight has no values, so nothing is recorded or compared.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frozencore.errors import ArtifactError
from frozencore.files.fingerprint import fingerprint_tensors

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
    return weight.detach().take(_positions(weight.numel(), weight.device))


@cache
def _positions(size: int, device: torch.device) -> Tensor:
    """The places of the samples; a list would be made a tensor, and copied to a GPU, for each of hundreds of layers."""
    with torch.inference_mode(False):
        return torch.tensor([i * (size - 1) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)], device=device)


def samples_of(model: nn.Module, layers: Iterable[str]) -> dict[str, Tensor | None]:
    """The samples of a plain model by layer name."""
    return {name: sample_weight(model.get_submodule(name).weight) for name in layers}


def record_base(samples: Mapping[str, Tensor | None]) -> dict[str, str] | None:
    """Make the record of a base model from the samples by layer name; None if a layer has no sample."""
    every = [samples[name] for name in sorted(samples)]
    plain = [sample for sample in every if sample is not None]
    if not plain or len(plain) < len(every):
        return None
    together = len({sample.device for sample in plain}) == 1  # then one copy serves all
    values = torch.cat(plain if together else [sample.cpu() for sample in plain]).float().cpu().numpy()
    coarsest = max({sample.dtype for sample in plain}, key=lambda dtype: torch.finfo(dtype).eps)
    return {"dtype": str(coarsest).removeprefix("torch."), "values": _encoded(values)}


def _encoded(values: Any) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def differing_layer(recorded: Mapping[str, Any], samples: Mapping[str, Tensor | None]) -> str | None:
    """The first layer whose weight differs from the record; None if all agree or cannot be compared."""
    position = _first_difference(recorded, record_base(samples))
    return None if position is None else sorted(samples)[position // NUM_SAMPLES]


def split_record(recorded: Mapping[str, Any], layers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Split the record of these layers into one record a layer; nothing if the record is of other layers."""
    names, (values, _) = sorted(layers), _values(recorded)
    if len(values) != NUM_SAMPLES * len(names):
        return {}
    return {
        name: {**recorded, "values": _encoded(values[i * NUM_SAMPLES : (i + 1) * NUM_SAMPLES])}
        for i, name in enumerate(names)
    }


def base_digest(recorded: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a record, as bfloat16 rounds them."""
    values, _ = _values(recorded)
    return fingerprint_tensors([("base", torch.from_numpy(values).bfloat16())])


def differs(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two records of the same layers, where both are known, are of different weights."""
    return _first_difference(one, other) is not None


def _first_difference(recorded: Mapping[str, Any] | None, present: Mapping[str, Any] | None) -> int | None:
    """The position of the first value that differs between two records; None if all agree or cannot be compared."""
    if recorded is None or present is None:
        return None
    (theirs, their_dtype), (mine, my_dtype) = _values(recorded), _values(present)
    if theirs.shape != mine.shape:
        return None  # layers differ; their names are checked elsewhere
    kinds = [torch.finfo(dtype) for dtype in (their_dtype, my_dtype) if their_dtype != my_dtype]
    relative = sum(kind.eps for kind in kinds) / 2
    smallest = max((kind.smallest_normal * kind.eps for kind in kinds), default=0.0)
    tolerance = relative * np.maximum(np.abs(theirs), np.abs(mine)) + smallest
    bad = np.flatnonzero(~(np.abs(theirs - mine) <= tolerance))
    return int(bad[0]) if len(bad) else None


def _values(recorded: Mapping[str, Any]) -> tuple[Any, torch.dtype]:
    """The values of a record, and the dtype of the weights."""
    values = np.frombuffer(base64.b64decode(recorded["values"]), dtype="<f4").astype(np.float64)
    return values, _DTYPES[recorded["dtype"]]


def require_same_weights(what: str, recorded: Mapping[str, Any], samples: Mapping[str, Tensor | None]) -> None:
    """Refuse a base model with a layer whose weight differs from the record.

    Args:
        what: The adapter or the basis, as the beginning of a sentence.
    """
    if (layer := differing_layer(recorded, samples)) is not None:
        raise ArtifactError(
            f"{what} was made on another base model: the weight of layer {layer!r} differs. Load that model, or "
            "pass allow_other_base=True to PeftModel.from_pretrained to use it on this one."
        )
