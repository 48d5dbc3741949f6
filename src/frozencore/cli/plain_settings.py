"""Whether the configuration of a saved adapter holds what most of them hold, each value of its type.

``FrozenCoreConfig`` knows more of it, and takes PEFT to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from frozencore.constructors import constructor_options, find_constructor
from frozencore.constructors.options import ScaleOptions
from frozencore.errors import FrozenCoreError
from frozencore.options import options_of, without_lists


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_none(value: Any) -> bool:
    return value is None


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_texts_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values()))


def _is_ranks(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_whole(rank) and rank > 0 for rank in value.values())


def _is_targets(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


ALWAYS: Mapping[str, Callable[[Any], bool]] = {
    "alpha_pattern": lambda value: value == {},
    "auto_mapping": _is_texts_or_none,
    "base_model_name_or_path": _is_text_or_none,
    "calibration_tokens": lambda value: value is None or _is_whole(value),
    "constructor": _is_text,
    "ensure_weight_tying": lambda value: value is False,
    "exclude_modules": _is_none,
    "inference_mode": _is_switch,
    "init_weights": _is_switch,
    "layers_pattern": _is_none,
    "layers_to_transform": _is_none,
    "load_bases": lambda value: value is True,
    "modules_to_save": _is_none,
    "peft_type": _is_text,
    "peft_version": _is_text_or_none,
    "r": lambda value: _is_whole(value) and value > 0,
    "rank_pattern": _is_ranks,
    "revision": _is_text_or_none,
    "seal": lambda value: isinstance(value, dict),
    "seed": _is_whole,
    "target_modules": _is_targets,
    "task_type": lambda value: value in (None, "CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"),
    "trainable_token_indices": _is_none,
}
"""What a configuration holds beside ``alpha`` and the options of constructors."""
SOMETIMES: Mapping[str, Callable[[Any], bool]] = {
    "basis": _is_text_or_none,
    "basis_id": _is_text,
    "basis_revision": _is_none,
    "rank_budget": lambda value: _is_whole(value) and value > 0,
}


def are_plain(values: Mapping[str, Any]) -> bool:
    """Whether nothing is missing, unknown, rare, or of a wrong type."""
    options = {**constructor_options(), **options_of(ScaleOptions)}
    if not ALWAYS.keys() | options.keys() <= values.keys() <= ALWAYS.keys() | SOMETIMES.keys() | options.keys():
        return False
    if not all(fits(values[name]) for name, fits in {**ALWAYS, **SOMETIMES}.items() if name in values):
        return False
    try:
        find_constructor(values["constructor"])
        for name, option in options.items():
            if option.plain is float and not isinstance(values[name], float):
                return False
            option.check(without_lists(values[name]))
    except FrozenCoreError:
        return False
    return True
