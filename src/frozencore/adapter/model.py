"""The PEFT tuner that puts frozen cores on a model's linear layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import NoMatchingPeftModuleError
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import (
    AuxiliaryTrainingWrapper,
    TrainableTokensWrapper,
    get_quantization_kwargs,
    resolve_quantization_backend,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter import named_layers
from frozencore.adapter.config import FILLED_IN, FrozenCoreConfig, FrozenCoreType
from frozencore.adapter.core import BASE, sum_cores
from frozencore.adapter.layer import PREFIX, FrozenCoreLinear, stored_layer, warn_of_uncalibrated
from frozencore.adapter.loaded_adapter import LoadedAdapter, frozen_core_layers
from frozencore.adapter.loaded_basis import attach_basis
from frozencore.adapter.per_row import BASE_ROW, adapter_of_each_row, guard_recompute
from frozencore.adapter.quantised_layer import FrozenCoreQuantisedLinear
from frozencore.adapter.shared_factors import SharedFactors
from frozencore.adapter.state_dict import HEADS, tensors_to_load, tensors_to_save
from frozencore.calibration.preserve import disable_bnb_repacking
from frozencore.constructors import LayerData, build_basis
from frozencore.distributed import check_same_call, require_same_bases
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.unwrapped_model import base_names


class FrozenCoreModel(BaseTuner):
    """Frozen cores on a base model; made by ``peft.get_peft_model(base, FrozenCoreConfig(...))``."""

    prefix = PREFIX
    tuner_layer_cls = FrozenCoreLinear
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 - PEFT reads it; ours is DEFAULT_TARGETS
    _untied: Any = None  # the head that merging untied, its embedding and their configurations
    _warned_of_frozen = False

    _add_modules_to_save_to_tie = LoraModel._add_modules_to_save_to_tie  # concerns embeddings, not LoRA

    def __init__(self, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(peft_config, FrozenCoreConfig) and peft_config.load_bases:  # a PeftModel gives a dictionary
            raise ArtifactError(
                "transformers' load_adapter reads no frozen core. Use PeftModel.from_pretrained(model, FOLDER), or "
                "export the adapter as a LoRA, which load_adapter reads: frozencore export FOLDER --to lora."
            )
        super().__init__(model, peft_config, *args, **kwargs)

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, low_cpu_mem_usage: bool = False, **kwargs: Any
    ) -> None:
        """Add an adapter as PEFT does, with the bases that need no data; warn of layers narrower than the rank.

        The model keeps the configuration that it is given, with the names of its layers filled in. A configuration that
        another model has is copied.

        Raises:
            ArtifactError: A saved adapter was made on another base model, unless its configuration allows that.
            ConfigError: No layer matches the configuration, or the adapter cannot have this name.
        """
        _require_name(adapter_name, model)
        given = self.peft_config[adapter_name]
        sources = [name for name, one in self.peft_config.items() if one is given and name != adapter_name]
        config = self.peft_config[adapter_name] = given.for_model()
        before = {name: copy.copy(getattr(config, name)) for name in FILLED_IN}
        if config.basis is None and not config.load_bases:
            config.attach_basis_id(None)  # the id belongs to the model from which the configuration was taken
        if heads := HEADS.get(str(config.task_type), ()):
            given = config.modules_to_save or []
            config.modules_to_save = [*given, *(head for head in heads if head not in given)]
        if config.target_modules is None:
            config.target_modules = set(named_layers.attention_projections(model))
        named_layers.expand_patterns(config, model)
        named_layers.exclude_unusable(config, model)
        named_layers.require_tokens(config.trainable_token_indices, model)
        disable_bnb_repacking(model)
        with self._removed_if_it_fails(adapter_name, model):
            try:
                super().inject_adapter(model, adapter_name, *args, low_cpu_mem_usage=low_cpu_mem_usage, **kwargs)
            except NoMatchingPeftModuleError as error:
                if "not found in the base model" not in str(error):  # PEFT's other errors name their reason
                    raise
                raise named_layers.no_match(config, model) from error
            config.filled = {name: (value, copy.copy(getattr(config, name))) for name, value in before.items()}
            layers = frozen_core_layers(model, adapter_name)
            if not layers:
                raise ConfigError("Cores are put on layers, but rank_pattern gives each rank 0. Give some a rank.")
            named_layers.require_all_calls(model, layers)
            if not config.load_bases:
                named_layers.warn_of_unmatched(config, before, layers, model, heads=heads)
            if not low_cpu_mem_usage and not config.load_bases:  # else a file will bring the cores
                for layer in layers.values():
                    layer.fill_core(adapter_name)
            self._give_bases(LoadedAdapter(adapter_name, config, layers), sources)
        narrow = [name for name, layer in layers.items() if len(layer.core(adapter_name)) < config.rank_of(name)]
        if narrow and not config.load_bases:
            warnings.warn(
                f"{len(narrow)} of {len(layers)} layers are narrower than the rank and got the rank that fits (first: "
                f"{narrow[0]}, {len(layers[narrow[0]].core(adapter_name))} instead of {config.rank_of(narrow[0])}).",
                stacklevel=2,
            )

    @contextmanager
    def _removed_if_it_fails(self, adapter_name: str, model: nn.Module) -> Iterator[None]:
        """Take a new adapter out again if an error ends the block, so that the model is as it was."""
        trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            yield
        except Exception:
            if len(self.peft_config) == 1:
                self.unload()
            else:
                self.delete_adapter(adapter_name)
            for parameter, flag in trainable:
                parameter.requires_grad_(flag)
            raise

    def _create_and_replace(
        self,
        peft_config: FrozenCoreConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        rank = peft_config.rank_of(current_key)
        if rank == 0:
            return
        if not named_layers.is_called(target_name, parent):
            is_fused = named_layers.is_fused_in_evaluation(parent)
            way_out = " Or call torch.backends.mha.set_fastpath_enabled(False) before." if is_fused else ""
            raise ModelError(
                f"{type(parent).__name__} computes with the weight of {current_key!r} and does not call the "
                f"layer, so a core on it would have no effect. Leave it out of target_modules.{way_out}"
            )
        layer = target if isinstance(target, FrozenCoreLinear) else self._new_layer(target, adapter_name, current_key)
        if layer is not target:  # first: PEFT moves a new layer's tensors to its weight's device, meta if offloaded
            self._replace_module(parent, target_name, layer, target)
        scale = peft_config.scale_of(current_key)
        layer.update_layer(adapter_name, rank, scale, inference_mode=peft_config.inference_mode)
        if layer is not target and adapter_name not in self.active_adapters:
            layer.requires_grad_(False)

    def _give_bases(self, adapter: LoadedAdapter, sources: Sequence[str]) -> None:
        """Set the bases: of an adapter of the same kind, of a named basis, or built without data.

        Args:
            sources: The adapters whose configuration was given to this one, as TRL does for its reference.
        """
        config, origin = adapter.config, f"The adapter {adapter.name!r}"
        if config.basis is None and config.load_bases:
            adapter.require_same_base(origin, config.base_record)
        elif (other := self._with_same_basis(adapter, sources)) is not None:
            for layer in adapter.layers.values():
                layer.share_basis(adapter.name, other, random_core=not config.init_weights)
            if config.basis is None:
                known = self.peft_config[other]
                config.calibration_tokens, config.learning_rate = known.calibration_tokens, known.learning_rate
        elif config.basis is not None:
            attach_basis(adapter, config.find_basis(origin))
        elif not config.needs_calibration:
            for name, layer in adapter.layers.items():
                P, _, R = layer.factors(adapter.name)
                if P.is_meta or R.is_meta:
                    continue  # on the meta device there are only shapes, so bases cannot be built
                evidence = LayerData(name, layer.shape, layer.dense_weight)
                built = build_basis(config.constructor, evidence, config.basis_options(len(R)))
                layer.set_basis(adapter.name, built, random_core=not config.init_weights)

    def _with_same_basis(self, adapter: LoadedAdapter, sources: Sequence[str]) -> str | None:
        """Another adapter with the bases of the new one: the source of its configuration, or one that fits."""
        config = adapter.config
        has_own = config.basis is None and not config.needs_calibration  # others may have got a basis since
        names = dict.fromkeys([*sources, *([] if has_own else self.peft_config)])
        others = (name for name in names if name != adapter.name)
        first = next((name for name in others if self._fits(adapter, name)), None)
        if first is None or first in sources:
            return first
        P = next(iter(adapter.layers.values())).frozencore_P  # layers get their bases together
        apart = (name for name in others if name in P and P[name] is not P[first])
        if (second := next((name for name in apart if self._fits(adapter, name)), None)) is not None:
            warnings.warn(
                f"Adapters of equal options share a basis, but {first!r} and {second!r} have different ones: "
                f"{adapter.name!r} got that of {first!r}. Call frozencore.set_basis for another.",
                stacklevel=2,
            )
        return first

    def _fits(self, adapter: LoadedAdapter, name: str) -> bool:
        """Whether another adapter has the configuration, the shapes and the named basis of the new one."""
        config, layers, other_config = adapter.config, adapter.layers, self.peft_config[name]
        if not isinstance(other_config, FrozenCoreConfig) or other_config.constructor != config.constructor:
            return False
        other = LoadedAdapter(name, other_config, frozen_core_layers(self.model, name))
        if other_config.basis_options() != config.basis_options() or other.layers.keys() != layers.keys():
            return False
        if config.basis is not None and other.basis_id != config.basis_id:
            return False
        kinds = [
            [
                (layer.frozencore_scale[one], *((X.shape, X.dtype, X.device) for X in layer.factors(one)[:2]))
                for layer in layers.values()
            ]
            for one in (adapter.name, name)
        ]
        return kinds[0] == kinds[1]

    def _new_layer(self, target: nn.Module, adapter_name: str, name: str) -> FrozenCoreLinear:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        backend = resolve_quantization_backend(base, **get_quantization_kwargs(self))
        is_linear = isinstance(base, nn.Linear | Conv1D) or (backend is not None and backend.layer_type == "linear")
        if not is_linear or not named_layers.is_plain_linear(base):
            raise ModelError(
                f"A frozen core sits on a linear layer, but target {name!r} is a {type(base).__name__}. Name linear "
                "layers in target_modules; fused experts, routers, embeddings and convolutions are not supported."
            )
        dtype = getattr(self.model, "dtype", torch.float32)
        kind = FrozenCoreLinear if backend is None else FrozenCoreQuantisedLinear
        warned = self.__dict__.setdefault("_warned", set())
        return kind(target, adapter_name, name, dtype=dtype, warned=warned, **get_quantization_kwargs(self))

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Replace a module; PEFT's method would assign the computed weights of trainable tokens to their embedding."""
        if isinstance(child, AuxiliaryTrainingWrapper):
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Turn PEFT's state dict of an adapter into the tensors of a file."""
        state: dict[str, Tensor] = super()._get_adapter_state_dict(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict, **kwargs
        )
        return tensors_to_save(state, model, config, adapter_name, state_dict)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Turn the tensors of a file into PEFT's state dict."""
        return super()._remap_adapter_state_dict_for_load(
            model=model,
            config=config,
            adapter_name=adapter_name,
            state_dict=tensors_to_load(model, config, adapter_name, state_dict),
        )

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "linear",
        **options: object,
    ) -> None:
        """Add an adapter whose core is the weighted sum of cores on the same basis: exactly the sum of their updates.

        Args:
            adapters, weights: As in PEFT's LoRA.
            adapter_name: The new adapter; an existing adapter of this name stays unchanged.
            combination_type: Must be ``"linear"``, which has no options.

        Raises:
            ConfigError: An unknown combination, a wrong number of weights, or trained modules besides cores.
            ArtifactError: The adapters differ in layers, bases, ranks or scales.
        """
        if combination_type != "linear" or options:
            given = ", ".join([f"combination_type={combination_type!r}", *options])
            raise ConfigError(
                "Cores on one basis are summed exactly by combination_type='linear', without options, but "
                f"{given} was given."
            )
        if adapter_name in self.peft_config:
            return
        loaded = [LoadedAdapter.of(self, name) for name in adapters]
        for one in loaded:
            one.config.require_core_alone(f"the adapter {one.name!r}", "Only cores are summed")
        total = sum_cores([one.core for one in loaded], [repr(name) for name in adapters], weights)
        first = loaded[0]
        _require_name(adapter_name, self.model)
        config = self.peft_config[adapter_name] = copy.deepcopy(first.config)
        config.filled = None
        self.inject_adapter(self.model, adapter_name)
        for name, R in total.by_layer(first.ranks).items():
            layer = first.layers[name]
            layer.set_basis(adapter_name, layer.basis(first.name), start_core=R)
            layer.attach_basis_id(adapter_name, total.basis_id, layer.frozencore_mark[first.name].digest)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge as PEFT does, after the checks of merging; warn of active adapters that merged weights leave out."""
        self._prepare_merging(adapter_names)
        super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
        merged = [layer for layer in self.model.modules() if isinstance(layer, FrozenCoreLinear) and layer.merged]
        beside = {name for layer in merged for name in layer.frozencore_R if name not in layer.merged_adapters}
        if left := [name for name in self.active_adapters if name in beside]:
            warnings.warn(
                f"A merged layer computes with merged adapters alone, but of the active ones {', '.join(left)} are not "
                "merged: they have no effect in merged layers until unmerge_adapter(), and act in the others.",
                stacklevel=2,
            )

    def unmerge_adapter(self) -> None:
        """Unmerge as PEFT does, and tie a head again that merging untied."""
        super().unmerge_adapter()
        if self._untied is not None:
            head, embedding, configs = self._untied
            head.weight = embedding.weight
            for config, was_tied in configs:
                config.tie_word_embeddings = was_tied
            self._untied = None

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:  # fmt: skip
        if merge:
            self._prepare_merging(adapter_names)
        return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    def _prepare_merging(self, adapter_names: list[str] | None) -> None:
        """Warn of zero bases, refuse weights that two layers share or that are computed, and untie an adapted head."""
        num_owners = named_layers.owners_of_weights(self.model)
        merged: list[FrozenCoreLinear] = []
        for adapter_name in self.active_adapters if adapter_names is None else adapter_names:
            layers = frozen_core_layers(self.model, adapter_name)
            merged += layers.values()
            first = next((layer.basis(adapter_name) for layer in layers.values()), None)  # all get theirs together
            if first is not None and not first.P.is_meta and not first.is_set:
                warn_of_uncalibrated(f"The adapter {adapter_name!r} that is merged", "before it is merged")
            for name, layer in layers.items():
                if layer.quantization_backend is None and "weight" not in layer.get_base_layer()._parameters:
                    raise ModelError(
                        f"Layer {name!r} computes its weight from other tensors (trainable_token_indices, pruning, "
                        "parametrizations), so a merged update would be lost. Keep the adapter unmerged."
                    )
                num_others = num_owners[id(getattr(layer.get_base_layer(), "weight", None))] - 1
                if num_others > 0:
                    raise ModelError(
                        f"Layer {name!r} shares its weight with {num_others} other(s), so a merged update would "
                        "change them too. Keep the adapter unmerged, or export it as a LoRA."
                    )
        self._untie_head(merged)

    def _untie_head(self, merged: Sequence[FrozenCoreLinear]) -> None:
        """Copy the weight of an output layer that is merged into, so that the input embedding does not change.

        A core is merged into it, or tokens that are trained there alone.
        """
        model: Any = self.model
        head, embedding = (getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("output", "input"))
        has_own_tokens = isinstance(head, TrainableTokensWrapper) and head.token_adapter.tied_adapter is None
        if not (has_own_tokens or (isinstance(head, FrozenCoreLinear) and head in merged)):
            return
        layer = stored_layer(head)
        is_tied = layer.weight is getattr(stored_layer(embedding), "weight", None)
        if not is_tied:
            return
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
        known = [(config, getattr(config, "tie_word_embeddings", True)) for config in configs]
        self._untied = layer, stored_layer(embedding), known
        for config in configs:
            config.tie_word_embeddings = False  # so that the merged model is saved with both

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Handle mixed batches, and checkpointing, in every forward and generate of a PeftModel."""
        names, config = kwargs.get("adapter_names"), kwargs.get("generation_config")
        options = ("num_beams", "num_return_sequences")  # generate repeats each row as often
        copies = max(kwargs.get(option) or getattr(config, option, None) or 1 for option in options)
        self._warn_if_nothing_trains()
        with guard_recompute(self) if names is None else adapter_of_each_row(self, names, num_beams=copies):
            yield

    def _warn_if_nothing_trains(self) -> None:
        """Warn once of a pass in training mode that uses no parameter that trains.

        With gradient checkpointing such a run ends without an error, and trainers log a loss and even a gradient.
        """
        if torch.compiler.is_compiling() or not self.training or self._warned_of_frozen:
            return
        layers = (module for module in self.modules() if isinstance(module, FrozenCoreLinear))
        merged: set[int] = set()
        is_used = False
        for layer in layers:  # in training the first one ends this
            if not layer.merged and any(parameter.requires_grad for parameter in layer.parameters()):
                return
            merged |= {id(parameter) for parameter in layer.parameters()} if layer.merged else set()
            is_used |= not layer.disable_adapters and layer.per_row is None  # as in a reference, or in a bank
        if is_used and not any(each.requires_grad and id(each) not in merged for each in self.parameters()):
            self._warned_of_frozen = True
            warnings.warn(
                "The model is in training mode, but no parameter trains that it uses. PEFT loads adapters frozen: give "
                "is_trainable=True. prepare_model_for_kbit_training freezes them: call model.set_adapter(NAME) before "
                "the trainer or the optimizer is made. A merged core is not used: call model.unmerge_adapter().",
                stacklevel=5,
            )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names of the bases in a PeftModel: DistributedDataParallel would broadcast them at every forward.

        All ranks have the same bases, from calibration or from seeds. DistributedDataParallel reads this property when
        it starts, so differing bases are refused here.
        """
        check_same_call("torch's DistributedDataParallel on the model")
        require_same_bases(
            {
                f"{adapter_name} {name}": layer.factors(adapter_name)[:2]
                for adapter_name in self.peft_config
                for name, layer in frozen_core_layers(self.model, adapter_name).items()
            }
        )
        names = (f"{BASE}{name}" for name, _ in self.model.named_buffers())
        return [name for name in names if f".{PREFIX}" in name]

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Cast R to float32, or to the base model's dtype if asked. PEFT's cast would widen P and Q too."""
        for layer in frozen_core_layers(self, adapter_name).values():
            layer.set_core_dtype(adapter_name, widened=autocast_adapter_dtype)


