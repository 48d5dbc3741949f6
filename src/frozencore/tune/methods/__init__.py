"""The table of methods: a frozen core for every basis constructor, and methods of PEFT.

A new method needs a class and a row below; constructors have rows already. The learning rates are usual middle values,
from which a search can start; that of cores is in ``frozen_core.py``. The warm-up is the paper's 0.1.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from frozencore.errors import ConfigError
from frozencore.tune.methods.from_peft import LoRA, PiSSA
from frozencore.tune.methods.frozen_core import FrozenCores
from frozencore.tune.methods.method import AdapterOptions, Method, Targets
from frozencore.tune.methods.whole_weights import FullFineTuning
from frozencore.words import unknown_name

__all__ = ["METHODS", "AdapterOptions", "Method", "Targets", "bases_name", "find_method", "method_name"]

METHODS: ChainMap[str, Method] = ChainMap(
    {
        "lora": LoRA(label="LoRA", word="factors", trains=("factors",), learning_rate=1e-3),
        "dora": LoRA(
            label="DoRA", word="magnitudes", trains=("factors", "magnitudes"), learning_rate=1e-3, use_dora=True
        ),
        "pissa": PiSSA(label="PiSSA", word="leading", trains=("factors",), learning_rate=2e-4),
        "full": FullFineTuning(label="Full fine-tuning", word="weights", trains=("weights",), learning_rate=2e-5),
    },
    FrozenCores(),  # type: ignore[arg-type]  # only read
)


def find_method(name: str) -> Method:
    """The table's row of this name.

    Raises:
        ConfigError: There is no such method; the message suggests the nearest name.
    """
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    return METHODS[name]


def method_name(name: str) -> str:
    """A method's label; the name itself if it is not in the table, as in records of another version."""
    return METHODS[name].label if name in METHODS else name


def bases_name(method: str, options: Mapping[str, Any]) -> str:
    """A method's label, with the basis options that are not at their defaults."""
    return ", ".join([method_name(method), *(f"{name} {value}" for name, value in options.items())])
