"""The names of a model's layers in a configuration: the default ones, and those that an expression matches.

A name is a layer's full name or its end, as in PEFT: ``q_proj``, ``layers.0.self_attn.q_proj``. A key of a pattern may
also be written as in PEFT's documentation, ``^model\\.layers\\.0\\.q_proj$``. Any other text is a regular expression.

PEFT's functions decide what names and expressions match. Before PEFT adds the adapter, expressions are
replaced by the names that they match, so that a saved adapter has names alone. Keys of a pattern that match one layer
twice are replaced too, because their order decides and PEFT's file sorts them.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from frozencore.adapter.layer import is_linear
from frozencore.errors import ConfigError, ModelError
from frozencore.text import nearest_name

ALL_LINEAR = "all-linear"
MODULES, PATTERNS = ("target_modules", "exclude_modules"), ("rank_pattern", "alpha_pattern")
_SPECIAL = frozenset("\\^$*+?{}[]|()")

_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_DEEPSEEK = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_BART = ("k_proj", "v_proj", "q_proj", "out_proj")
_BERT = ("query", "key", "value", "attention.output.dense")
_FUSED = ("query_key_value", "dense")
_GPT2 = ("c_attn", "attn.c_proj")
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "llama", "llama4_text", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen2_vl_text",
            "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
            "gemma4_text", "phimoe", "stablelm", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2", "granite",
            "granitemoe", "nemotron", "nemotron_h", "smollm3", "glm", "glm4", "glm4_moe", "ernie4_5", "ernie4_5_moe",
            "exaone4", "gpt_oss", "seed_oss", "hunyuan_v1_dense", "starcoder2", "falcon_h1", "zamba", "zamba2",
        ),
        _QKVO,
    ),
    **dict.fromkeys(("opt", "gptj", "bart", "mbart", "pegasus", "m2m_100", "marian", "blenderbot", "whisper"), _BART),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "camembert", "ernie", "longformer"), _BERT),
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _FUSED),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), ("q", "k", "v", "o")),
    "phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "phi3": ("o_proj", "qkv_proj"),
    "mpt": ("Wqkv", "out_proj"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("q_proj", "k_proj", "v_proj", "self_attn.out_proj")),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", *_QKVO),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", *_QKVO)
    ),
    "ctrl": ("Wq", "Wk", "Wv", "dense"),
    "xlm": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "modernbert": ("Wqkv", "attn.Wo"),
    "modernbert-decoder": ("q_proj", "k_proj", "v_proj", "attn.Wo"),
    "deberta": ("in_proj", "pos_proj", "pos_q_proj", "attention.output.dense"),
    "deberta-v2": ("query_proj", "key_proj", "value_proj", "attention.output.dense"),
    "led": ("query", "key", "value", "output", *_BART),
}  # fmt: skip
"""The attention projections of each family, by the ``model_type`` of transformers; a model has those that exist."""


def is_expression(text: str) -> bool:
    """Whether a text is a regular expression rather than the name of a layer."""
    return not _SPECIAL.isdisjoint(text)


def is_searched(value: object) -> bool:
    """Whether PEFT searches the value of ``target_modules`` or ``exclude_modules`` as an expression."""
    return isinstance(value, str) and value != DUMMY_TARGET_MODULES and not is_all_linear(value)


def is_all_linear(targets: object) -> bool:
    """Return whether ``target_modules`` is PEFT's word for every linear layer."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def names_a_layer(key: str) -> bool:
    """Whether a key of a pattern is a layer's full name or its end, also as PEFT's documentation writes a full one."""
    return not is_expression(key.removeprefix("^").removesuffix("$").replace("\\.", "."))


def compiled(option: str, expression: str) -> re.Pattern[str]:
    """Compile the expression of an option; refuse a malformed one."""
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{option} is a regular expression or names of layers, but {expression!r:.60} was given ({error}). "
            "Correct the expression, or name the layers in a list."
        ) from error


