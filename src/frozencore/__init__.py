"""frozencore: fine-tune large language models by training only r x r cores between frozen, calibrated bases.

Importing this package registers the method with PEFT, so that ``peft.get_peft_model`` and ``PeftModel.from_pretrained``
know :class:`FrozenCoreConfig`, and the architecture of basis models with transformers. PEFT and torch take seconds to
import; the command line alone starts without them, and each of its verbs imports what it uses.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process runs ``frozencore ...`` or ``python -m frozencore ...``, and no program of a user's."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started != "-m":  # what it is while Python still looks for the module to run
        return Path(started).stem == __name__
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1 :][:1] == [__name__]


if TYPE_CHECKING or not _is_the_command():
    from frozencore.public import *  # noqa: F403 - all that is public, listed there
    from frozencore.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if find_spec(f"{__name__}.{name}") is not None or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.public"), name)
