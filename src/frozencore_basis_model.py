"""A language model with a basis: ``y = base(x) + P(core(Q(x)))`` in each adapted layer, with zero cores.

A tenant is a plain LoRA on the ``core`` layers only, so an engine holds P and Q once for all tenants.

The base can be any causal language model of transformers. ``config.json`` is the base model's, with the model type
``frozencore_basis_model`` and the entry ``frozencore_basis``: the name of the base model's configuration class and the
rank of each adapted layer. Classes are derived from the base model's when such a configuration is read.

This file needs only torch and transformers, nothing else of this package: engines load it as a plugin (``register``),
and a model folder may include it as its code.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, distributed, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

MODEL_TYPE = "frozencore_basis_model"
ENTRY = "frozencore_basis"
PARTS = ("base", "Q", "core", "P")
# Tensor-parallel split of a layer's parts, by the base's own entry in the plan: a split output splits the rows of P,
# and a split input is summed after Q.
_SPLIT = {
    "colwise": {"base": "colwise", "P": "colwise"},
    "colwise_gather_output": {"base": "colwise_gather_output", "P": "colwise_gather_output"},
    "rowwise": {"base": "rowwise", "Q": "rowwise"},
    "rowwise_split_input": {"base": "rowwise_split_input", "Q": "rowwise_split_input"},
}


class LinearOnBasis(nn.Module):
    """A linear layer with Q (n -> r), a zero core (r -> r) and P (r -> m)."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        m, n = (base.nf, base.nx) if isinstance(base, Conv1D) else (base.out_features, base.in_features)
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.Q = nn.Linear(n, rank, **like)
        self.core = nn.Linear(rank, rank, **like)
        self.P = nn.Linear(rank, m, **like)
        nn.init.zeros_(self.core.weight)

    def forward(self, x: Tensor) -> Tensor:
        return _add_core(self.base(x), self.Q(x), self.core, self.P)

    @property
    def weight(self) -> Any:
        """The base layer's weight, because some models read its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """The base layer's bias."""
        return self.base.bias


class LinearApartFromBasis(LinearOnBasis):
    """The same layer for a model that several processes share, or that the engine quantises.

    vLLM merges linear layers with the same input into one column-parallel layer, even if its plan splits them
    differently, and quantises merged layers together. A new view of the input prevents merging.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _add_core(self.base(x), self.Q(x.view_as(x)), self.core, self.P)


def _add_core(y: Tensor, z: Tensor, core: Any, P: Any) -> Tensor:
    """Return ``y + P(core(z))``; vLLM's slots for cores add it to y in place, which nothing else holds."""
    added: Tensor = core(y, z, P) if hasattr(core, "cores") else y + P(core(z))
    return added


class BasisModelConfig(PreTrainedConfig):
    """The class of the model type for ``AutoConfig``; a configuration itself is of :func:`config_class`."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of the class that its entry names."""
        return config_class(config_dict[ENTRY]["config"]).from_dict(config_dict, **kwargs)


@cache
def config_class(base_name: str) -> type[PreTrainedConfig]:
    """Make the base configuration's class with the entry, and register its models with ``AutoModel``.

    Args:
        base_name: The name of the base model's configuration class in transformers, such as ``"LlamaConfig"``.
    """
    base: Any = getattr(transformers, base_name, None)
    if not (isinstance(base, type) and issubclass(base, PreTrainedConfig)):
        raise ValueError(f"A basis model is made from a model of transformers, but this one has no {base_name!r:.60}.")

    def reduce(self: Any) -> Any:
        return _config_again, (base_name, self.__dict__)

    own: Any = type(
        f"BasisOf{base_name}", (base,), {"model_type": MODEL_TYPE, "__module__": __name__, "__reduce__": reduce}
    )
    for auto in (AutoModel, AutoModelForCausalLM):
        if base in auto._model_mapping:
            auto.register(own, _model_class(auto._model_mapping[base], own), exist_ok=True)
    return own


def _config_again(base_name: str, state: dict[str, Any]) -> Any:
    """Unpickle a configuration in another process, where its class is made again."""
    kind: Any = config_class(base_name)
    config = kind.__new__(kind)
    config.__dict__.update(state)
    return config


def _model_class(base: Any, config_type: type[PreTrainedConfig]) -> Any:
    own = {"config_class": config_type, "__module__": __name__}
    return type(f"BasisOf{base.__name__}", (_OnBasis, base), own)