def key_for(keys: Collection[str], layer: str) -> str | None:
    """The key of a pattern for a layer: its full name, else the first that PEFT finds."""
    key = layer if layer in keys else get_pattern_key(list(keys), layer)
    return key if key in keys else None


def is_end_of(name: str, layer: str) -> bool:
    """Whether this names a layer: the layer's full name, or its end after a dot."""
    return layer == name or layer.endswith(f".{name}")


def require_names(config: Any) -> None:
    """Refuse expressions that are malformed, or where PEFT takes none, and fields that do not go together.

    PEFT would fail on them much later, or ignore them.
    """
    for option in (*MODULES, "layers_pattern", "modules_to_save"):
        value = getattr(config, option)
        texts = (value,) if isinstance(value, str) else value or ()
        if option in MODULES:
            if is_searched(value):
                compiled(option, value)
        elif expression := next(filter(is_expression, texts), None):
            raise ConfigError(
                f"{option} names modules, but the expression {expression!r:.60} was given. Give a list of names such "
                "as ['q_proj', 'v_proj']."
            )
    for option in PATTERNS:
        for key in getattr(config, option):
            if not names_a_layer(key):
                compiled(option, key)
    for option in ("layers_to_transform", "layers_pattern"):
        if isinstance(config.target_modules, str) and getattr(config, option) is not None:
            raise ConfigError(
                f"`{option}` cannot be used when `target_modules` is a str. Pass a list of module names, or put the "
                "layers into the regular expression."
            )
    if config.layers_pattern and config.layers_to_transform is None:
        raise ConfigError(
            "When `layers_pattern` is specified, `layers_to_transform` must also be specified. "
            "It says which of the layers that the pattern counts are adapted."
        )


def attention_projections(model: nn.Module) -> list[str]:
    """The default layers: the attention projections of the model's family, fused ones too.

    Of a model of images or sound that writes text, only the language model's.

    Raises:
        ConfigError: The family is not in the table.
    """
    modules = _modules(model)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = getattr(config, "model_type", None)
    ends = DEFAULT_TARGETS.get(str(family), ())
    found = [name for name in modules if is_among(name, ends) and _is_target(name, modules)]
    if not found:
        raise ConfigError(
            f"No default layers are known for models of type {family!r:.60}. Name the layers in target_modules "
            f"(--targets), or give 'all-linear'. It has: {', '.join(linear_names(model))}."
        )
    text = _language_model(model, modules)
    inside = [name for name in found if text is None or name.startswith(f"{text}.")]
    if len(inside) < len(found):
        return inside
    return [end for end in ends if any(is_end_of(end, name) for name in found)]


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of all linear layers that can be adapted."""
    modules = _modules(model)
    return sorted({last_part(name) for name in modules if _is_target(name, modules)})


def is_plain_linear(layer: nn.Module) -> bool:
    """Return whether a layer gives one output for each input row; a router gives a tuple.

    A subclass of ``nn.Linear`` with another ``forward`` is tried on the meta device.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward or layer.weight.ndim != 2:
        return True
    if not type(layer).__module__.startswith("transformers.models."):  # quantised layers, and those of the user's code
        return True
    try:
        y = copy.deepcopy(layer, {id(p): nn.Parameter(p.to("meta")) for p in layer.parameters()}).eval()(
            torch.empty(2, layer.in_features, dtype=layer.weight.dtype, device="meta")
        )
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(y, Tensor) and y.shape == (2, layer.out_features)


def is_called(name: str, block: nn.Module) -> bool:
    """Return whether a block calls its layer: three kinds multiply by the weight of a layer themselves.

    A core on a layer that is not called is not trained, or has no effect in evaluation, where torch's encoder layers
    are fused. In any other block calibration refuses such a layer by name.
    """
    if is_fused_in_evaluation(block):
        return False
    is_mamba = type(block).__name__.endswith("MambaMixer") and last_part(name) == "dt_proj"
    return not (is_mamba or (isinstance(block, nn.MultiheadAttention) and last_part(name) == "out_proj"))


