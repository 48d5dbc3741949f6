"""Find the model, rows, tenants and basis of a run before torch and PEFT are imported, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from unicodedata import normalize

from frozencore.errors import ConfigError, DataError, ModelError
from frozencore.files.adapter_folder import require_header
from frozencore.files.gguf_file import cache_folder, find_gguf
from frozencore.files.hub import is_hub_id, safe_loading
from frozencore.files.names import MODEL_CONFIG
from frozencore.files.strict_yaml import read_yaml
from frozencore.files.tenant_names import RESERVED, name_on_disk, require_tenant_name
from frozencore.text import nearest_name
from frozencore.tune.config import RunConfig
from frozencore.tune.pocket import POCKET_MODEL, pocket_model_path
from frozencore.tune.rows.forms import require_rows
from frozencore.tune.rows.row_sources import KINDS, RowFile, row_file
from frozencore.tune.rows.sources import is_named

_PART = re.compile(
    r"(?P<name>.+)[._-](train|training|eval|evaluation|test|valid|validation|dev|held-?out)", re.IGNORECASE
)
SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct (:mod:`frozencore.tune.smollm2`) in place of a hub id."""


def model_location(name: str) -> str:
    """The folder of a model's short name; any other name is returned unchanged.

    Raises:
        ModelError: ``smollm2`` has not been fetched.
    """
    if name == POCKET_MODEL:
        return str(pocket_model_path())
    return str(smollm2_path()) if name == SMOLLM2 else name


def smollm2_path() -> Path:
    """The folder of the unpacked model, for ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ModelError: The folder does not exist on this machine.
    """
    folder = smollm2_folder()
    if not (folder / MODEL_CONFIG).is_file():
        raise ModelError(
            f"Model {SMOLLM2} is not on this machine: `make smollm2`, or `python -m frozencore.tune.smollm2` where "
            f"there is no make, fetches it once (93 MB, to {folder})."
        )
    return folder


def smollm2_folder() -> Path:
    return cache_folder() / SMOLLM2


def require_files(config: RunConfig) -> None:
    """Check that the model, rows and basis of a configuration exist.

    Raises:
        FrozenCoreError: Something is missing; the message names it.
    """
    require_model(config.model.name)
    for source in (*config.rows.sources, config.rows.calibration_data):
        if source is not None and not is_named(source):
            require_rows(source, config.rows.columns)
    if config.rows.eval_data is not None:
        require_rows(config.rows.eval_data, config.rows.columns, option="--eval-data")
    require_data_root(config.rows.data_root)
    if config.method.basis is not None:
        require_basis(config.method.basis)


def require_basis(place: str) -> None:
    """Check that a basis exists; a hub id is not looked up.

    Raises:
        ArtifactError: It is no folder of a basis.
    """
    if Path(place).exists() or not is_hub_id(place):
        require_header(Path(place))


def require_model(name: str) -> None:
    """Check that a model exists.

    Raises:
        ModelError: There is no such folder, it holds no model, or the hub cannot be reached.
    """
    place = model_location(name)
    try:
        if find_gguf(place) is not None:
            return
        safe_loading(place)
    except ModelError as error:
        meant = nearest_name(name, (POCKET_MODEL, SMOLLM2))
        raise ModelError(f"{error} Did you mean {meant!r}?" if meant else str(error)) from error
    if Path(place).is_dir() and not (Path(place) / MODEL_CONFIG).is_file():
        raise ModelError(
            f"--model {name} cannot be read as a causal language model: it has no {MODEL_CONFIG}. Give a folder that "
            "save_pretrained wrote, or a hub id."
        )


def require_data_root(folder: Path | None) -> None:
    """Check that the folder of data sets exists.

    Raises:
        DataError: There is no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise DataError(f"--data-root must name the folder that holds the data sets, but there is no folder {folder}.")


def require_tenant_files(config: RunConfig) -> dict[str, Path]:
    """Check a configuration of many tenants before torch is imported; returns the row file of each."""
    require_files(config.replaced(data=()))
    tenants = find_tenants(Path(config.rows.learns))
    for file in tenants.values():
        require_rows(str(file), config.rows.columns)
    return tenants


def other_files(path: Path) -> list[str]:
    """The names in a folder of tenants that are not row files; none beside a YAML file."""
    return [file.name for file in _visible(path) if row_file(file.name) is None] if path.is_dir() else []


def _visible(folder: Path) -> list[Path]:
    """The files in a folder, in order, without those that a Mac adds (``.DS_Store``, and ``._anna.jsonl``)."""
    return sorted(file for file in folder.iterdir() if file.name != ".DS_Store" and not file.name.startswith("._"))


def _require_no_held_out(files: Mapping[Path, RowFile | None]) -> None:
    """Refuse a folder in which one data set has a file to train on and one to score: both would be tenants."""
    parts: dict[str, list[str]] = {}
    for file, name in files.items():
        if name is not None and (whole := _PART.fullmatch(name.stem)) is not None:
            parts.setdefault(whole["name"], []).append(file.name)
    twice = next((names for names in parts.values() if len(names) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"Each file in the folder of --tenants is a tenant that is trained, but {' and '.join(twice)} look like "
            "parts of one data set. Move those to score to another folder, or name the tenants in a YAML file."
        )


def find_tenants(path: Path) -> dict[str, Path]:
    """The row file of each tenant, by name, in the order of the names or of the YAML file.

    Raises:
        DataError: The folder or file does not exist, or has no row files.
        ConfigError: A name cannot be a folder name or appears twice, or the YAML file is not a table of files.
    """
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        content = read_yaml(path)
        words = [word for line in content.items() for word in line] if isinstance(content, dict) else []
        if not words or not all(isinstance(word, str) for word in words):  # YAML reads 7 as a number, and no as false
            raise ConfigError(
                f"{path} must name a row file for each tenant, one line each: 'anna: rows/anna.jsonl'. Quote names "
                "such as '7' and 'no'."
            )
        named = [(name, path.parent / file) for name, file in content.items()]
    else:
        files = {file: row_file(file.name) for file in (_visible(path) if path.is_dir() else ())}
        named = [(name.stem, file) for file, name in files.items() if name is not None]
        if not named:
            what = "has none" if path.is_dir() else "is neither" if path.exists() else "does not exist"
            raise DataError(
                f"--tenants must name a folder with {KINDS} for each tenant, or a YAML file, but {path} {what}."
            )
        _require_no_held_out(files)
    tenants: dict[str, Path] = {}
    known = {name: name for name in RESERVED}  # by the name on a disk that ignores case
    for given, file in named:
        name = normalize("NFC", given)  # a Mac decomposes accents in the names of files
        require_tenant_name(name, file.name)
        if (other := known.setdefault(name_on_disk(name), name)) != name or name in tenants:
            raise ConfigError(
                f"Each tenant has one row file and a folder that no other has, on a disk that ignores case too, but "
                f"{file.name} is {name!r} and another is {other!r}. Rename one."
            )
        tenants[name] = file
    return tenants
