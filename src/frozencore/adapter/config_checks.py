"""Checks of a configuration: names of options, and fields that name modules, layers or tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from frozencore.adapter.layer_names import compile_expression, is_expression, is_searched, plain_key
from frozencore.errors import ConfigError
from frozencore.words import nearest_name

_WAY_OUT = "Give a list of names such as ['q_proj', 'v_proj']"
_NO_DROPOUT = "a core is trained without dropout: leave it out"
_INITIAL = "constructor chooses the bases (fcca, eva, lora_xs, ...), and cores start at zero: give constructor instead"
_ALPHA = "the scale is alpha / r, and 1 without alpha: give alpha instead"
INSTEAD_OF_LORA: Mapping[str, str] = {
    "lora_alpha": _ALPHA,
    "use_rslora": "the scale is alpha / r: choose alpha",
    "lora_dropout": _NO_DROPOUT,
    "init_lora_weights": _INITIAL,
    "use_dora": "there are no magnitudes beside a core: leave it out",
    "bias": "only cores are trained: leave it out, or name modules in modules_to_save",
    "lora_bias": "a core has no bias: leave it out",
    "fan_in_fan_out": "a layer says itself how its weight lies: leave it out",
    "eva_config": "constructor='eva' and its options are fields of their own: give these instead",
    "corda_config": "constructor='fcca' reads inputs and output errors: give constructor and its options instead",
    "loftq_config": "bases are computed of the weights as they are: quantise the model when it is loaded",
}
"""What to do instead of each option of ``LoraConfig``."""
USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("method", "init", "initialization"), "constructor"),
    **dict.fromkeys(("rank", "lora_r", "r_core"), "r"),
    **dict.fromkeys(("targets", "target", "modules", "lora_target_modules"), "target_modules"),
    **dict.fromkeys(("budget", "num_values"), "rank_budget"),
    **dict.fromkeys(("scale", "scaling"), "alpha"),
}
"""Our name for options that other libraries name otherwise."""


class ForeignNameError(ConfigError, TypeError):
    """An unknown keyword argument of a configuration. Python's own error is a ``TypeError``, which PEFT catches."""


def refuse_foreign_names(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that ``FrozenCoreConfig`` does not have, and name the one that it has instead."""
    for name in given:
        if name in INSTEAD_OF_LORA:
            raise ForeignNameError(f"FrozenCoreConfig has no {name!r}, which is LoraConfig's: {INSTEAD_OF_LORA[name]}.")
        if name not in known:
            near = USUAL_NAMES.get(name) or nearest_name(name, known)
            meant = f"Give {near} instead." if near else "help(frozencore.FrozenCoreConfig) says what it takes."
            # PEFT knows these words: it then leaves out fields of a later version's file
            raise ForeignNameError(f"FrozenCoreConfig got an unexpected keyword argument {name!r}. {meant}")


def require_names(config: Any) -> None:
    """Refuse fields that name no modules: numbers, mappings, empty texts, malformed expressions.

    PEFT iterates over these fields and compares them much later.
    """
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field)
        _require_texts(field, value)
        if is_searched(value):
            compile_expression(field, value)
    if config.target_modules is not None and not config.target_modules:
        raise ConfigError(f"target_modules names the layers to adapt, but none is in it. {_WAY_OUT}, or leave it out.")
    for field in ("layers_pattern", "modules_to_save"):
        value = getattr(config, field)
        _require_texts(field, value)
        for name in [value] if isinstance(value, str) else value or ():
            if is_expression(name):
                raise ConfigError(f"{field} names modules, but the expression {name!r:.60} came. {_WAY_OUT}.")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field)
        if not isinstance(pattern, dict) or not all(isinstance(key, str) and key for key in pattern):
            raise ConfigError(f"{field} maps layer names to numbers, but {pattern!r:.100} came.")
        for key in pattern:
            if plain_key(key) is None:
                compile_expression(field, key)
    _require_layer_numbers(config)
    _require_tokens(config.trainable_token_indices)


def _require_texts(field: str, value: Any) -> None:
    texts = value if isinstance(value, list | tuple | set | frozenset) else (value,)
    fine = value is None or (value != "" and all(isinstance(text, str) and text for text in texts))
    if not fine:
        raise ConfigError(f"{field} names modules, but {value!r:.100} came. {_WAY_OUT}.")


def _require_layer_numbers(config: Any) -> None:
    for name in ("layers_to_transform", "layers_pattern"):
        if isinstance(config.target_modules, str) and getattr(config, name) is not None:
            raise ConfigError(
                f"`{name}` cannot be used when `target_modules` is a str. Pass a list of module names, or put the "
                "layers into the regular expression."
            )
    if config.layers_pattern and config.layers_to_transform is None:
        raise ConfigError(
            "When `layers_pattern` is specified, `layers_to_transform` must also be specified. "
            "It says which of the layers that the pattern counts are adapted."
        )
    numbers = config.layers_to_transform
    listed = numbers if isinstance(numbers, list | tuple | set | range) else () if numbers is None else (numbers,)
    if any(type(number) is not int for number in listed):
        raise ConfigError(f"layers_to_transform holds numbers of layers, but {numbers!r:.100} came.")


def _require_tokens(indices: Any) -> None:
    lists = list(indices.values()) if isinstance(indices, dict) else [indices]
    for tokens in lists if indices is not None else ():
        if not isinstance(tokens, list | tuple) or any(type(token) is not int or token < 0 for token in tokens):
            raise ConfigError(
                f"trainable_token_indices holds numbers of tokens, or such lists by module, but {indices!r:.100} came."
            )
