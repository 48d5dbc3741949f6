"""Names of options given to a frozen-core configuration out of habit, LoRA's above all: one line that names ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

from frozencore.errors import ConfigError
from frozencore.words import nearest_name

_NO_DROPOUT = "a core is trained without dropout: leave it out"
_INITIAL = "constructor chooses the bases (fcca, eva, lora_xs, ...), and cores start at zero: give constructor instead"
_ALPHA = "the scale is alpha / r, and 1 without alpha: give alpha instead"
OURS: Mapping[str, str] = {
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
"""What to do instead of each of LoRA's."""
HABITS: Mapping[str, str] = {
    **dict.fromkeys(("method", "init", "initialization"), "constructor"),
    **dict.fromkeys(("rank", "lora_r", "r_core"), "r"),
    **dict.fromkeys(("targets", "target", "modules", "lora_target_modules"), "target_modules"),
    **dict.fromkeys(("budget", "num_values"), "rank_budget"),
    **dict.fromkeys(("scale", "scaling"), "alpha"),
}
"""Our name for each that others use."""


class ForeignNameError(ConfigError, TypeError):
    """An argument that a configuration does not know, for which Python's own error is a ``TypeError``."""


def refusing_lora_names(init: Callable[..., None]) -> Callable[..., None]:
    """An ``__init__``, of the same signature, that meets LoRA's names with a line of ours."""

    known = tuple(signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name in OURS:
                raise ForeignNameError(f"FrozenCoreConfig has no {name!r}, which is LoraConfig's: {OURS[name]}.")
            if name not in known:
                near = HABITS.get(name) or nearest_name(name, known)
                meant = f"Give {near} instead." if near else "help(frozencore.FrozenCoreConfig) says what it takes."
                # PEFT knows these words: it then leaves out what a file of a later version says
                raise ForeignNameError(f"FrozenCoreConfig got an unexpected keyword argument {name!r}. {meant}")
        init(self, *args, **kwargs)

    return checked
