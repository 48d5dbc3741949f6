"""The name ``torch`` for modules that hold options beside functions of tensors: torch is imported at its first use.

The command line reads every option to check words and to print help, which takes no tensor. Importing torch takes
seconds. A module writes ``from frozencore.torch_later import torch`` in place of ``import torch``; ``sys.modules`` is
left as it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _AtFirstUse:
        """Gives what the module of that name has."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            self.__dict__[name] = found  # the next use of it finds it here
            return found

    torch = _AtFirstUse("torch")
