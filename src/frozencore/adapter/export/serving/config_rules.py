"""What engines ask of ``adapter_config.json``. Each function returns what is wrong, or None.

Sources, by their paths in the repositories vllm-project/vllm, sgl-project/sglang and ggml-org/llama.cpp:
``vllm/lora/peft_helper.py`` reads the fields of its ``PEFTHelper`` and ignores all others;
``python/sglang/srt/lora/lora_config.py`` and ``lora.py`` read peft_type, r, lora_alpha, target_modules and use_dora;
``convert_lora_to_gguf.py`` reads lora_alpha (and the base model's name), ``src/llama-adapter.h`` scales by
alpha over each tensor's own rank.
"""

from __future__ import annotations

from math import isfinite

from frozencore.adapter.export.serving.lora_directory import LoraDirectory

# The ranks that vLLM may be started with: MaxLoRARanks in vllm/config/lora.py. An adapter may have any rank below.
VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Initialisations that leave the base weights alone: PEFTHelper._init_is_supported in vllm/lora/peft_helper.py.
_PLAIN_STARTS = {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}
# Names after which SGLang sizes its buffers: params_mapping and _KNOWN_LORA_TARGET_MODULES in srt/lora/utils.py.
_SGLANG_MODULES = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "gate_up_proj",
    "down_proj", "in_proj", "in_proj_qkv", "in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_qkvz",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "fused_qkv_a_proj_with_mqa", "embed_tokens", "lm_head",
    "fc1_latent_proj", "fc2_latent_proj",
}  # fmt: skip


def vllm_max_rank(rank: int | None) -> int | None:
    """The smallest ``--max-lora-rank`` that admits a rank; None if vLLM has none."""
    return next((largest for largest in VLLM_MAX_RANKS if rank is not None and largest >= rank), None)


def is_lora(lora: LoraDirectory) -> str | None:
    """SGLang asserts it; to the others the tensors of another method have unknown names."""
    kind = lora.config.get("peft_type")
    return None if str(kind).upper() == "LORA" else f"peft_type is {kind!r}"


def rank_is_positive(lora: LoraDirectory) -> str | None:
    """vLLM refuses r <= 0, in ``rank_pattern`` too (``PEFTHelper.__post_init__``); SGLang divides by it."""
    bad = [rank for rank in lora.ranks if not isinstance(rank, int) or rank <= 0]
    return f"r is {bad[0]!r}" if bad else None


def rank_fits_vllm(lora: LoraDirectory) -> str | None:
    """``PEFTHelper.validate_legal`` compares ranks with ``--max-lora-rank``, which is one of ``VLLM_MAX_RANKS``."""
    rank = lora.largest_rank
    return f"r is {rank}" if rank is not None and rank > VLLM_MAX_RANKS[-1] else None


def alpha_is_a_number(lora: LoraDirectory) -> str | None:
    """All scale by alpha / r: vLLM divides what is there, llama.cpp's converter asks for a float."""
    alpha = lora.config.get("lora_alpha")
    return None if isinstance(alpha, int | float) and isfinite(alpha) else f"lora_alpha is {alpha!r}"


def alpha_is_not_zero(lora: LoraDirectory) -> str | None:
    """llama.cpp takes an alpha of 0 for a scale of 1 (``get_scale``); the others serve the base model, as PEFT does."""
    return "lora_alpha is 0" if lora.config.get("lora_alpha") == 0 else None


def one_alpha(lora: LoraDirectory) -> str | None:
    """SGLang refuses alpha_pattern (``LoRAConfig.alpha_overrides``); llama.cpp does not see it."""
    alpha = lora.config.get("lora_alpha")
    other = {key: value for key, value in lora.mapping("alpha_pattern").items() if value != alpha}
    return f"alpha_pattern is {other}" if other else None


def one_rank(lora: LoraDirectory) -> str | None:
    """SGLang refuses rank_pattern (``LoRAConfig.rank_overrides``)."""
    rank = lora.config.get("r")
    other = {key: value for key, value in lora.mapping("rank_pattern").items() if value != rank}
    return f"rank_pattern is {other}" if other else None


def plain_scale(lora: LoraDirectory) -> str | None:
    """``LoRAAdapter.scaling`` of SGLang and ``get_scale`` of llama.cpp are alpha / r, never alpha / sqrt(r)."""
    return "use_rslora is true" if lora.config.get("use_rslora") else None


def no_dora(lora: LoraDirectory) -> str | None:
    """vLLM and SGLang refuse DoRA; llama.cpp exits at its magnitude vectors."""
    return "use_dora is true" if lora.config.get("use_dora") else None


def no_bias(lora: LoraDirectory) -> str | None:
    """``PEFTHelper.validate_legal``: adapter bias is not supported."""
    bias = lora.config.get("bias", "none")
    return None if bias in (None, "none") else f"bias is {bias!r}"


def no_whole_modules(lora: LoraDirectory) -> str | None:
    """``PEFTHelper._validate_features``: modules_to_save is None, or the head of a classifier."""
    modules = lora.config.get("modules_to_save")
    return f"modules_to_save is {modules}" if modules else None


def plain_start(lora: LoraDirectory) -> str | None:
    """PiSSA, OLoRA, CorDA and LoftQ change the base weights when PEFT loads; no engine does, so outputs differ."""
    start = lora.config.get("init_lora_weights", True)
    return f"init_lora_weights is {start!r}" if isinstance(start, str) and start.lower() not in _PLAIN_STARTS else None


def targets_listed(lora: LoraDirectory) -> str | None:
    """``get_normalized_target_modules`` of SGLang takes a list, "all" or "all-linear", no regular expression."""
    targets = lora.config.get("target_modules")
    if isinstance(targets, list) or targets in ("all", "all-linear"):
        return None
    return f"target_modules is {targets!r}"


def targets_known_to_sglang(lora: LoraDirectory) -> str | None:
    """``get_default_hidden_dim`` of SGLang raises for other names, unless the model class brings its own."""
    if lora.is_tenant:
        return None  # no_tenant says it
    targets = lora.config.get("target_modules")
    listed = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
    unknown = [name for name in listed if name.rpartition(".")[2] not in _SGLANG_MODULES]
    return f"target_modules names {', '.join(sorted(unknown))}" if unknown else None


def no_variant(lora: LoraDirectory) -> str | None:
    """Other arithmetic than B A. vLLM refuses these but ``arrow_config`` (read, not run); the others pass over them."""
    names = ("layer_replication", "use_qalora", "use_bdlora", "arrow_config", "lora_bias")
    found = [name for name in names if lora.config.get(name)]
    return f"{', '.join(found)} set" if found else None


def no_activation(lora: LoraDirectory) -> str | None:
    """Activated LoRA: vLLM refuses, llama.cpp turns it on a token before PEFT does, SGLang at the first."""
    return "alora_invocation_tokens is set" if lora.config.get("alora_invocation_tokens") else None


def no_conv1d(lora: LoraDirectory) -> str | None:
    """llama.cpp turns GPT-2's weights around and swaps A and B with them (``modify_tensors`` of its GPT-2 model,
    ``LoraTorchTensor.permute``); vLLM's GPT-2 has no LoRA and SGLang drops layers that are not called ``layers.N``."""
    return "fan_in_fan_out is true" if lora.config.get("fan_in_fan_out") else None


def no_added_tokens(lora: LoraDirectory) -> str | None:
    """``LoRAManager.validate_new_adapter`` of SGLang refuses token ids beyond the base vocabulary."""
    return "added_tokens.json is there" if "added_tokens.json" in lora.files else None
