"""torch on demand, for verbs that look at files and mostly need none of it: importing it takes two seconds."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _OnDemand(ModuleType):
    """Stands where a module will be: it is imported when something of it is used, ``from torch import ...`` included.

    ``importlib.util.LazyLoader`` would not do: a second ``import torch`` already loads its module.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def torch_on_demand() -> None:
    """Import torch from now on when something of it is used; where it is imported already, nothing changes."""
    if "torch" not in sys.modules:
        stand_in = _OnDemand("torch")
        stand_in.__spec__ = find_spec("torch")  # others ask it whether torch is there
        sys.modules["torch"] = stand_in