class _OnBasis:
    """A mixin before a model's class: it builds the model, then inserts the basis."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        insert_basis(self, getattr(config, ENTRY)["ranks"])


def insert_basis(model: Any, ranks: dict[str, int]) -> None:
    """Replace each named linear layer by a layer with a basis; names are those in the causal language model."""
    within = f"{model.base_model_prefix}."
    is_whole = hasattr(model, model.base_model_prefix)
    places = {name if is_whole else name.removeprefix(within): (name, rank) for name, rank in ranks.items()}
    _give_vllm_slots_for_cores()
    shared = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    kind = LinearApartFromBasis if shared or _quantised_by_vllm() else LinearOnBasis
    for place, (_, rank) in places.items():
        parent, _, last = place.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, last, kind(getattr(owner, last), rank))
    plan = {} if is_whole else getattr(model, "_tp_plan", None)
    if plan:
        model._tp_plan = _tensor_parallel_plan(plan, places)


def _quantised_by_vllm() -> bool:
    """Return whether vLLM is building the model and will quantise its linear layers."""
    building = _vllm_config()
    return bool(building and building.quant_config)


def _of_vllm(module: str) -> Any:
    """A module of vLLM. transformers refuses code whose import statements name a package that is not installed."""
    return import_module(f"vllm.{module}")


def _vllm_config() -> Any:
    """Return the configuration of the vLLM engine that is building the model; None without one."""
    vllm = sys.modules.get("vllm.config")
    return vllm and vllm.get_current_vllm_config_or_none()


def _tensor_parallel_plan(plan: dict[str, str], places: Any) -> dict[str, str]:
    """The plan with a layer's parts before the layer, because readers take the first matching pattern."""
    parts: dict[str, str] = {}
    for place in places:
        pattern = ".".join("*" if word.isdigit() else word for word in place.split("."))
        if pattern in plan:
            split = _SPLIT.get(plan[pattern], {})
            parts |= {f"{pattern}.{part}": split.get(part, "replicate") for part in PARTS}
    return {**parts, **plan}


def register() -> None:
    """Register the model type with transformers' ``AutoConfig`` and ``AutoModel``; repeated calls are harmless."""
    AutoConfig.register(MODEL_TYPE, BasisModelConfig, exist_ok=True)


def _give_vllm_slots_for_cores() -> None:
    """Let vLLM on a CPU, without compiling, hold an r x r matrix for each slot of a core in place of A = I and B = s·R.

    vLLM's own LoRA layer takes twelve small operations for a core, and A and B take twice the memory. It stays where
    vLLM compiles the model, because a compiled graph would keep the first batch's rows for all batches.
    """
    building = _vllm_config()
    if not building or not building.model_config.enforce_eager:
        return
    utils, current_platform = _of_vllm("lora.utils"), _of_vllm("platforms").current_platform

    if current_platform.is_cpu() and _slots_for_cores() not in utils._all_lora_classes:
        utils._all_lora_classes = (_slots_for_cores(), *utils._all_lora_classes)


_LARGEST_KEPT = 256  # cores of a batch that a layer keeps for the next one


class _Batch(NamedTuple):
    """The tenants of a batch: neighbouring rows of one tenant are a group, where all groups have as many rows."""

    cores: Tensor  # of each group
    rows_each: int
    is_empty: bool


def _note_batches(punica: Any) -> None:
    """Let vLLM's account of a batch, made when the rows' tenants change, also hold a :class:`_Batch`."""
    update = punica.update_metadata

    def update_metadata(*args: Any, **given: Any) -> None:
        update(*args, **given)
        slots, counts = torch.unique_consecutive(punica.token_lora_indices, return_counts=True)
        rows_each = int(counts[0])
        if bool((counts != rows_each).any()):
            slots, rows_each = punica.token_lora_indices, 1
        punica.batch_of_tenants = _Batch(slots + 1, rows_each, is_empty=bool((slots < 0).all()))

    punica.update_metadata = update_metadata
    punica.batch_of_tenants = _Batch(torch.empty(0), 1, is_empty=True)


