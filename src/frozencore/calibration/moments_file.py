"""The moments file: the sums of every layer in one safetensors file, with a fingerprint of their origin.

Loading refuses a file of another model, other data or other options, because stale moments give a wrong basis without
any other sign. It also refuses a file whose content does not have the recorded hash.

The safetensors metadata hold one key, with JSON. Several keys would be written in a random order, so the same moments
would give different bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from frozencore.calibration.calibration_options import CalibrationOptions, options_of_sums
from frozencore.device import torch
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_write
from frozencore.files.fingerprint import fingerprint_batches, fingerprint_model, fingerprint_tensors
from frozencore.maths.linalg import all_finite
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
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


def save_moments(path: str | Path, moments: Mapping[str, LayerMoments], fingerprint: MomentsFingerprint) -> None:
    """Write moments to a safetensors file, through a temporary file that is flushed and renamed.

    Raises:
        ArtifactError: The moments are not finite; an existing file stays.
    """
    tensors = {
        f"{name}/{moment}": getattr(layer, moment).detach().cpu().contiguous()
        for name, layer in moments.items()
        for moment in layer.names()
    }
    if (bad := _not_finite(tensors)) is not None:
        raise ArtifactError(
            f"Moments are finite, but {bad!r} holds NaN or Inf: {path} is not written. Calibrate again."
        )
    num_tokens = {name: layer.num_tokens for name, layer in moments.items()}
    said = {"fingerprint": asdict(fingerprint), "num_tokens": num_tokens}
    header = {"format": FORMAT, **said, "content_sha256": _hash_of(said, tensors)}
    with atomic_write(Path(path)) as aside:
        from safetensors.torch import save_file

        save_file(tensors, aside, metadata={KEY: json.dumps(header)})


def require_moments(path: Path) -> None:
    """Raise an ``ArtifactError`` if there is no moments file."""
    if not path.is_file():
        raise ArtifactError(f"There is no moments file at {path}. Write one with `frozencore calibrate`.")


def load_moments(path: str | Path, expected: MomentsFingerprint | None = None) -> dict[str, LayerMoments]:
    """Read moments from a file.

    Args:
        expected: The origin that the file must have; None accepts any.

    Raises:
        ArtifactError: No such file, damaged, not a moments file, not finite, or of another model, data or options.
    """
    path = Path(path)
    require_moments(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            said = {name: header[name] for name in ("fingerprint", "num_tokens")}
            if expected is not None:
                _require_same(path, said["fingerprint"], asdict(expected))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, RecursionError, RuntimeError) as error:
        reason = one_line(error, 200)
        raise ArtifactError(f"The moments file {path} is damaged ({reason}). Calibrate again.") from error
    if header.get("content_sha256") != _hash_of(said, tensors):
        raise ArtifactError(f"The moments file {path} is damaged (its content has another hash). Calibrate again.")
    if (bad := _not_finite(tensors)) is not None:
        raise ArtifactError(f"The moments file {path} holds NaN or Inf in {bad!r}, or no floats. Calibrate again.")
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in said["num_tokens"]}
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition("/")
        if name not in found or moment not in MOMENT_NAMES:
            raise ArtifactError(f"The moments file {path} holds an unknown tensor {key!r}. Calibrate again.")
        found[name][moment] = tensor
    return {name: LayerMoments(num_tokens=said["num_tokens"][name], **sums) for name, sums in found.items()}


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The file's header: token counts by layer, the fingerprint, and the hash over both and the tensors."""
    header = json.loads(metadata.get(KEY, "{}"))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not a moments file of this version ({KEY}-{FORMAT}). Calibrate again.")
    num_tokens, fingerprint = header["num_tokens"], header["fingerprint"]
    if not (isinstance(num_tokens, dict) and all(type(count) is int for count in num_tokens.values())):
        raise ValueError("its token counts are malformed")
    if not (isinstance(fingerprint, dict) and isinstance(fingerprint.get("options", {}), dict)):
        raise ValueError("its fingerprint is malformed")
    return header


def _hash_of(said: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a file's header and tensors."""
    content = json.dumps(said) + fingerprint_tensors(sorted(tensors.items()))
    return hashlib.sha256(content.encode()).hexdigest()


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor that holds NaN, Inf or no floats."""
    for key, X in tensors.items():
        if not X.is_floating_point() or not all_finite(X.float() if X.dtype.itemsize == 1 else X):
            return key
    return None


def _require_same(path: Path, came: dict[str, Any], expected: dict[str, Any]) -> None:
    for part, what in (("model", "another base model"), ("data", "other calibration data")):
        if came[part] != expected[part]:
            raise ArtifactError(
                f"The moments in {path} are of {what} ({came[part][:12]}, asked for {expected[part][:12]}). "
                "Calibrate again, or name another file."
            )
    if (options := came["options"]) != expected["options"]:
        asked = expected["options"]
        differing = sorted(name for name in options.keys() | asked.keys() if options.get(name) != asked.get(name))
        raise ArtifactError(
            f"The moments in {path} were collected with other options ({', '.join(differing)}). Calibrate again."
        )
