"""Stand-ins for the hub models that PEFT's tests load: the same architectures, a few thousand seeded weights.

Each lies in a folder named like its hub id. The tests run inside the folder that holds them all, so that
``from_pretrained("gpt2")`` finds a directory before it thinks of the hub.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf

from frozencore import FrozenCoreConfig

SEED = 0
# Weights large enough that greedy texts of different adapters differ.
COMMON = {"vocab_size": 96, "initializer_range": 0.3}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT = {**COMMON, **SIZES, "max_position_embeddings": 64, "type_vocab_size": 2}
LLAMA = {**COMMON, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
OPT = {"vocab_size": 96, "max_position_embeddings": 64}
GPT = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 95, "eos_token_id": 95}


def _opt(num_layers: int, width: int, std: float) -> hf.PreTrainedModel:
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 2 * width, "num_attention_heads": 4}
    return hf.OPTForCausalLM(hf.OPTConfig(**OPT, **sizes, num_hidden_layers=num_layers, init_std=std))


def _gemma3() -> hf.PreTrainedModel:
    """Its norms bound what attention adds: beside full-sized tied embeddings every adapter repeats the prompt."""
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, head_dim=8, tie_word_embeddings=False))
    model.get_input_embeddings().weight.data.mul_(0.05)
    return model


def _t5() -> hf.PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=96, **sizes, decoder_start_token_id=0))


def _bart() -> hf.PreTrainedModel:
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder")
             for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    config = hf.BartConfig(vocab_size=96, d_model=32, max_position_embeddings=64, init_std=0.5, **sides)
    return hf.BartForConditionalGeneration(config)


def _deberta(version: int) -> hf.PreTrainedModel:
    kinds = {1: (hf.DebertaConfig, hf.DebertaModel), 2: (hf.DebertaV2Config, hf.DebertaV2Model)}
    config, model = kinds[version]
    return model(config(**BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]))


MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": lambda: _opt(2, 32, 0.3),
    "peft-internal-testing/opt-125m": lambda: _opt(12, 64, 0.05),  # quantisation: 24 layers are counted, blocks hold 64
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4)),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "peft-internal-testing/tiny-dummy-qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**{**LLAMA, "initializer_range": 0.02})  # PEFT's conversion test counts on small weights here
    ),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": _gemma3,
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": _t5,
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": _bart,
    "peft-internal-testing/tiny-random-BertModel": lambda: hf.BertModel(hf.BertConfig(**BERT)),
    "peft-internal-testing/tiny-random-RobertaModel": lambda: hf.RobertaModel(hf.RobertaConfig(**BERT)),
    "peft-internal-testing/tiny-random-DebertaModel": lambda: _deberta(1),
    "peft-internal-testing/tiny-random-DebertaV2Model": lambda: _deberta(2),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": lambda: hf.BertForSequenceClassification(
        hf.BertConfig(**BERT)
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": lambda: hf.RobertaForSequenceClassification(
        hf.RobertaConfig(**BERT)
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": lambda: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**LLAMA, num_labels=1)
    ),
    "bert-base-uncased": lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT)),
}
CONFIG_ONLY = "peft-internal-testing/tiny-opt-lora-revision"


def build_models(folder: Path) -> None:
    """Write what is missing; the weights are a function of the hub id and the seed."""
    hf.utils.logging.disable_progress_bar()
    for name, make in MODELS.items():
        if not (folder / name / "config.json").is_file():
            torch.manual_seed(SEED)
            make().save_pretrained(folder / name)
    FrozenCoreConfig(target_modules=["q_proj", "v_proj"]).save_pretrained(folder / CONFIG_ONLY)
