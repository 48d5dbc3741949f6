"""The base model of an export: its layers by name, its weights, its tokenizer; and an adapter merged into it.

How stock PEFT loads a LoRA onto the base model is tried on a copy without weights. PEFT rewrites names of layers for
models whose experts transformers has fused since version 5: it takes every ``gate_proj``, ``up_proj`` and
``down_proj`` for an expert's, also those of shared experts and dense layers. It refuses some layers (``out_proj`` of
Mamba), and its short names match modules of any kind.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.card import CLASS_OF_TASK
from frozencore.adapter.core import BASE
from frozencore.adapter.folders import SavedAdapter, read_adapter
from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.adapter.named_layers import is_end_of
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError, ModelError
from frozencore.files.adapter_folder import TOKENIZER_FILE
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.gguf_file import full_name
from frozencore.files.hub import begins_as_path, safe_loading, why_unreadable
from frozencore.text import one_line
from frozencore.unwrapped_model import base_of

LOST_TO_ROUNDING = 0.01
"""The share of an update from which its loss by rounding is said."""


@dataclass(frozen=True)
class BaseLayers:
    """The linear layers of a base model, (m, n) by name, which are ``Conv1D``, and the model without weights."""

    shapes: Mapping[str, tuple[int, int]]
    conv1d: frozenset[str]
    model: nn.Module

    def require_layer(self, name: str, shape: tuple[int, int]) -> None:
        """Refuse a layer of an adapter that this base model does not have in that shape."""
        if self.shapes.get(name) == shape:
            return
        if other := in_other_class(name, shape, self.shapes):
            raise ArtifactError(
                f"The adapter was trained in another class of the base model, where the layer {other} is {name!r}. "
                "Save the base model in that class, such as AutoModelForCausalLM or AutoModel, and name that folder."
            )
        raise ArtifactError(
            f"The adapter is of another base model: its layer {name!r} is {shape[0]} x {shape[1]}, the base has "
            f"{self.shapes.get(name, 'none')}. Name the model it was trained on."
        )


def in_other_class(layer: str, shape: tuple[int, int], shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """The name that a layer of a part of a model probably has here: its own after another first part."""
    rest = layer.partition(".")[2]
    there = (name for name in shapes if shapes[name] == shape and is_end_of(rest, name))
    return next(there, None) if layer not in shapes else None


def layers_of(base: nn.Module | str | Path, revision: str | None = None) -> BaseLayers:
    """The linear layers of a model, or of the architecture in a folder or GGUF file; its weights are not read."""
    model = meta_copy(base_of(base if isinstance(base, nn.Module) else _architecture(str(base), revision)))
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    return BaseLayers(
        shapes={name: layer_shape(module) for name, module in linear.items()},
        conv1d=frozenset(name for name, module in linear.items() if isinstance(module, Conv1D)),
        model=model,
    )


def layers_by_class(base: str, revision: str | None) -> Iterator[Mapping[str, tuple[int, int]]]:
    """The shapes of a model's linear layers in the class in which it was saved, then in those in which tasks load it.

    Raises:
        ModelError: Its configuration cannot be read.
    """
    loading = safe_loading(base, revision)
    with _reading(base, loading):
        config = AutoConfig.from_pretrained(**loading)
        saved = _model_class(config)
    for_tasks = (partial(auto.from_config, trust_remote_code=False) for auto in CLASS_OF_TASK.values())
    for make in (saved, *for_tasks):
        try:
            with torch.device("meta"):
                model = make(config)
        except Exception:  # transformers raises many kinds; no model has a class for every task
            continue
        yield layers_of(model).shapes


def base_name(origin: Path, base: str | Path | None, named: str | None) -> str:
    """The requested base model, else the one that the adapter names."""
    if base:
        return str(base)
    way_out = "give base=, its folder, file or hub id (--base)."
    if not named:
        raise ConfigError(f"{origin} names no base model: {way_out}")
    if begins_as_path(named) and not Path(named).expanduser().exists():
        raise ConfigError(f"{origin} names the base model {named:.200}, which is gone: {way_out}")
    return named


def load_base_model(base: str, dtype: str, loading: dict[str, Any], not_quantised: str) -> Any:
    """Load the model in a folder or GGUF file or under a hub id, in the class that it was saved as.

    Args:
        dtype: ``auto`` takes the dtype of the file.
        loading: The options of :func:`frozencore.files.hub.safe_loading`.
        not_quantised: The reason why a quantised model is refused.
    """
    with _reading(base, loading):
        config = AutoConfig.from_pretrained(**loading)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"The base model {base} is quantised, and {not_quantised}. "
            "Name the unquantised model with base= (--base), or export a LoRA."
        )
    with _reading(base, loading):
        model = _model_class(config).from_pretrained(dtype=dtype, **loading)
    model.name_or_path = model.config.name_or_path = full_name(base)
    vars(model.config).pop("auto_map", None)  # it names code that is neither run nor copied
    return model


def read_tokenizer(loading: dict[str, Any]) -> Any:
    """Read the tokenizer of a model; refuse the one without words that transformers makes where there is none."""
    tokenizer = AutoTokenizer.from_pretrained(**loading)
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer


def save_tokenizer(directory: Path, out: Path, loading: dict[str, Any]) -> Any:
    """Write the base model's processor, if it has one, and the tokenizer of the adapter, else of the base model.

    Returns:
        The tokenizer; None, with a warning, if it cannot be read.
    """
    with suppress(Exception):  # transformers raises many kinds
        processor = AutoProcessor.from_pretrained(**loading)
        if not isinstance(processor, PreTrainedTokenizerBase):  # which most models have instead
            processor.save_pretrained(out)
    if (directory / TOKENIZER_FILE).is_file():
        loading = {**loading, "pretrained_model_name_or_path": str(directory), "local_files_only": True}
    try:
        tokenizer = read_tokenizer(loading)
    except Exception as error:  # transformers raises many kinds
        place, reason = loading["pretrained_model_name_or_path"], why_unreadable(loading, error)
        warnings.warn(f"The export has no tokenizer, because that of {place} cannot be read: {reason}", stacklevel=2)
        return None
    tokenizer.save_pretrained(out)
    return tokenizer


def _architecture(base: str, revision: str | None) -> nn.Module:
    loading = safe_loading(base, revision)
    with _reading(base, loading), torch.device("meta"):
        config = AutoConfig.from_pretrained(**loading)
        return _model_class(config)(config)


def _model_class(config: Any) -> Any:
    """transformers' class in which a model was saved."""
    name = next(iter(config.architectures or ()), None)
    if name is None or not hasattr(transformers, name):
        raise ModelError(f"its config.json names the class {name}, which transformers does not have.")
    return getattr(transformers, name)


