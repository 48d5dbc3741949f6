"""Names of layers in a configuration: names are compared, regular expressions are searched within a time limit.

A name is a layer's full name or its end, as in PEFT: ``q_proj``, ``layers.0.self_attn.q_proj``. A key of a pattern may
also be written as in PEFT's documentation, ``^model\\.layers\\.0\\.q_proj$``. Any other text is a regular expression.
An expression like ``(a+)+$`` may never end, so it gets ``MOST_SECONDS`` for all layers of a model, and its length and
its counts are limited.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

import regex

from frozencore.errors import ConfigError

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
    """Whether ``target_modules`` is PEFT's word for every linear layer."""
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
    """The computing time that is left for all expressions of one configuration."""

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        self.left = seconds


def searcher(option: str, expression: str, clock: Clock) -> Callable[[str], bool]:
    """A function that tells whether an expression matches the full name of a layer; ``option`` is for errors."""
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
    """Compile an expression for a matcher with a time limit; refuse malformed and huge ones."""
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
        re.compile(expression)  # PEFT documents this language; the matcher knows more
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
