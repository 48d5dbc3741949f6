"""Replace the regular expressions of a configuration by the names of a model's layers.

PEFT would search every name with every expression, without a time limit. So PEFT gets names, and names are saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.config_names import Clock, is_all_linear, is_end_of, is_expression, matcher, plain_key, searcher
from frozencore.adapter.layer import is_linear
from frozencore.errors import ConfigError
from frozencore.words import nearest_name

MODULES, PATTERNS = ("target_modules", "exclude_modules"), ("rank_pattern", "alpha_pattern")
NAMES_ALONE = ("layers_pattern", "modules_to_save", "feedforward_modules")


def name_layers(config: FrozenCoreConfig, model: nn.Module) -> None:
    """Replace the expressions of a configuration; a second model starts from the original expressions again."""
    for field, (said, named) in config._expressions.items():
        if getattr(config, field) == named:
            setattr(config, field, said)
    before = {field: getattr(config, field) for field in (*MODULES, *PATTERNS)}
    name_layers_of(config, model)
    config._expressions = {
        field: (said, getattr(config, field)) for field, said in before.items() if getattr(config, field) != said
    }


def name_layers_of(config: Any, model: nn.Module) -> None:
    """Replace the expressions in the configuration of any PEFT method."""
    for field in NAMES_ALONE:
        value = getattr(config, field, None)
        for name in value if isinstance(value, list | set | tuple) else [value]:
            if isinstance(name, str) and is_expression(name):
                raise ConfigError(f"{field} names modules, but the expression {name!r:.60} came. List their names.")
    said: dict[str, Any] = {field: getattr(config, field, None) for field in (*MODULES, *PATTERNS)}
    fields = [field for field in MODULES if _is_searched(said[field])]
    fields += [field for field in PATTERNS if any(plain_key(key) is None for key in said[field] or ())]
    if not fields:
        return
    names, clock = _modules(model), Clock()
    if "exclude_modules" in fields:
        _name_excluded(config, searcher("exclude_modules", said["exclude_modules"], clock), names)
    if "target_modules" in fields:
        _name_targets(config, searcher("target_modules", said["target_modules"], clock), names)
    targeted = _targeted(config, [name for name, module in names.items() if _carries(module)])
    for field in PATTERNS:
        if field in fields:
            setattr(config, field, _by_name(field, said[field], targeted, clock))


def _is_searched(value: Any) -> bool:
    return isinstance(value, str) and value != DUMMY_TARGET_MODULES and not is_all_linear(value)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by name, without the modules inside adapted layers."""
    found: dict[str, nn.Module] = {}
    inside: str | None = None
    for name, module in model.named_modules():
        if not name or (inside is not None and name.startswith(inside)):
            continue
        inside = f"{name}." if isinstance(module, BaseTunerLayer) else None
        found[name] = module
    return found


def _name_excluded(config: Any, matches: Any, names: Mapping[str, nn.Module]) -> None:
    targets: Any = config.target_modules
    every = targets is None or isinstance(targets, str)
    wanted = [name for name, module in names.items() if (_carries(module) if every else _is_among(name, targets))]
    found = {name for name in wanted if matches(name)}
    if not found:
        warnings.warn(
            f"exclude_modules={config.exclude_modules!r:.100} excludes no layer that is adapted.", stacklevel=6
        )
    config.exclude_modules = found or None


def _name_targets(config: Any, matches: Any, names: Mapping[str, nn.Module]) -> None:
    wanted = config.target_modules
    excluded: Collection[str] = getattr(config, "exclude_modules", None) or ()
    found = {name for name in names if matches(name) and not _is_among(name, excluded)}
    if not found:
        raise ConfigError(
            f"target_modules={wanted!r:.100} matches no layer of this model that is not excluded. Name layers that it "
            "has, for instance by their ends: ['q_proj', 'v_proj']."
        )
    config.target_modules = found
    # names match by their ends, so another layer with the same end must be excluded by name
    stray = {name for name in names if name not in found and _is_among(name, found)}
    if stray:
        config.exclude_modules = {*excluded, *stray}


def _is_among(name: str, ends: Collection[str]) -> bool:
    """Return whether a name, or one of its ends, is in ``ends``."""
    parts = name.split(".")
    return any(".".join(parts[start:]) in ends for start in range(len(parts)))


def _carries(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, BaseTunerLayer)


def _targeted(config: Any, linear: Iterable[str]) -> list[str]:
    """The linear layers that a configuration adapts."""
    targets: Any = config.target_modules
    every = targets is None or isinstance(targets, str)
    excluded = getattr(config, "exclude_modules", None) or ()
    return [name for name in linear if (every or _is_among(name, targets)) and not _is_among(name, excluded)]


def _by_name(option: str, pattern: Mapping[str, Any], layers: Iterable[str], clock: Clock) -> dict[str, Any]:
    """A pattern with the full names of the matched layers as keys."""
    keys = {key: matcher(option, key, clock) for key in pattern}
    found = {}
    for layer in layers:
        key = layer if layer in pattern else next((key for key in keys if keys[key](layer)), None)
        if key is not None:
            found[layer] = (key, pattern[key])
    unused = pattern.keys() - {key for key, _ in found.values()}
    if unused:
        warnings.warn(f"No layer is matched by {sorted(unused)} in {option}.", RuntimeWarning, stacklevel=6)
    return {layer: value for layer, (_, value) in found.items()}


def require_tokens(indices: Any, model: nn.Module) -> None:
    """Refuse trainable tokens without an embedding in the model."""
    if not indices:
        return
    by_name = indices if isinstance(indices, dict) else {None: indices}
    for name, tokens in by_name.items():
        for module_name, module in model.named_modules():
            found = isinstance(module, nn.Embedding) if name is None else is_end_of(name, module_name)
            weight: Any = getattr(module, "weight", None)
            if found and weight is not None and tokens and max(tokens) >= len(weight):
                raise ConfigError(
                    f"trainable_token_indices names token {max(tokens)}, but {module_name!r} has {len(weight)}. Name "
                    "tokens of this model."
                )
            if found and name is None:
                break


def no_match(config: FrozenCoreConfig, model: nn.Module) -> ConfigError:
    """The error for targets that match no layer, with the names of the layers."""
    came = config.target_modules
    targets = [came] if isinstance(came, str) else sorted(came or ())
    there = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    near = next((found for target in targets if (found := nearest_name(target, there))), None)
    guess = f"Did you mean {near!r}? " if near else ""
    return ConfigError(
        f"target_modules {', '.join(map(repr, targets))} match no layer of this model. {guess}Its linear layers are "
        f"called {', '.join(there)}; or use 'all-linear'."
    )
