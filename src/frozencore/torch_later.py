"""A lazy ``torch`` for modules that define options: torch is imported at its first use.

The command line reads every option to check flags and print help, without tensors, and importing torch takes seconds. A
module writes ``from frozencore.torch_later import torch`` in place of ``import torch``; ``sys.modules`` is unchanged.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _AtFirstUse:
        """A module that is imported at the first use of an attribute."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            self.__dict__[name] = found  # the next access finds it here
            return found

    torch = _AtFirstUse("torch")