@cache
def _slots_for_cores() -> Any:
    with_slots: Any = _of_vllm("lora.layers").ReplicatedLinearWithLoRA

    class CoreWithSlots(with_slots):
        """A core layer with a core for each slot, after a core of zeros: rows without a tenant have the slot -1."""

        def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
            shape = (max_loras + 1, self.input_size, self.output_size)
            self.cores = torch.zeros(shape, dtype=lora_config.lora_dtype, device=self.device)
            self.lora_a_stacked = self.lora_b_stacked = (self.cores.unsqueeze(1),)  # vLLM reads their shapes
            self.batch: _Batch | None = None
            self.cores_of_batch = self.cores[:0]
            self.P: Tensor | None = None

        def set_mapping(self, punica_wrapper: Any) -> None:
            super().set_mapping(punica_wrapper)
            if not hasattr(punica_wrapper, "batch_of_tenants"):
                _note_batches(punica_wrapper)

        def reset_lora(self, index: int) -> None:
            self.cores[index + 1].zero_()
            self.batch = None

        def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor) -> None:
            core = lora_b @ lora_a if lora_a.numel() else lora_b
            r_out, r_in = core.shape
            if core.shape != self.cores.shape[:0:-1]:
                self.reset_lora(index)
            self.cores[index + 1, :r_in, :r_out] = core.mT
            self.batch = None

        def forward(self, y: Tensor, z: Tensor, P: Any) -> Tensor:
            """Add P times the product to y, in place."""
            batch = self.punica_wrapper.batch_of_tenants
            if batch.is_empty:
                return y
            if self.P is None:  # its rows, exact: vLLM may hold P packed
                self.P = P(torch.eye(self.output_size, dtype=z.dtype, device=z.device))
            return y.flatten(0, -2).addmm_(self.product(z, batch), self.P).view(y.shape)

        def product(self, z: Tensor, batch: _Batch) -> Tensor:
            """Multiply each row by its tenant's core; a small batch like the one before has its cores at hand."""
            if self.batch is batch:
                cores = self.cores_of_batch
            else:
                cores = self.cores.index_select(0, batch.cores)
                if len(cores) <= _LARGEST_KEPT:
                    self.batch, self.cores_of_batch = batch, cores
            rows = z.reshape(-1, batch.rows_each, self.input_size)
            return torch.bmm(rows.to(cores.dtype), cores).flatten(0, 1).to(z.dtype)

        @classmethod
        def can_replace_layer(cls, source_layer: Any, **given: Any) -> bool:
            is_core = getattr(source_layer, "prefix", "").endswith(f".{PARTS[2]}")
            return is_core and super().can_replace_layer(source_layer=source_layer, **given)

    return CoreWithSlots


class TenantWorker:
    """Methods that vLLM's workers get by ``worker_extension_cls``: a tenant enters from memory, without a folder.

    ``LLM(..., worker_extension_cls="frozencore_basis_model.TenantWorker")``, then
    ``llm.collective_rpc("put_tenant", args=(1, weights))`` and ``LoRARequest(name, 1, "memory")`` as for any adapter.
    """

    def put_tenant(self: Any, number: int, weights: bytes) -> None:
        """Load a tenant under a number, in place of the one that has it, and into a slot.

        vLLM's prefix cache is not told: call ``llm.reset_prefix_cache()`` after a tenant was replaced. A tenant that
        vLLM evicts (``max_cpu_loras``) must be put again.

        Args:
            number: ``lora_int_id`` of the requests, from 1.
            weights: What ``frozencore.tenant_weights`` returns: safetensors, s·R of each layer.

        Raises:
            ValueError: The cores belong to another basis than the model's.
        """
        from safetensors.torch import load

        weights_of_layer = _of_vllm("lora.lora_weights").LoRALayerWeights
        parse_name = _of_vllm("lora.utils").parse_fine_tuned_lora_name

        loras = self.model_runner.lora_manager
        manager = loras._adapter_manager
        _require_basis(weights, getattr(self.model_config.hf_config, ENTRY))
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renamed = mapper and mapper.get_rename_mapper()
        layers = {}
        for key, core in load(weights).items():
            name, is_a = parse_name(key, renamed)
            if not is_a:
                B = core.to(loras.lora_config.lora_dtype)
                A = torch.eye(0 if hasattr(manager.modules[name], "cores") else B.shape[1], dtype=B.dtype)
                layers[name] = weights_of_layer(name, B.shape[1], B.shape[1], A, B)
        tenant = _of_vllm("lora.lora_model").LoRAModel(number, max(layer.rank for layer in layers.values()), layers)
        manager.remove_adapter(number)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(tenant)
        manager.activate_adapter(number)


def _require_basis(weights: bytes, entry: dict[str, Any]) -> None:
    """Compare the basis id in the header of a tenant's weights with the model's."""
    start = 8  # bytes of the header's length
    header = json.loads(weights[start : start + int.from_bytes(weights[:start], "little")])
    basis_id = header.get("__metadata__", {}).get(ENTRY)
    if basis_id != entry["basis_id"]:
        raise ValueError(
            f"The tenant has a core on the basis {basis_id}, but this model has {entry['basis_id']}. "
            "A core works on one basis only."
        )
