"""Modules of vLLM with the names and signatures that our plug-in uses, and the plug-in, which imports them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig


class Registry:
    """vLLM's ``LoRAResolverRegistry``."""

    def __init__(self) -> None:
        self.resolvers: dict[str, Any] = {}

    def get_supported_resolvers(self) -> Any:
        return self.resolvers.keys()

    def register_resolver(self, resolver_name: str, resolver: Any) -> None:
        self.resolvers[resolver_name] = resolver


class ServingModels:
    """What of vLLM's ``OpenAIServingModels`` (0.32) asks resolvers.

    Args:
        targets: Those of ``--lora-target-modules``; None without the flag.
    """

    def __init__(self, model: str, registry: Registry, targets: list[str] | None = None) -> None:
        lora, config = SimpleNamespace(target_modules=targets), AutoConfig.from_pretrained(model)
        whole = SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(hf_config=config))
        self.engine_client = SimpleNamespace(vllm_config=whole)
        self.lora_requests: dict[str, Any] = {}
        self.model, self.registry, self.number = model, registry, 0

    async def resolve_lora(self, lora_name: str) -> Any:
        if lora_name in self.lora_requests:
            return self.lora_requests[lora_name]
        self.number += 1
        for resolver in self.registry.resolvers.values():
            request = await resolver.resolve_lora(self.model, lora_name)
            if request is not None:
                request.lora_int_id = self.number
                self.lora_requests[lora_name] = request
                return request
        return "404"


class Layer:
    """vLLM's ``ReplicatedLinearWithLoRA``."""


REGISTRY = Registry()
CONTENTS: dict[str, dict[str, Any]] = {
    "vllm": {}, "vllm.lora": {}, "vllm.lora.utils": {"_all_lora_classes": ()}, "vllm.entrypoints": {},
    "vllm.entrypoints.openai": {}, "vllm.entrypoints.openai.models": {},
    "vllm.entrypoints.openai.models.serving": {"OpenAIServingModels": ServingModels},
    "vllm.lora.lora_model": {"LoRAModel": SimpleNamespace},
    "vllm.lora.lora_weights": {"LoRALayerWeights": SimpleNamespace},
    "vllm.lora.request": {"LoRARequest": SimpleNamespace},
    "vllm.lora.resolver": {"LoRAResolver": object, "LoRAResolverRegistry": REGISTRY},
    "vllm.lora.layers": {"ReplicatedLinearWithLoRA": Layer},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None}, "vllm.platforms": {"current_platform": None},
}  # fmt: skip
MODULES = {name: ModuleType(name) for name in CONTENTS}
for name, module in MODULES.items():
    vars(module).update(CONTENTS[name])
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(MODULES[parent], last, module)
with pytest.MonkeyPatch.context() as patched:
    for name, module in MODULES.items():
        patched.setitem(sys.modules, name, module)
    import frozencore_vllm as frozencore_vllm
