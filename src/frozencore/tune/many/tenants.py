"""Find the tenants: a folder with a row file named after each tenant, or a YAML file ``name: file``."""

from __future__ import annotations

import re
from pathlib import Path
from unicodedata import normalize

from frozencore.errors import ConfigError, DataError
from frozencore.files.strict_yaml import read_yaml
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import BASIS, CHECKPOINTS
from frozencore.tune.locate import require_files
from frozencore.tune.rows.row_sources import KINDS, READERS, require_source
from frozencore.words import one_line

RESERVED = (BASIS, CHECKPOINTS)  # names of other folders beside those of the tenants
_NAME = re.compile(r"\w[\w.-]{0,99}")


def require_tenant_files(config: RunConfig) -> None:
    """Check a configuration of many tenants before torch is imported."""
    require_files(config.replaced(data=None))
    for file in find_tenants(Path(config.rows.learns)).values():
        require_source(str(file))


def find_tenants(path: Path) -> dict[str, Path]:
    """The row file of each tenant, by name, in the order of the names or of the YAML file.

    Raises:
        DataError: The folder or file does not exist, or has no row files.
        ConfigError: A name cannot be a folder name or appears twice, or the YAML file is not a table of files.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
        if not files:
            raise DataError(f"--tenants {path} must hold {KINDS} for each tenant, but holds none.")
        named = [(file.stem, file) for file in files]
    elif path.suffix in (".yaml", ".yml"):
        content = read_yaml(path)
        if not isinstance(content, dict) or not content or not all(isinstance(v, str) for v in content.values()):
            raise ConfigError(f"{path} must name a row file for each tenant, one line each: 'anna: rows/anna.jsonl'.")
        named = [(str(name), path.parent / file) for name, file in content.items()]
    else:
        raise DataError(f"--tenants must name a folder of row files or a YAML file, but {path} is neither.")
    tenants: dict[str, Path] = {}
    known = {name: name for name in RESERVED}  # by the name on a disk that ignores case
    for name, file in named:
        if not _NAME.fullmatch(name) or _on_disk(name) in RESERVED:
            raise ConfigError(
                f"A tenant's name becomes a folder's: at most 100 letters, digits, '.', '_' and '-' (not '.' or '-' "
                f"first), and not {' or '.join(RESERVED)}, but {one_line(name, 60)!r} came. Rename {file.name}."
            )
        if name in tenants:
            raise ConfigError(f"Each tenant has one row file, but {name!r} has {tenants[name].name} and {file.name}.")
        if (other := known.setdefault(_on_disk(name), name)) != name:
            raise ConfigError(
                f"The tenants {other!r} and {name!r} would share a folder on a disk that ignores case. Rename one."
            )
        tenants[name] = file
    return tenants


def _on_disk(name: str) -> str:
    return normalize("NFC", name).casefold()
