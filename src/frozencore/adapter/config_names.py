"""Whether the fields of a configuration that name modules hold names, before PEFT iterates over them and compares."""

from __future__ import annotations

from typing import Any

from frozencore.adapter.layer_names import compile_expression, is_all_linear, is_expression, plain_key
from frozencore.errors import ConfigError

_WAY_OUT = "Give a list of names such as ['q_proj', 'v_proj']"


def require_names(config: Any) -> None:
    """Refuse values that name no modules: numbers, mappings, empty texts, malformed expressions.

    Raises:
        ConfigError: The first of them.
    """
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field)
        _require_texts(field, value)
        if isinstance(value, str) and is_expression(value) and not is_all_linear(value):
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
    fine = value is None or (not (isinstance(value, str) and not value) and all(isinstance(t, str) for t in texts))
    if not fine or "" in texts:
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