@contextmanager
def _reading(base: object, loading: dict[str, Any]) -> Iterator[None]:
    """Name the base model in the error of a model that cannot be read."""
    try:
        yield
    except Exception as error:  # transformers raises many kinds
        reason = why_unreadable(loading, error)
        raise ModelError(f"The base model {base} cannot be read: {reason} Give its folder, file or hub id.") from error


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a base model onto the meta device, without its adapters and quantisation."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(X): nn.Parameter(X.detach().to("meta"), requires_grad=False) for X in tensors}
    copied = copy.deepcopy(model, memo)
    for (name, module), original in zip(list(copied.named_modules()), model.modules(), strict=True):
        base, of_model = (
            one.get_base_layer() if isinstance(one, BaseTunerLayer) else one for one in (module, original)
        )
        is_plain = isinstance(base, nn.Linear | Conv1D) and type(of_model.weight) is nn.Parameter  # 4-bit: a subclass
        if is_linear(base) and not is_plain:
            m, n = layer_shape(base)
            base = nn.Linear(n, m, device="meta")
        if base is not module:
            copied.set_submodule(name, base)
    for attribute in ("peft_config", "_hf_peft_config_loaded"):  # of transformers' integration of PEFT
        vars(copied).pop(attribute, None)
    return copied


def targets_for_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Any], str | None]:
    """Change the targets of a LoRA's configuration, if needed, so that PEFT loads its layers onto a model.

    Layers whose names PEFT takes for fused experts' are named as parameters, which it does not rewrite.

    Args:
        model: The base model as :func:`meta_copy` gives it; stays unchanged.

    Returns:
        The configuration, and why PEFT would load something else; None if it loads the LoRA right.
    """
    layers = {_layer(key) for key in tensors}
    lost, reason = misloaded_layers(config, tensors, model)
    if reason is None or not lost:
        return dict(config), reason
    named = {
        **config,
        "target_modules": sorted(layers - lost),
        "target_parameters": sorted(f"{n}.weight" for n in lost),
    }
    _, still = misloaded_layers(named, tensors, model)
    return (dict(config), reason) if still else (named, None)


