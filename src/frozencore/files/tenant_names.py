"""The names of tenants, which become names of folders."""

from __future__ import annotations

import re
from unicodedata import category, normalize

from frozencore.errors import ConfigError
from frozencore.files.names import BASIS, COMPRESSION_FILE, MANIFEST_FILE, RUN_FILE, UNFINISHED_FOLDER
from frozencore.text import one_line

RESERVED = (BASIS, MANIFEST_FILE, RUN_FILE, COMPRESSION_FILE, UNFINISHED_FOLDER)
"""Names of folders and files that stand beside the folders of tenants."""
LONGEST_NAME = 100, 200
"""Characters and bytes of a tenant's name at most: file systems take 255 bytes, and files beside add to the name."""


def require_tenant_name(name: str, of: str) -> None:
    """Check that a tenant's name can be a folder's.

    Args:
        of: The file or folder that it is from.

    Raises:
        ConfigError: It cannot.
    """
    if not is_tenant_name(name):
        raise ConfigError(
            f"A tenant's name becomes a folder's: at most {LONGEST_NAME[0]} letters, digits, '.', '_' and '-' (not "
            f"'.' or '-' first) of at most {LONGEST_NAME[1]} bytes, and not {' or '.join(RESERVED)}, but "
            f"{one_line(name, 60)!r} was given. Rename {one_line(of)}."
        )


def is_tenant_name(name: str) -> bool:
    """Return whether a name can be that of a tenant's folder.

    A letter may carry the marks of its script, as in Hindi, Thai and Tamil, and a joiner before the next letter.
    """
    bare = "".join(character for character in name if category(character) not in ("Mn", "Mc"))
    is_word = re.fullmatch(r"\w([\u200c\u200d]?[\w.-])*", bare) is not None and re.match(r"\w", name) is not None
    is_short = len(name) <= LONGEST_NAME[0] and len(name.encode(errors="surrogateescape")) <= LONGEST_NAME[1]
    return is_word and is_short and name_on_disk(name) not in RESERVED


def name_on_disk(name: str) -> str:
    """The name on a disk that ignores case and composes accents."""
    return normalize("NFC", name).casefold()
