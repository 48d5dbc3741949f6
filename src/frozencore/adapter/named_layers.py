"""The names of a model's layers in a configuration: the default ones, and those that expressions match.

PEFT would search every name with every expression, without a time limit. So PEFT gets names, and names are saved.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.config_names import Clock, is_all_linear, is_end_of, is_expression, matcher, plain_key, searcher
from frozencore.adapter.layer import is_linear
from frozencore.errors import ConfigError
from frozencore.words import nearest_name

MODULES, PATTERNS = ("target_modules", "exclude_modules"), ("rank_pattern", "alpha_pattern")
NAMES_ALONE = ("layers_pattern", "modules_to_save", "feedforward_modules")


_ATTENTION = re.compile(r"(attention|attn)\d?", re.IGNORECASE)
"""The end of the class name of an attention module, or of its name in the block (``linear_attn``)."""
_FEW_TOKENS = "_global"
"""The end of the names of Longformer's and LED's projections of the tokens with global attention: few, or none."""


def attention_projections(model: nn.Module) -> list[str]:
    """The shortest names that match exactly the linear layers of the attention modules, fused ones too.

    Of a model of images or sound that writes text, only the language model's.

    Raises:
        ConfigError: No attention module has a linear layer.
    """
    modules = _modules(model)
    attention = {
        name
        for name, module in modules.items()
        if _ends_as_attention(type(module).__name__) or (_ends_as_attention(_last(name)) and not _carries(module))
    }
    inside = [
        name
        for name in modules
        if _is_target(name, modules) and not name.endswith(_FEW_TOKENS) and not _parents(name).isdisjoint(attention)
    ]
    text = _language_model(model, modules)
    found = [name for name in inside if text is None or name.startswith(f"{text}.")] or inside
    if not found:
        raise ConfigError(
            f"No attention projection was found in this {type(model).__name__}. Name its layers in target_modules "
            f"(--targets), or give 'all-linear'. It has: {', '.join(linear_names(model))}."
        )
    return shortest_names(found, modules)


def shortest_names(layers: Collection[str], modules: Iterable[str]) -> list[str]:
    """The shortest ends of names that match exactly these layers among all modules of a model, in their order."""
    wanted = set(layers)
    taken = {end for name in modules if name not in wanted for end in _ends(name)}
    return list(dict.fromkeys(next((end for end in _ends(name) if end not in taken), name) for name in layers))


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of all linear layers that can be adapted."""
    modules = _modules(model)
    return sorted({_last(name) for name in modules if _is_target(name, modules)})


def gives_rows(layer: nn.Module) -> bool:
    """Return whether a layer gives one output for each input row; a router gives a tuple.

    A subclass of ``nn.Linear`` with a forward of its own is tried on the meta device.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward or layer.weight.ndim != 2:
        return True
    if not type(layer).__module__.startswith("transformers.models."):  # quantised layers and the user's own
        return True
    try:
        y = copy.deepcopy(layer, {id(p): nn.Parameter(p.to("meta")) for p in layer.parameters()}).eval()(
            torch.empty(2, layer.in_features, dtype=layer.weight.dtype, device="meta")
        )
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(y, Tensor) and y.shape == (2, layer.out_features)


def is_called(name: str, block: nn.Module) -> bool:
    """Return whether a block calls its layer; Mamba's blocks multiply by the weight of ``dt_proj`` themselves.

    A core on a layer that is not called would not be trained, and merging it would change the outputs.
    """
    source, weight = _source(type(block)), rf"\bself\.{re.escape(_last(name))}\.weight\b"
    if not re.search(weight, source):
        return True
    return bool(re.search(rf"\bself\.{re.escape(_last(name))}\(", source)) and not re.search(rf"{weight} @", source)


@cache
def _source(kind: type) -> str:
    """The source of a class of transformers or torch, with its base classes."""
    known = [one for one in kind.__mro__ if one.__module__.startswith(("transformers.models.", "torch.nn.modules."))]
    try:
        return "\n".join(inspect.getsource(one) for one in known)
    except (OSError, TypeError):  # compiled, or made at run time
        return ""


def exclude_unusable(config: Any, model: nn.Module) -> None:
    """Exclude routers and layers that are not called from ``all-linear``, as PEFT excludes experts."""
    modules = _modules(model)
    found = {name for name, module in modules.items() if _carries(module) and not _is_target(name, modules)}
    if found and is_all_linear(config.target_modules):
        config.exclude_modules = {*(config.exclude_modules or ()), *found}


def _is_target(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a core on this layer would act on its output."""
    block = modules.get(name.rpartition(".")[0])
    return _carries(modules[name]) and gives_rows(modules[name]) and (block is None or is_called(name, block))


def _language_model(model: Any, modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the decoder of a model with parts for images or sound; None for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config or config.is_encoder_decoder:
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return next((name for name, module in modules.items() if module is decoder), None)


def _ends_as_attention(name: str) -> bool:
    found = list(_ATTENTION.finditer(name))
    return bool(found) and found[-1].end() == len(name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _ends(name: str) -> list[str]:
    """The ends of a name, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]


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
    return any(end in ends for end in _ends(name))


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
    there = linear_names(model)
    near = next((found for target in targets if (found := nearest_name(target, there))), None)
    guess = f"Did you mean {near!r}? " if near else ""
    return ConfigError(
        f"target_modules {', '.join(map(repr, targets))} match no layer of this model. {guess}Its linear layers are "
        f"called {', '.join(there)}; or use 'all-linear'."
    )
