"""Tiny random models of the families of transformers, and what frozen cores can do on each.

``python tests/families.py`` writes the table of docs/models.md; tests/adapter/test_families.py checks each row.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from fixtures import ROOT
from frozencore import FrozenCoreConfig, calibrate, collect_moments, export_lora, frozen_core_layers
from frozencore.adapter.named_layers import attention_projections
from frozencore.errors import CalibrationError, ConfigError, ModelError

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families:begin -->\n", "<!-- families:end -->"
HEAD = ("| family | attention projections | also adapted | merge | export |", "|---" * 5 + "|")
LM, CLASSIFIER, SEQ2SEQ = "ForCausalLM", "ForSequenceClassification", "ForConditionalGeneration"
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2}
MOE = {
    "num_hidden_layers": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "num_experts": 4, "n_group": 1,
    "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_local_experts": 4,
    "shared_expert_intermediate_size": 8, "head_dim": 8,
}  # fmt: skip
MLA = {**MOE, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
       "num_key_value_heads": 2}  # fmt: skip
SSM = {
    "state_size": 4, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "n_groups": 1,
    "head_dim": 8, "num_heads": 4, "mamba_d_ssm": 32, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4,
    "chunk_size": 8, "mamba_chunk_size": 8,
}  # fmt: skip
TWO_SIDES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
DEBERTA = {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
POOLED = ("classifier", "pooler.dense")  # one row an example


@dataclass(frozen=True)
class Family:
    """A family: its class in transformers, the configuration of a tiny one, and layers that ``all-linear`` leaves out.

    Attributes:
        sizes: What differs from ``SIZES``.
        left_out: Layers whose rows are no tokens (pooled ones, routed experts), or that are never called.
    """

    kind: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama" + LM, {"num_hidden_layers": 2}),
    "mistral": Family("Mistral" + LM),
    "qwen2": Family("Qwen2" + LM),
    "qwen3": Family("Qwen3" + LM, {"head_dim": 8}),
    "gemma2": Family("Gemma2" + LM, {"head_dim": 8}),
    "gemma3_text": Family("Gemma3" + LM, {"head_dim": 8}),
    "gemma3n_text": Family("Gemma3n" + LM, {
        "head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40,
        "laurel_rank": 4, "layer_types": ["full_attention"], "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0],
    }),
    "gemma4_text": Family("Gemma4" + LM, {
        "num_hidden_layers": 2, "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "phi": Family("Phi" + LM, {"num_key_value_heads": 2}),
    "phi3": Family("Phi3" + LM),
    "gpt2": Family("GPT2LMHeadModel", GPT),
    "gpt_neox": Family("GPTNeoX" + LM),
    "gptj": Family("GPTJ" + LM, {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": Family("GPTBigCode" + LM, GPT),
    "opt": Family("OPT" + LM, {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom": Family("Bloom" + LM, {"n_head": 2, "n_layer": 1}),
    "falcon": Family("Falcon" + LM),
    "mpt": Family("Mpt" + LM, {"d_model": 16, "n_heads": 2, "n_layers": 1, "expansion_ratio": 2}),
    "stablelm": Family("StableLm" + LM),
    "olmo2": Family("Olmo2" + LM),
    "cohere": Family("Cohere" + LM),
    "granite": Family("Granite" + LM),
    "nemotron": Family("Nemotron" + LM),
    "smollm3": Family("SmolLM3" + LM),
    "lfm2": Family("Lfm2" + LM, {
        "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_multiple_of": 4,
    }),
    "lfm2_moe": Family("Lfm2Moe" + LM, {
        **MOE, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    }),
    "glm4": Family("Glm4" + LM, {"head_dim": 8}),
    "ctrl": Family("CTRLLMHeadModel", {**GPT, "dff": 24, "n_positions": 64}),
    "xlm": Family("XLMWithLMHeadModel", {"emb_dim": 16, "n_layers": 1, "n_heads": 2}),
    "xlnet": Family("XLNetLMHeadModel", {
        "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24, "max_position_embeddings": None,
    }),
    "modernbert-decoder": Family("ModernBertDecoder" + LM, {"cls_token_id": 1, "sep_token_id": 2}),
    "mixtral": Family("Mixtral" + LM, MOE),
    "qwen2_moe": Family("Qwen2Moe" + LM, MOE),
    "qwen3_moe": Family("Qwen3Moe" + LM, MOE),
    "qwen3_next": Family("Qwen3Next" + LM, {
        **MOE, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }),
    "qwen3_5_text": Family("Qwen3_5" + LM, {
        "num_hidden_layers": 2, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }),
    "deepseek_v2": Family("DeepseekV2" + LM, MLA),
    "deepseek_v3": Family("DeepseekV3" + LM, MLA),
    "ernie4_5_moe": Family("Ernie4_5_Moe" + LM, {
        **MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    }),
    "glm4_moe": Family("Glm4Moe" + LM, MOE),
    "gpt_oss": Family("GptOss" + LM, {**MOE, "layer_types": ["sliding_attention", "full_attention"]}),
    "llama4_text": Family("Llama4" + LM, {
        **MOE, "intermediate_size_mlp": 24, "moe_layers": [1], "attention_chunk_size": 64,
    }),
    "phimoe": Family("Phimoe" + LM, MOE),
    "mamba": Family("Mamba" + LM, SSM),
    "mamba2": Family("Mamba2" + LM, SSM),
    "falcon_h1": Family("FalconH1" + LM, SSM),
    "nemotron_h": Family("NemotronH" + LM, {
        **SSM, "num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"],
    }),
    "zamba": Family("Zamba" + LM, {
        **SSM, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2, "mamba_dt_rank": 4, "mamba_d_conv": 4, "attention_hidden_size": 32,
        "attention_head_dim": 16, "num_key_value_heads": 2,
    }),
    "zamba2": Family("Zamba2" + LM, {
        **SSM, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 1,
        "n_mamba_heads": 4, "mamba_expand": 2, "mamba_headdim": 8, "num_mem_blocks": 1, "adapter_rank": 4,
        "num_key_value_heads": 2,
    }, tuple(f"layers.{i}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{j}.{k}"
             for i, j in ((1, 1), (3, 0)) for k in (0, 1))),
    "qwen2_vl": Family("Qwen2VL" + SEQ2SEQ, {
        "text_config": {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 2},
    }, ("qkv", "proj", "fc1", "fc2", "mlp.0", "mlp.2")),
    "bert": Family("Bert" + CLASSIFIER, left_out=POOLED),
    "roberta": Family("Roberta" + CLASSIFIER, left_out=("classifier.dense", "classifier.out_proj")),
    "modernbert": Family("ModernBert" + CLASSIFIER, {"cls_token_id": 1, "sep_token_id": 2},
                         ("classifier", "head.dense")),
    "deberta": Family("Deberta" + CLASSIFIER, {**DEBERTA, "max_relative_positions": 4}, POOLED),
    "deberta-v2": Family("DebertaV2" + CLASSIFIER, {**DEBERTA, "share_att_key": True}, POOLED),
    "longformer": Family("Longformer" + CLASSIFIER, {"attention_window": 4},
                         ("query_global", "classifier.dense", "classifier.out_proj")),
    "xlm classifier": Family("XLM" + CLASSIFIER, {"emb_dim": 16, "n_layers": 1, "n_heads": 2}, ("summary",)),
    "t5": Family("T5" + SEQ2SEQ, T5),
    "bart": Family("Bart" + SEQ2SEQ, TWO_SIDES),
    "led": Family("LED" + SEQ2SEQ, {
        **TWO_SIDES, "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    }, ("query_global", "key_global", "value_global")),
    "whisper": Family("Whisper" + SEQ2SEQ, {
        **TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20,
    }),
    "switch_transformers": Family("SwitchTransformers" + SEQ2SEQ, {
        **T5, "num_experts": 2, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "expert_capacity": 64,
    }, ("wi", "wo", "classifier")),
}  # fmt: skip


def make(name: str) -> Any:
    """A tiny model of a family; no parameter that transformers sets to zero hides an error."""
    family = FAMILIES[name]
    kind = getattr(transformers, family.kind)
    sizes = {key: value for key, value in {**SIZES, **family.sizes}.items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(kind.config_class(**sizes))
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def batch_for(model: Any) -> dict[str, Tensor]:
    """Two examples, of 8 tokens and of 4: windows of local attention are 4 wide."""
    draw = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(3, 40, (2, 8), generator=draw), torch.ones(2, 8, dtype=torch.long)
    ids[1, 4:] = mask[1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if not model.can_generate():
        return {**batch, "labels": torch.tensor([0, 1])}
    if not model.config.is_encoder_decoder:
        batch["labels"][:, :2] = -100
        return batch
    batch["labels"] = torch.randint(3, 40, (2, 5), generator=draw)
    batch["labels"][1, 3:] = -100
    if model.config.model_type != "whisper":
        return batch
    return {"input_features": torch.randn(2, 8, 20, generator=draw), "labels": batch["labels"]}


def without_padding(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each example of a batch alone."""
    for i in range(2):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        length = int(one["attention_mask"].sum()) if "attention_mask" in one else None
        for key in one.keys() & {"input_ids", "attention_mask"}:
            one[key] = one[key][:, :length]
        if one["labels"].ndim == 2:
            one["labels"] = one["labels"][:, : 1 + int(one["labels"][0].ne(-100).nonzero().max())]
        yield one


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The sum over examples of the mean loss of their labels, by its definition."""
    labels = batch["labels"]
    if labels.ndim == 1:
        return model(**batch).loss * len(labels)
    if model.config.is_encoder_decoder:
        logits = model(**batch).logits
    else:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        labels = labels[:, 1:]
    return torch.stack([cross_entropy(*each, ignore_index=-100) for each in zip(logits, labels, strict=True)]).sum()


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


@dataclass
class Plain:
    """G and the diagonal of A of layers of the plain model, from autograd and from hooks, one example at a time.

    All rows count in a decoder, and those with an error in other models.
    """

    G: dict[str, Tensor]
    a: dict[str, Tensor]


def plain_moments(name: str, batch: Mapping[str, Tensor], layers: list[str]) -> Plain:
    model, found = make(name).requires_grad_(False), Plain({}, {})
    modules = {layer: model.get_submodule(layer) for layer in layers}
    seen: dict[str, list[Tensor]] = {layer: [] for layer in layers}

    counts_all = model.can_generate() and not model.config.is_encoder_decoder

    def add(layer: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        x = (args[0] if args else next(iter(kwargs.values()))).detach().double()
        if any(x.shape == other.shape and bool(x.eq(other).all()) for other in seen[layer]):
            return y  # embeddings of positions, which are the same for each example, come once in a batch
        seen[layer].append(x)

        def count(delta: Tensor) -> None:
            size = delta.reshape(-1, delta.shape[-1]).abs().amax(1)
            rows = x.reshape(-1, x.shape[-1])[counts_all | (size >= 1e-6 * size.max())]
            found.a[layer] = found.a.get(layer, 0) + rows.square().sum(0)

        y = y.clone()  # a model may change a view in place, whose hooks do not run
        y.register_hook(count)
        return y

    for layer, module in modules.items():
        module.weight.requires_grad_()
        module.register_forward_hook(partial(add, layer), with_kwargs=True)
    for one in without_padding(batch):
        loss_of(model, one).backward()
    for layer, module in modules.items():
        found.G[layer] = module.weight.grad.mT if isinstance(module, Conv1D) else module.weight.grad
    return found


@dataclass
class Outcome:
    """What a family can do: relative errors, or the reason of a refusal.

    Attributes:
        targets: Its attention projections, as they are found without names.
        also: The last parts of the names of its other adapted layers.
    """

    targets: list[str]
    also: list[str]
    errors: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def row(self, name: str) -> str:
        cells = ["refused" if step in self.refusals else "yes" for step in ("merge", "export")]
        listed = [", ".join(f"`{each}`" for each in names) or "none" for names in (self.targets, self.also)]
        return "| " + " | ".join([f"`{name}`", *listed, *cells]) + " |"


def outcome(name: str) -> Outcome:
    """Adapt every linear layer of a family: calibrate, train, save, merge, export, each beside the plain model."""
    family, base = FAMILIES[name], make(name)
    batch = batch_for(base)
    try:
        targets = attention_projections(base)
    except ConfigError:
        targets = []
    config = FrozenCoreConfig(r=2, target_modules="all-linear", exclude_modules=list(family.left_out) or None)
    model = get_peft_model(base, config)
    layers = frozen_core_layers(model, "default")
    attention = tuple(f".{target}" for target in targets)
    also = sorted({layer.rpartition(".")[2] for layer in layers if not layer.endswith(attention)})
    found = Outcome(targets, also)
    plain = plain_moments(name, batch, list(layers))
    try:
        moments = collect_moments(base, [batch], layers)
    except CalibrationError as error:
        found.refusals["calibrate"] = str(error)
        moments = collect_moments(base, list(without_padding(batch)), layers)
    own: dict[int, list[str]] = {}  # a weight that layers share has the sum of their gradients
    for layer, module in layers.items():
        own.setdefault(id(module.get_base_layer().weight), []).append(layer)
    found.errors["G"] = max(
        difference(sum(moments[layer].cross for layer in each), plain.G[each[0]]) for each in own.values()
    )
    found.errors["a"] = max(
        difference(moments[layer].input_square, plain.a[layer]) for layer in layers if plain.G[layer].any()
    )
    calibrate(model, moments=moments, progress=False)
    loss_of(model.eval(), batch).backward()
    expected = {}
    for each in own.values():
        if len(each) == 1:
            P, Q, _ = layers[each[0]].factors("default")
            expected[each[0]] = layers[each[0]].frozencore_scale["default"] * P.mT @ plain.G[each[0]] @ Q
    found.errors["train"] = max(difference(layers[layer].core("default").grad, R) for layer, R in expected.items())
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in layers.values():
            module.core("default").copy_(0.1 * torch.randn(module.core("default").shape, generator=draw))
    trained = logits_of(model, batch)
    with TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/own")
        again = PeftModel.from_pretrained(make(name), f"{folder}/own")
        found.errors["save"] = difference(logits_of(again, batch), trained)
        try:
            export_lora(model, f"{folder}/lora")
        except ConfigError as error:
            found.refusals["export"] = str(error)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(missing|unexpected) .*keys.*")
                stock = PeftModel.from_pretrained(make(name), f"{folder}/lora")
            found.errors["export"] = difference(logits_of(stock, batch), trained)
    try:
        found.errors["merge"] = difference(logits_of(model.merge_and_unload(), batch), trained)
    except ModelError as error:
        found.refusals["merge"] = str(error)
    return found


def row_on_page(name: str) -> str:
    """The row of a family as if it stood alone on the page."""
    cells = next(cells for names, cells in rows_on_page() if name in names)
    return f"| `{name}` |{cells}"


def rows_on_page() -> list[tuple[list[str], str]]:
    """The families of each row, and the cells beside them."""
    block = re.findall(f"{BEGIN}(.*?){END}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    rows = (line.removeprefix("|").partition("|") for line in block.splitlines()[2:])
    return [(re.findall("`([^`]*)`", names), cells) for names, _, cells in rows]


def write_page(page: Path) -> None:
    """Write a row for all families with the same cells."""
    families: dict[str, list[str]] = {}
    for name in FAMILIES:
        _, _, cells = outcome(name).row(name).removeprefix("|").partition("|")
        families.setdefault(cells, []).append(f"`{name}`")
    block = "\n".join([*HEAD, *(f"| {', '.join(names)} |{cells}" for cells, names in families.items())]) + "\n"
    written = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{block}{END}", page.read_text("utf-8"), flags=re.DOTALL)
    page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(write_page(PAGE))
