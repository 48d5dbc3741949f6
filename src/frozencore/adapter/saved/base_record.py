"""A record of the base model that an adapter or a basis was made on: a few values of each adapted weight.

Values are stored instead of a hash, because a model may be loaded in another dtype, and float32 -> float16 -> bfloat16
does not round like float32 -> bfloat16. In the same dtype values must be equal; between two dtypes they may differ by
the rounding of both. A quantised, sharded or empty (meta) weight has no values, so nothing is recorded or compared.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frozencore.errors import ArtifactError

NUM_SAMPLES = 8  # per weight, evenly spaced from the first to the last value
BASE_VALUES = "frozencore_base_"
"""The prefix of the name of the record as a tensor; the dtype of the weights follows."""
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
    found = [samples[name] for name in sorted(samples)]
    plain = [sample for sample in found if sample is not None]
    if not plain or len(plain) < len(found):
        return None
    together = len({sample.device for sample in plain}) == 1  # then one copy serves all
    values = torch.cat(plain if together else [sample.cpu() for sample in plain]).float().cpu().numpy()
    coarsest = max({sample.dtype for sample in plain}, key=lambda dtype: torch.finfo(dtype).eps)
    return {
        "dtype": str(coarsest).removeprefix("torch."),
        "values": _encoded(values),
    }


def _encoded(values: Any) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def record_as_tensor(recorded: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The record as a tensor of an adapter's file: PEFT's state dicts hold nothing but tensors."""
    if recorded is None:
        return {}
    values, dtype, _ = _values(recorded)
    return {f"{BASE_VALUES}{str(dtype).removeprefix('torch.')}": torch.from_numpy(values.astype("<f4"))}


def record_in(tensors: Mapping[str, Tensor]) -> dict[str, str] | None:
    """The record in the tensors of an adapter, which may have been rounded or averaged since; None if it has none."""
    for key, tensor in tensors.items():
        if BASE_VALUES in key and not tensor.is_meta:
            return {
                "dtype": key.partition(BASE_VALUES)[2],
                "values": _encoded(tensor.detach().float().cpu().numpy()),
                "rounded": str(tensor.dtype).removeprefix("torch."),
            }
    return None


def differing_layer(recorded: Mapping[str, Any], samples: Mapping[str, Tensor | None]) -> str | None:
    """The first layer whose weight differs from the record; None if all agree or cannot be compared."""
    found = _first_difference(recorded, record_base(samples))
    return None if found is None else sorted(samples)[found // NUM_SAMPLES]


def split_record(recorded: Mapping[str, Any], layers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A record of these layers, whose order does not matter, as one for each; nothing if it is of other layers."""
    names, (values, _, _) = sorted(layers), _values(recorded)
    if len(values) != NUM_SAMPLES * len(names):
        return {}
    return {
        name: {**recorded, "values": _encoded(values[i * NUM_SAMPLES : (i + 1) * NUM_SAMPLES])}
        for i, name in enumerate(names)
    }


def differs(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two records of the same layers, where both are known, are of different weights."""
    return _first_difference(one, other) is not None


def require_one_base(
    first: object, one: Mapping[str, Any] | None, second: object, other: Mapping[str, Any] | None
) -> None:
    """Refuse to bring two saved adapters of the same layers together whose records are of different base models."""
    if differs(one, other):
        raise ArtifactError(
            f"Cores work on the base model that they were trained on, but {second} was trained on other weights than "
            f"{first}. Take adapters of one base model."
        )


def _first_difference(recorded: Mapping[str, Any] | None, present: Mapping[str, Any] | None) -> int | None:
    """The position of the first value that differs between two records; None if all agree or cannot be compared."""
    if recorded is None or present is None:
        return None
    (theirs, their_dtype, their_rounding), (mine, my_dtype, my_rounding) = _values(recorded), _values(present)
    if theirs.shape != mine.shape:
        return None  # layers differ; their names are checked elsewhere
    kinds = [torch.finfo(dtype) for dtype in (their_dtype, my_dtype) if their_dtype != my_dtype]
    relative = sum(kind.eps for kind in kinds) / 2 + their_rounding + my_rounding
    smallest = max((kind.smallest_normal * kind.eps for kind in kinds), default=0.0)
    tolerance = relative * np.maximum(np.abs(theirs), np.abs(mine)) + smallest
    bad = np.flatnonzero(~(np.abs(theirs - mine) <= tolerance))
    return int(bad[0]) if len(bad) else None


def _values(recorded: Mapping[str, Any]) -> tuple[Any, torch.dtype, float]:
    """The values of a record, the dtype of the weights, and what the values may have lost since, relative."""
    try:
        values = np.frombuffer(base64.b64decode(recorded["values"], validate=True), dtype="<f4").astype(np.float64)
        rounding = 2 * torch.finfo(_DTYPES[recorded["rounded"]]).eps if "rounded" in recorded else 0.0
        return values, _DTYPES[recorded["dtype"]], rounding
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ArtifactError(
            f"The adapter's record of its base model is malformed ({error}). Save or download it again."
        ) from error


def other_base(what: str, layer: str) -> ArtifactError:
    """The error for a layer whose weight differs from the record."""
    return ArtifactError(
        f"{what} was made on another base model: the weight of layer {layer!r} differs. Load that model, or "
        "pass allow_other_base=True to PeftModel.from_pretrained to use it on this one."
    )