def is_fused_in_evaluation(block: nn.Module) -> bool:
    """Return whether torch may compute a block of linear layers in one kernel, without calling them."""
    is_encoder = isinstance(block, nn.TransformerEncoderLayer) and block.self_attn.batch_first
    return is_encoder and torch.backends.mha.get_fastpath_enabled()


def exclude_unusable(config: Any, model: nn.Module) -> None:
    """Exclude routers and layers that are not called from ``all-linear``, as PEFT excludes experts."""
    modules = _modules(model)
    found = {name for name, module in modules.items() if is_adaptable(module) and not _is_target(name, modules)}
    if found and is_all_linear(config.target_modules):
        config.exclude_modules = {*(config.exclude_modules or ()), *found}


def _is_target(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a core on this layer would act on its output."""
    block = modules.get(name.rpartition(".")[0])
    return is_adaptable(modules[name]) and is_plain_linear(modules[name]) and (block is None or is_called(name, block))


def _language_model(model: Any, modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the decoder of a model with parts for images or sound; None for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config or config.is_encoder_decoder:
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return next((name for name, module in modules.items() if module is decoder), None)


def last_part(name: str) -> str:
    """The layer's own name, without those of the modules around it."""
    return name.rpartition(".")[2]


def expand_patterns(config: Any, model: nn.Module) -> None:
    """Replace the expressions of a configuration by the names that PEFT finds with them."""
    targets, excluded = config.target_modules, config.exclude_modules
    if not (is_searched(targets) or is_searched(excluded) or config.rank_pattern or config.alpha_pattern):
        return
    names = _modules(model)
    every = copy.copy(config)
    every.target_modules = ".*" if isinstance(targets, str) and not is_searched(targets) else targets
    found = {name for name in names if check_target_module_exists(every, name)}
    if is_searched(excluded):
        every.exclude_modules = None
        if found == {name for name in names if check_target_module_exists(every, name)}:
            warnings.warn(f"exclude_modules={excluded!r:.100} excludes no layer that is adapted.", stacklevel=5)
    if not found:  # PEFT refuses it
        return
    if is_searched(targets):
        config.target_modules = found
    if is_searched(targets) or is_searched(excluded):
        # names match by their ends, so that other layers with the same end must be excluded by name
        ends = None if isinstance(config.target_modules, str) else config.target_modules
        alike = {
            name for name, module in names.items() if (is_adaptable(module) if ends is None else is_among(name, ends))
        }
        config.exclude_modules = alike - found or None
    layers = [name for name in found if is_adaptable(names[name])]
    for field in PATTERNS:
        pattern = getattr(config, field)
        if pattern.keys() <= names.keys():  # the order of full names does not matter, and PEFT's file sorts them
            continue
        num_keys = Counter(layer for key in pattern for layer in layers if get_pattern_key([key], layer) == key)
        if not all(map(names_a_layer, pattern)) or max(num_keys.values(), default=0) > 1:
            key_of = {layer: key for layer in layers if (key := get_pattern_key(list(pattern), layer)) in pattern}
            if unused := pattern.keys() - set(key_of.values()):
                warnings.warn(f"No layer is matched by {sorted(unused)} in {field}.", RuntimeWarning, stacklevel=5)
            setattr(config, field, {layer: pattern[key] for layer, key in key_of.items()})


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by name, without the modules inside adapted layers."""
    modules: dict[str, nn.Module] = {}
    inside: str | None = None
    for name, module in model.named_modules():
        if not name or (inside is not None and name.startswith(inside)):
            continue
        inside = f"{name}." if isinstance(module, BaseTunerLayer) else None
        modules[name] = module
    return modules


def is_among(name: str, ends: Collection[str]) -> bool:
    """Return whether a name, or one of its ends, is in ``ends``."""
    parts = name.split(".")
    return any(".".join(parts[start:]) in ends for start in range(len(parts)))


def is_adaptable(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, BaseTunerLayer)


def require_tokens(indices: Any, model: nn.Module) -> None:
    """Refuse trainable tokens without an embedding in the model."""
    if not indices:
        return
    by_name = indices if isinstance(indices, dict) else {None: indices}
    for name, tokens in by_name.items():
        for module_name, module in model.named_modules():
            is_named = isinstance(module, nn.Embedding) if name is None else is_end_of(name, module_name)
            weight: Any = getattr(module, "weight", None)
            if is_named and weight is not None and tokens and max(tokens) >= len(weight):
                raise ConfigError(
                    f"trainable_token_indices names token {max(tokens)}, but {module_name!r} has {len(weight)}. Name "
                    "tokens of this model."
                )
            if is_named and name is None:
                break


def owners_of_weights(model: nn.Module) -> Counter[int]:
    """The number of linear layers that have each weight, by its id; a layer with two names counts twice."""
    every = (module for _, module in model.named_modules(remove_duplicate=False))
    return Counter(id(getattr(module, "weight", module)) for module in every if is_linear(module))


def require_all_calls(model: nn.Module, layers: Mapping[str, BaseTunerLayer]) -> None:
    """Refuse an adapted layer that the model has under another name too, where the adapter does not act.

    Its moments would hold the calls under both names.
    """
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    for name, layer in layers.items():
        if len(bases := places[id(layer.get_base_layer())]) > len(wrapped := places[id(layer)]):
            other = next(place for place in bases if not any(place.startswith(f"{one}.") for one in wrapped))
            raise ModelError(
                f"The layer {name!r} is {other!r} too, and a core on it would act under the first name only. Leave it "
                "out of target_modules."
            )


def warn_of_unmatched(
    config: Any, given: Mapping[str, Any], layers: Collection[str], model: nn.Module, *, heads: Collection[str]
) -> None:
    """Warn of names among several targets, and of numbers, that no adapted layer has; of modules that are not there.

    Args:
        given: The fields as they were before the names of layers were filled in.
        heads: The names that PEFT adds to ``modules_to_save`` for a task. A model has one of them.
    """
    is_list = not isinstance(given["target_modules"], str | None)
    targets, numbers = config.target_modules if is_list else (), config.layers_to_transform
    numbers = [numbers] if isinstance(numbers, int) else numbers or ()
    modules = [name for name, _ in model.named_modules()]
    unmatched = {
        "adapted layer is called {} (target_modules)": [
            one for one in sorted(targets) if not any(is_end_of(one, layer) for layer in layers)
        ],
        "adapted layer has the number {} (layers_to_transform)": [
            str(one) for one in numbers if not any(str(one) in layer.split(".") for layer in layers)
        ],
        "module is called {} (modules_to_save)": [
            one
            for one in given["modules_to_save"] or ()
            if one not in heads and not any(name.endswith(one) for name in modules)
        ],
    }
    for what, names in unmatched.items():
        if names:
            warnings.warn(f"No {what.format(', '.join(names))}.", stacklevel=4)


def no_match(config: Any, model: nn.Module) -> ConfigError:
    """The error for targets that match no layer, with the names of the layers."""
    given = config.target_modules
    targets = [given] if isinstance(given, str) else sorted(given or ())
    there = linear_names(model)
    near = next((found for target in targets if (found := nearest_name(target, there)) != target), None)
    guess = f"Did you mean {near!r}? " if near else ""
    if config.layers_to_transform is not None and not near:
        guess = f"layers_to_transform={config.layers_to_transform!r:.60} leaves none. "
    return ConfigError(
        f"target_modules {', '.join(map(repr, targets))} match no layer of this model. {guess}Its linear layers are "
        f"called {', '.join(there)}; or use 'all-linear'."
    )
