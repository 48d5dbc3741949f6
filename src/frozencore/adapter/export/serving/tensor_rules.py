"""What engines ask of ``adapter_model.safetensors``. Each function returns what is wrong, or None.

Sources: ``vllm/lora/utils.py`` (``parse_fine_tuned_lora_name``) and ``vllm/lora/lora_model.py``;
``python/sglang/srt/lora/lora.py`` (``normalize_qkv_proj``, ``normalize_gate_up_proj``) and ``mem_pool.py``
(``load_lora_weight_to_buffer``); ``convert_lora_to_gguf.py`` (``get_tensors``) and ``src/llama-adapter.cpp``.
"""

from __future__ import annotations

from frozencore.adapter.export.serving.lora_directory import LoraDirectory, parse_key

_STORED_TYPES = {"float32", "float16", "bfloat16"}


def only_factors(lora: LoraDirectory) -> str | None:
    """vLLM raises for any other name, llama.cpp exits, SGLang takes it for a B."""
    others = [key for key in lora.tensors if parse_key(key) == (None, None)]
    return f"the file holds {others[0]!r}" if others else None


def some_factors(lora: LoraDirectory) -> str | None:
    """A directory without factors loads in silence and changes nothing."""
    return None if lora.factors() else "the file holds no LoRA factor"


def factors_in_pairs(lora: LoraDirectory) -> str | None:
    """llama.cpp asserts both, vLLM and SGLang need both to fill a layer."""
    for module, sides in lora.factors().items():
        if sides.keys() != {"A", "B"}:
            return f"{module!r} has {' and '.join(sorted(sides))} only"
    return None


def ranks_are_r(lora: LoraDirectory) -> str | None:
    """PEFT refuses others. SGLang's buffers have r rows and assert equal shapes; vLLM scales by r, or by what
    ``rank_pattern`` says of a layer; llama.cpp scales by each pair's own rank, whatever was meant."""
    for module, sides in _pairs(lora):
        if not sides[0] or sides[0][0] not in lora.ranks:
            return f"{module!r} has A {sides[0]}, the configuration r = {lora.config.get('r')}"
    return None


def factors_fit(lora: LoraDirectory) -> str | None:
    """A is r x n and B is m x r with one r: ``LoraTorchTensor`` of llama.cpp asserts it, the others multiply."""
    for module, (a, b) in _pairs(lora):
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            return f"{module!r} has A {a} and B {b}"
    return None


def packed_qkv(lora: LoraDirectory) -> str | None:
    """``normalize_qkv_proj`` looks for q, then v beside it, and puts zeros for a missing k only."""
    return _missing_beside(lora, ("q_proj", "k_proj", "v_proj"), needed=("q_proj", "v_proj"))


def packed_gate_up(lora: LoraDirectory) -> str | None:
    """``normalize_gate_up_proj`` puts zeros for a missing up; an up without gate finds no buffer."""
    return _missing_beside(lora, ("up_proj",), needed=("gate_proj",))


def types_are_plain(lora: LoraDirectory) -> str | None:
    """A float8 or integer tensor is a quantised file, which SGLang does not expect; vLLM and llama.cpp's converter take
    the values that are there, as PEFT does."""
    for key, facts in lora.tensors.items():
        if facts.dtype not in _STORED_TYPES:
            return f"{key!r} is {facts.dtype}"
    return None


def no_tenant(lora: LoraDirectory) -> str | None:
    """A basis model has a ``core`` in each adapted layer; vLLM serves it through transformers, llama.cpp cannot convert
    it, and of SGLang's LoRA layers none is a ``core``."""
    return "the factors are of a tenant of a basis model" if lora.is_tenant else None


def all_finite(lora: LoraDirectory) -> str | None:
    """No engine looks: NaN is served."""
    bad = [key for key, facts in lora.tensors.items() if not facts.finite]
    return f"{bad[0]!r} holds NaN or Inf" if bad else None


def _pairs(lora: LoraDirectory) -> list[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    return [
        (module, (sides["A"].shape, sides["B"].shape))
        for module, sides in lora.factors().items()
        if sides.keys() == {"A", "B"}
    ]


def _missing_beside(lora: LoraDirectory, these: tuple[str, ...], *, needed: tuple[str, ...]) -> str | None:
    modules = lora.factors().keys()
    for module in modules:
        parent, dot, last = module.rpartition(".")
        missing = [name for name in needed if f"{parent}{dot}{name}" not in modules] if last in these else []
        if missing:
            return f"{module!r} is there without {missing[0]}"
    return None
