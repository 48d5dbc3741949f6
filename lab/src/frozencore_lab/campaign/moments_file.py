"""The moments file: the sums of every layer in one safetensors file, with a fingerprint of their origin.

Loading refuses moments of another model, other data or other options, because stale moments give a wrong basis without
any other sign. The safetensors metadata have one key, with JSON: several keys would be written in a random order, so
the same moments would give different bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from frozencore.calibration.calibration_options import CalibrationOptions, options_of_sums
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_write
from frozencore.files.fingerprint import fingerprint_model, fingerprint_tensors
from frozencore.maths.moments import LayerMoments
from frozencore.text import one_line

FORMAT, KEY = 2, "frozencore-moments"


@dataclass(frozen=True)
class MomentsFingerprint:
    """The origin of moments: hashes of the base weights and of the batches, and the options of the pass."""

    model: str
    data: str
    options: dict[str, Any]

    @classmethod
    def of(
        cls, model: torch.nn.Module, batches: Iterable[Mapping[str, Any]], options: CalibrationOptions | None = None
    ) -> MomentsFingerprint:
        """The fingerprint of moments collected from this model, these batches and these options."""
        return cls(
            model=fingerprint_model(model),
            data=fingerprint_batches(batches),
            options=options_of_sums(asdict(options or CalibrationOptions())),
        )


def fingerprint_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of a model's input: every tensor of every batch, in order."""
    return fingerprint_tensors(
        (f"{index}.{key}", batch[key])
        for index, batch in enumerate(batches)
        for key in sorted(batch)
        if isinstance(batch[key], torch.Tensor)
    )


def save_moments(path: Path, moments: Mapping[str, LayerMoments], fingerprint: MomentsFingerprint) -> None:
    """Write moments to a safetensors file, through a temporary file that is flushed and renamed."""
    tensors = {
        f"{name}/{moment}": getattr(layer, moment).detach().cpu().contiguous()
        for name, layer in moments.items()
        for moment in layer.names()
    }
    num_tokens = {name: layer.num_tokens for name, layer in moments.items()}
    header = {"format": FORMAT, "fingerprint": asdict(fingerprint), "num_tokens": num_tokens}
    with atomic_write(path) as aside:
        save_file(tensors, aside, metadata={KEY: json.dumps(header)})


def load_moments(path: Path, expected: MomentsFingerprint | None = None) -> dict[str, LayerMoments]:
    """Read moments from a file.

    Args:
        expected: The origin that the file must have; None accepts any.

    Raises:
        ArtifactError: The file is damaged, or of another model, data or options.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"The moments file {path} is damaged ({one_line(error, 200)}). Remove it.") from error
    origin = header["fingerprint"]
    if expected is not None and origin != (wanted := asdict(expected)):
        differing = ", ".join(part for part in wanted if origin.get(part) != wanted[part])
        raise ArtifactError(f"The moments in {path} differ from the run's in {differing}. Remove the file.")
    sums: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header["num_tokens"]}
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition("/")
        sums[name][moment] = tensor
    return {name: LayerMoments(num_tokens=count, **sums[name]) for name, count in header["num_tokens"].items()}