def register_with_peft() -> None:
    """Add the method to PEFT's tables; ``register_peft_method`` accepts only names of PEFT's enum."""
    kind: Any = FrozenCoreType.FROZENCORE
    PEFT_TYPE_TO_CONFIG_MAPPING[kind] = FrozenCoreConfig
    PEFT_TYPE_TO_TUNER_MAPPING[kind] = FrozenCoreModel
    PEFT_TYPE_TO_PREFIX_MAPPING[kind] = PREFIX


def _require_name(adapter_name: str, model: nn.Module) -> None:
    """Refuse a name that is not one plain part of a path, or that PEFT would find in the names of other weights."""
    parts = {part for name in base_names(model) for part in name.split(".")}
    parts |= {"base_model", "model", "base_layer", "modules_to_save", "original_module", "token_adapter", BASE_ROW}
    is_plain = adapter_name.isprintable() and adapter_name == adapter_name.strip()
    is_plain = is_plain and 0 < len(adapter_name.encode()) < 256
    of_torch = any(hasattr(holder, adapter_name) for holder in (nn.ModuleDict(), SharedFactors()))
    if not is_plain or any(sign in adapter_name for sign in "./\\") or of_torch or adapter_name in parts:
        raise ConfigError(
            "An adapter's name is one plain part of a path without a dot, no word of torch's modules or PEFT (such as "
            f"'train', 'keys', {BASE_ROW!r}), and no part of a weight's name, but {adapter_name!r:.60} was given. "
            "Choose another name."
        )
