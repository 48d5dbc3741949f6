"""A language model with a basis: ``y = base(x) + P(core(Q(x)))`` in each adapted layer, with zero cores.

A tenant is a plain LoRA on the ``core`` layers only, so an engine holds P and Q once for all tenants.

The base can be any causal language model of transformers. ``config.json`` is the base model's, with the model type
``frozencore_basis_model`` and the entry ``frozencore_basis``: the name of the base model's configuration class and the
rank of each adapted layer. Classes are derived from the base model's when such a configuration is read.

This file needs only torch and transformers, nothing else of this package: a model folder may include it as its code.
It changes nothing of an engine; :mod:`frozencore_vllm` does.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

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
    """Return ``y + P(core(z))``; a core with slots (:mod:`frozencore_vllm`) adds it to y in place."""
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
    base: Any = getattr(transformers, base_name)

    def reduce(self: Any) -> Any:
        return _config_again, (base_name, self.__dict__)

    kind: Any = type(
        f"BasisOf{base_name}", (base,), {"model_type": MODEL_TYPE, "__module__": __name__, "__reduce__": reduce}
    )
    for auto in (AutoModel, AutoModelForCausalLM):
        if base in auto._model_mapping:
            auto.register(kind, _model_class(auto._model_mapping[base], kind), exist_ok=True)
    return kind


def _config_again(base_name: str, state: dict[str, Any]) -> Any:
    """Unpickle a configuration in another process, where its class is made again."""
    kind: Any = config_class(base_name)
    config = kind.__new__(kind)
    config.__dict__.update(state)
    return config


def _model_class(base: Any, config_type: type[PreTrainedConfig]) -> Any:
    attributes = {"config_class": config_type, "__module__": __name__}
    return type(f"BasisOf{base.__name__}", (_OnBasis, base), attributes)


class _OnBasis:
    """A mixin before a model's class: it builds the model, then inserts the basis."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        insert_basis(self, getattr(config, ENTRY)["ranks"])

    @classmethod
    def is_custom_code(cls) -> bool:
        """Let transformers fill the tensors that no file has as in the base model: it skips some in a user's class."""
        return False


def insert_basis(model: Any, ranks: dict[str, int]) -> None:
    """Replace each named linear layer by a layer with a basis; names are those in the causal language model."""
    within = f"{model.base_model_prefix}."
    is_whole = hasattr(model, model.base_model_prefix)
    places = {name if is_whole else name.removeprefix(within): (name, rank) for name, rank in ranks.items()}
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
