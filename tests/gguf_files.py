"""Models written as GGUF files for the tests: names and row order as llama.cpp's, put down here by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from frozencore.tune.pocket import pocket_model_path

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA3_NAMES = {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(module: str, names: Mapping[str, str] = NAMES) -> str:
    """``model.layers.3.self_attn.q_proj`` is ``blk.3.attn_q``."""
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{names[rest]}"


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """A head's rows 0, 1, ... h-1 in llama.cpp's order for Llama: 0, h/2, 1, h/2 + 1, ..., found by index."""
    width = len(rows) // num_heads
    of_one = [half * (width // 2) + i for i in range(width // 2) for half in (0, 1)]
    return rows[[head * width + row for head in range(num_heads) for row in of_one]]


def tiny_model(kind: str) -> Any:
    """Two layers, four heads over two of keys and values, the pocket model's vocabulary, float32."""
    shape = {
        "vocab_size": len(pocket_tokenizer()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    if kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, head_dim=8, sliding_window=16)).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # eighths, which 1 + weight of the file holds exactly
                parameter.data = torch.randint(-4, 5, parameter.shape) / 8
        return model
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def pocket_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pocket_model_path())


def write_gguf(model: Any, file: Path, *, architecture: str | None = None, pre: str = "qwen2") -> Path:
    """Model and the pocket model's tokenizer, matrices and vectors in float32."""
    config, tokenizer = model.config, pocket_tokenizer()
    is_gemma3 = config.model_type == "gemma3_text"
    names = NAMES | GEMMA3_NAMES if is_gemma3 else NAMES
    writer = gguf.GGUFWriter(file, architecture or config.model_type.removesuffix("_text"))
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if is_gemma3:
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, tokenizer, pre)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if tied and module == "lm_head":
            continue
        last = module.rpartition(".")[2]
        rows = interleaved(tensor, heads[last]) if config.model_type == "llama" and last in heads else tensor
        if is_gemma3 and "norm" in module:
            rows = rows + 1  # llama.cpp multiplies by the weight, transformers by 1 + weight
        writer.add_tensor(f"{gguf_name(module, names)}.{kind}", np.ascontiguousarray(rows.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, tokenizer: Any, pre: str) -> None:
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    control = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in control else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.pad_token_id)  # Gemma's tokenizer must have one
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
