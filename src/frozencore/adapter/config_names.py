"""Names in a configuration, of options and of layers; regular expressions are searched within a time limit.

A name is a layer's full name or its end, as in PEFT: ``q_proj``, ``layers.0.self_attn.q_proj``. A key of a pattern may
also be written as in PEFT's documentation, ``^model\\.layers\\.0\\.q_proj$``. Any other text is a regular expression.
The search for an expression like ``(a+)+$`` may never end. So all layers of a model together get ``MOST_SECONDS``, and
an expression's length and counts are limited.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import regex

from frozencore.errors import ConfigError
from frozencore.words import nearest_name

ALL_LINEAR = "all-linear"
MOST_SECONDS = 2.0
LONGEST = 20_000  # characters of an expression
MOST_REPEATS = 1_000  # the product of all counts in an expression
_SPECIAL = frozenset("\\^$*+?{}[]|()")
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


def is_expression(text: str) -> bool:
    """Whether a text is a regular expression rather than the name of a layer."""
    return not _SPECIAL.isdisjoint(text)


def is_all_linear(targets: object) -> bool:
    """Return whether ``target_modules`` is PEFT's word for every linear layer."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def is_searched(value: object) -> bool:
    """Whether the value of ``target_modules`` or ``exclude_modules`` is a regular expression."""
    return isinstance(value, str) and is_expression(value) and not is_all_linear(value)


def is_end_of(name: str, layer: str) -> bool:
    """Whether a layer has this name, or its name ends with it after a dot."""
    return layer == name or layer.endswith(f".{name}")


def plain_key(key: str) -> tuple[str, bool] | None:
    """The name in a key of a pattern, and whether it is a full name; None for an expression."""
    name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
    return None if is_expression(name) else (name, key.startswith("^"))


class Clock:
    """The remaining computing time for all expressions of one configuration."""

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        self.left = seconds


def searcher(option: str, expression: str, clock: Clock) -> Callable[[str], bool]:
    """Make a function that tells whether an expression matches a layer's full name; ``option`` is for errors."""
    compiled = compile_expression(option, expression)

    def matches(layer: str) -> bool:
        began = time.process_time()
        try:
            found = compiled.fullmatch(layer, timeout=max(clock.left, 1e-3))
        except TimeoutError as error:
            raise ConfigError(
                f"The expression {expression!r:.100} in {option} needs more than {MOST_SECONDS:g} s for the names of "
                "this model's layers. Write it without repeats inside of repeats, or name the layers in a list."
            ) from error
        clock.left -= time.process_time() - began
        return found is not None

    return matches


def compile_expression(option: str, expression: str) -> regex.Pattern[str]:
    """Compile an expression for a matcher with a time limit; refuse malformed and huge expressions."""
    repeats = 1
    for counts in _COUNT.findall(expression):
        for count in counts:
            repeats = min(repeats * max(int(count[:5] or 1), 1), MOST_REPEATS + 1)
    if len(expression) > LONGEST or repeats > MOST_REPEATS:
        raise ConfigError(
            f"An expression in {option} has up to {LONGEST:,} characters and repeats up to {MOST_REPEATS:,} times, "
            f"but {expression!r:.60} is larger. Name the layers in a list."
        )
    try:
        re.compile(expression)  # PEFT documents the language of re; the matcher accepts more
        return regex.compile(expression)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{option} is a regular expression or names of layers, but {expression!r:.60} came ({error}). "
            "Correct the expression, or name the layers in a list."
        ) from error


def key_for(keys: Mapping[str, object], layer: str, option: str) -> str | None:
    """The key of a pattern for a layer: its full name, else the first key that names or matches it."""
    if layer in keys:
        return layer
    clock = Clock()
    return next((key for key in keys if matcher(option, key, clock)(layer)), None)


def matcher(option: str, key: str, clock: Clock) -> Callable[[str], bool]:
    """A function that tells whether a key of a pattern names or matches a layer."""
    plain = plain_key(key)
    if plain is None:
        return searcher(option, rf"(?:.*\.)?(?:{key})", clock)
    name, is_whole = plain
    return (lambda layer: layer == name) if is_whole else (lambda layer: is_end_of(name, layer))


_WAY_OUT = "Give a list of names such as ['q_proj', 'v_proj']"
_NO_DROPOUT = "a core is trained without dropout: leave it out"
_INITIAL = "constructor chooses the bases (fcca, eva, lora_xs, ...), and cores start at zero: give constructor instead"
_ALPHA = "the scale is alpha / r (16 / r by default, 1 with alpha=None): give alpha instead"
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
    **dict.fromkeys(("scale", "scaling"), "alpha"),
}
"""frozencore's names of options that other libraries call differently."""


class ForeignNameError(ConfigError, TypeError):
    """An unknown keyword argument of a configuration. Python's own error is a ``TypeError``, which PEFT catches."""


def refuse_foreign_names(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that ``FrozenCoreConfig`` does not have, and name the right one."""
    for name in given:
        if name in INSTEAD_OF_LORA:
            raise ForeignNameError(f"FrozenCoreConfig has no {name!r}, which is LoraConfig's: {INSTEAD_OF_LORA[name]}.")
        if name not in known:
            near = USUAL_NAMES.get(name) or nearest_name(name, known)
            meant = f"Give {near} instead." if near else "help(frozencore.FrozenCoreConfig) says what it takes."
            # PEFT knows these words: it then leaves out fields of a later version's file
            raise ForeignNameError(f"FrozenCoreConfig got an unexpected keyword argument {name!r}. {meant}")


def require_names(config: Any) -> None:
    """Refuse fields that do not name modules: numbers, mappings, empty texts, malformed expressions.

    PEFT would fail on them much later.
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
        if (
            not tokens
            or not isinstance(tokens, list | tuple)
            or any(type(token) is not int or token < 0 for token in tokens)
        ):
            raise ConfigError(
                f"trainable_token_indices holds numbers of tokens, or such lists by module, but {indices!r:.100} came."
            )