def misloaded_layers(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[set[str], str | None]:
    """Load a LoRA onto a copy of a model without weights as PEFT does.

    Returns:
        The layers whose factors differ after loading, and the reason; the reason is None if PEFT loads the LoRA right.
    """
    given = {key: copy.deepcopy(value) for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    lora = LoraConfig(**{**given, "peft_type": "LORA"})  # PEFT changes its values
    layers = {_layer(key) for key in tensors}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            loaded = get_peft_model(copy.deepcopy(model), lora, low_cpu_mem_usage=True)
            result = set_peft_model_state_dict(loaded, dict(tensors), low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        return set(), f"PEFT refuses it: {one_line(error, 300)}"
    base = loaded.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    unfilled = sorted(key for key in result.missing_keys if "lora_" in key)
    lost = {name for name in layers if name not in adapted or not _has_factors(adapted[name], name, tensors)}
    unused = sorted(key for key in result.unexpected_keys if "lora_" in key)
    if unfilled:
        return lost, f"PEFT adds untrained factors for {_layer(unfilled[0])!r} ({len(unfilled)} in all)"
    if unused:
        return lost, f"PEFT finds no place for {_layer(unused[0])!r} ({len(unused)} in all)"
    return lost, None


def _layer(key: str) -> str:
    return key.removeprefix(BASE).partition(".lora_")[0]


def _has_factors(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a loaded layer has the factors that the file has under its name."""
    for side in ("lora_A", "lora_B"):
        factors = getattr(layer, side)
        given, loaded = tensors.get(f"{BASE}{name}.{side}.weight"), factors["default"].weight if len(factors) else None
        if (
            given is None
            or loaded is None
            or loaded.is_meta
            or loaded.shape != given.shape
            or not torch.equal(loaded, given)
        ):
            return False
    return True


def _require_modules(saved: SavedAdapter, model: nn.Module, base: str | Path) -> None:
    """Refuse a base model without the modules that an adapter trained as a whole: PEFT would leave them out."""
    there = {name for name, _ in model.named_modules()}
    for name in saved.config.modules_to_save or ():
        paths = (key.removeprefix(BASE).split(".") for key in saved.modules)
        whole = {".".join(path[: path.index(name) + 1]) for path in paths if name in path}
        if odd := sorted(whole - there):
            raise ModelError(
                f"The adapter in {saved.folder} has trained {odd[0]!r} as a whole, which {base} "
                f"({type(model).__name__}) lacks. Save the base model in the class that the adapter was trained on, "
                "and name that folder with base= (--base)."
            )


def _embed_all(model: Any, num_tokens: int) -> None:
    """Add the embeddings that a model lacks for the tokens of an adapter, as PEFT's AutoPeftModel does."""
    if num_tokens > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(num_tokens)


@torch.no_grad()
def _lost_to_rounding(model: nn.Module) -> float:
    """The relative error in Frobenius norm of an update that is added to weights in their dtype."""
    lost = whole = 0.0
    for layer in frozen_core_layers(model, "default").values():
        weight, update = layer.get_base_weight(), layer.get_delta_weight("default")
        merged = (weight + update).to(weight.dtype)
        lost += float((merged.float() - weight.float() - update).square().sum())
        whole += float(update.square().sum())
    return (lost / whole) ** 0.5 if whole else 0.0


def export_merged(
    directory: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
) -> Path:
    """Write base weights plus update, and the tokenizer of the adapter or of the base if either has one.

    Args:
        directory: A folder that ``save_pretrained`` or ``frozencore tune`` wrote.
        base: Folder, GGUF file or hub id of the base model; by default the one that the adapter names, in its revision.
        dtype: The dtype of the merged weights; ``auto`` keeps the base model's. In half precision the sum is rounded,
            and a warning says how much of the update that costs.

    Returns:
        The folder that was written.

    Raises:
        ArtifactError: The adapter is damaged, or ``out`` exists.
        ModelError: The base model cannot be read, is quantised, or the sum is not finite.
        ConfigError: The adapter names no base model and none was given.
    """
    directory, out = Path(directory), Path(out)
    saved = read_adapter(directory)
    revision = None if base else saved.config.revision
    base = base_name(directory, base, saved.config.base_model_name_or_path)
    loading = safe_loading(base, revision)
    with atomic_folder(out, overwrite=overwrite, reads=[directory, saved.config.basis, base]) as aside:
        why_not = "rounding to its grid would lose most of an update"
        base_model = load_base_model(base, dtype, loading, why_not)
        tokenizer = save_tokenizer(directory, aside, loading)
        try:
            if (directory / TOKENIZER_FILE).is_file() and tokenizer is not None:
                _embed_all(base_model, len(tokenizer))
            _require_modules(saved, base_model, base)
            adapted = PeftModel.from_pretrained(base_model, str(directory))
            lost = _lost_to_rounding(adapted)
            merged = adapted.merge_and_unload(safe_merge=True)
        except FrozenCoreError:
            raise
        except Exception as error:  # PEFT raises a dozen kinds for names, shapes and options that fit no layer
            reason = one_line(error, 200)
            raise ModelError(
                f"The adapter in {directory} cannot be merged into the base model {base}: {reason} "
                "Name the base model that it was trained on with base= (--base)."
            ) from error
        merged.save_pretrained(aside)
    if lost >= LOST_TO_ROUNDING:
        warnings.warn(
            f"Of the adapter's update, {lost:.2%} (Frobenius norm) is lost to rounding in {merged.dtype}. Merge in "
            "float32 (--dtype float32), or export a LoRA.",
            stacklevel=2,
        )
    return out
