"""The files of an adapter and of a basis: names, headers, and errors for missing or damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.files.hub import hub_answers, is_hub_id, why_not_given
from frozencore.words import one_line

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
HEADER_FILE, FACTORS_FILE = "basis.json", "basis.safetensors"  # the files of a basis
MODEL_CONFIG, BASIS_MODEL_TYPE = "config.json", "frozencore_basis_model"
IN_A_RUN = "adapter"  # the adapter's folder inside a run's
PEFT_TYPE = "FROZENCORE"
LARGEST_CONFIG = 2**24
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
SEAL_FORMAT, BASIS_FORMAT = 3, 1  # a seal of format 3 is of an adapter in rounds, which is refused


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``.

    Raises:
        ArtifactError: It is missing, damaged, too large, or not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ArtifactError(missing(directory, CONFIG_FILE))
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"{CONFIG_FILE} is larger than {LARGEST_CONFIG:,} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_FILE} is no JSON object")
    except (ValueError, OSError, RecursionError) as error:
        raise damaged(directory, error) from error
    return values


def bytes_of(path: Path) -> bytes:
    """Read a whole file of an adapter folder.

    Raises:
        ArtifactError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path.parent, error) from error


def missing(directory: Path, name: str) -> str:
    """The error message for a missing file."""
    if name == WEIGHTS_FILE and (directory / PICKLE_FILE).exists():
        return (
            f"Weights are read from {WEIGHTS_FILE}, but {directory} holds {PICKLE_FILE}: a pickle can run code and is "
            "never opened. Ask for the adapter as safetensors."
        )
    return (
        f"An adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, but {directory} has no {name}. "
        "Point at the folder that save_pretrained or `frozencore tune` wrote."
    )


def damaged(directory: Path, error: Exception) -> ArtifactError:
    """The error for a folder that cannot be read, with the reason."""
    reason = one_line(error, 200)
    return ArtifactError(f"The adapter in {directory} is damaged ({reason}). Save or download it again.")


def read_seal(origin: str, seal: Any) -> dict[str, Any]:
    """Check that this version understands a seal; None gives an empty seal.

    Raises:
        ArtifactError: It is malformed or of a newer format.
    """
    if seal is None:
        return {}
    number = seal.get("format") if isinstance(seal, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArtifactError(f"The seal of the adapter in {origin} is malformed. Save or download it again.")
    if number > SEAL_FORMAT:
        raise ArtifactError(
            f"The adapter in {origin} has format {number}, and this frozencore reads up to {SEAL_FORMAT}. "
            "Run: pip install -U frozencore"
        )
    return dict(seal)


def basis_header(place: str, text: str) -> dict[str, Any]:
    """Read the content of ``basis.json`` and check the identity in it.

    Raises:
        ArtifactError: It is of a newer format.
        ValueError, KeyError, TypeError, AttributeError: It is damaged.
    """
    header = json.loads(text)
    _require_sound(place, header)
    return dict(header)


def _require_sound(place: str, header: Mapping[str, Any]) -> None:
    """Check a header against its identity."""
    rest = {key: value for key, value in header.items() if key != "identity"}
    number = header["format"]
    if "grown_from" in header:
        raise ArtifactError(
            f"A basis has the columns of one calibration, but that in {place} grew from another one, which this "
            "version does not read. Calibrate a new one."
        )
    if isinstance(number, int) and number > BASIS_FORMAT:
        raise ArtifactError(
            f"The basis in {place} has format {number}, and this frozencore reads up to {BASIS_FORMAT}. "
            "Run: pip install -U frozencore"
        )
    if fingerprint_options(rest) != header["identity"]:
        raise ValueError(f"{HEADER_FILE} was changed since it was written")
    _require_header_types(header)


def _require_header_types(header: Mapping[str, Any]) -> None:
    scales, base = header["scales"], header["base"]
    fine = (
        isinstance(scales, dict) and scales and isinstance(header["options"], dict)
        and all(type(s) in (int, float) and abs(s) <= LARGEST_FLOAT32 for s in scales.values())
        and (base is None or isinstance(base, dict))
        and all(isinstance(header[name], str | None) for name in ("calibrated_on", "base_model"))
    )  # fmt: skip
    if not fine:
        raise ValueError(f"{HEADER_FILE} holds a value of a wrong type")


def adapter_in(folder: Path) -> Path:
    """The folder of an adapter or a basis: the folder itself, or ``adapter`` in the folder of a run.

    Raises:
        ArtifactError: Neither of them holds one.
    """
    for place in (folder, folder / IN_A_RUN):
        if any((place / name).is_file() for name in (CONFIG_FILE, HEADER_FILE)):
            return place
    raise ArtifactError(missing(folder, CONFIG_FILE))


def places_of_a_basis(adapter: Path | None) -> Iterator[Path]:
    """The folders that may hold the basis of an adapter of cores only: its own folder and the two above it."""
    if adapter is not None:
        for place in (adapter, *adapter.absolute().parents[:2]):
            yield from (place / "basis", place)


def is_folder(place: str | Path) -> bool:
    """Return whether a text names an existing folder; False for a too long name or a zero byte."""
    try:
        return Path(place).is_dir()
    except (OSError, ValueError):
        return False


def folder_of(place: str) -> Path:
    """The folder of an adapter or a basis on this disk: the folder itself, or the offline cache of a hub id.

    Files of a hub id are downloaded if the hub answers, except pickled weights.

    Raises:
        ArtifactError: It is not a folder, and neither the cache nor the hub has it.
    """
    folder = Path(place)
    if not is_hub_id(place) or is_folder(place):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = [CONFIG_FILE, WEIGHTS_FILE, HEADER_FILE, FACTORS_FILE, "README.md"]
    wanted = [*files, *(f"basis/{name}" for name in (HEADER_FILE, FACTORS_FILE))]
    try:
        only_here = not hub_answers("model", place)
        return Path(snapshot_download(place, allow_patterns=wanted, local_files_only=only_here))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"No adapter at {place}: it is neither a folder nor in the offline cache, and "
            f"{why_not_given(error)}. Give the folder of a saved adapter."
        ) from error
