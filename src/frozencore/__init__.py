"""frozencore: fine-tune large language models by training only r x r cores between frozen, calibrated bases.

Importing this package registers the method with PEFT, so that ``peft.get_peft_model`` and ``PeftModel.from_pretrained``
know :class:`FrozenCoreConfig`, and the architecture of basis models with transformers. Importing PEFT and torch takes
seconds, so the ``frozencore`` command (``frozencore_command``) starts without them, and each verb imports what it uses.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

IMPORTED_AT = time.perf_counter()  # the command counts its time from here, before anything slow is imported
__version__ = "0.1.0"

if TYPE_CHECKING or "frozencore_command" not in sys.modules:
    from frozencore.public import *  # noqa: F403 - all that is public, listed there
    from frozencore.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if find_spec(f"{__name__}.{name}") is not None or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.public"), name)


def __dir__() -> list[str]:
    return sorted([*import_module(f"{__name__}.public").__all__, "__version__"])
