"""The models of the shipped campaigns as their configurations say, for where neither hub nor cache has them.

Read from the model cards' ``config.json`` and ``tokenizer_config.json``; of the chat templates, what a conversation
without tools makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2TokenizerFast

QWEN_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_LLAMA_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

RESCALED = "-spread-"  # benchmarks/rescale.py: of the same shapes as the model before it


@dataclass(frozen=True)
class Known:
    """A model without its weights.

    Attributes:
        tokenizer: Makes one of its class with its special tokens and chat template, which has learned nothing yet.
    """

    config: PretrainedConfig
    tokenizer: Callable[[], Any]


def qwen_tokenizer() -> Any:
    """Qwen2.5's: byte-level BPE, digits one by one, ends a turn with ``<|im_end|>``."""
    tokenizer = Qwen2TokenizerFast(
        eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"], model_max_length=131072
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def llama_tokenizer() -> Any:
    """Llama 3's: byte-level BPE, begins with ``<|begin_of_text|>``, no padding token; its template writes the date."""
    begin, end, header, header_end = "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"
    pieces = [begin, end, header, header_end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:4]])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, additional_special_tokens=[header, header_end],
        model_max_length=131072, clean_up_tokenization_spaces=True,
    )  # fmt: skip
    fast.chat_template = LLAMA_TEMPLATE
    return fast


def tiny1m_tokenizer() -> Any:
    """tiny1m's: BPE over words that begin with a mark, begins with ``<s>``; no chat template."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(special)}, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        model_max_length=256, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _qwen(width: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocabulary: int) -> Known:
    config = Qwen2Config(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, vocab_size=vocabulary, max_position_embeddings=32768,
    )  # fmt: skip
    return Known(config, qwen_tokenizer)


def _llama_1b() -> Known:
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, tie_word_embeddings=True, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters=scaling, rms_norm_eps=1e-5,
    )  # fmt: skip
    return Known(config, llama_tokenizer)


def _tiny1m() -> Known:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256,
    )  # fmt: skip
    return Known(config, tiny1m_tokenizer)


def known_model(name: str) -> Known | None:
    """A model of the shipped campaigns by its hub id or folder; None for any other."""
    made = _KNOWN.get(name.partition(RESCALED)[0])
    return made() if made else None


_KNOWN: dict[str, Callable[[], Known]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": lambda: _qwen(1536, 8960, 28, 12, 2, tied=True, vocabulary=151936),
    "Qwen/Qwen2.5-3B-Instruct": lambda: _qwen(2048, 11008, 36, 16, 2, tied=True, vocabulary=151936),
    "Qwen/Qwen2.5-7B-Instruct": lambda: _qwen(3584, 18944, 28, 28, 4, tied=False, vocabulary=152064),
    "meta-llama/Llama-3.2-1B-Instruct": _llama_1b,
    "tiny1m": _tiny1m,
}
