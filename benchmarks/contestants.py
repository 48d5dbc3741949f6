"""The contestants of the benchmarks: models with random weights, adapters of ours and of PEFT, batches, steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import FrozenCoreConfig
from frozencore.calibration.batches import IGNORED, predicted

RANK = 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FLOOR, UNCALIBRATED = "floor", "frozencore, random bases"  # a step costs the same on any basis
CONTESTANTS = (FLOOR, "lora", "dora", "pissa", "frozencore")
LABELS = {"floor": "no adapter", "lora": "LoRA", "dora": "DoRA", "pissa": "PiSSA", "frozencore": "frozen core"}
Batch = dict[str, Tensor]


def random_qwen2(
    num_layers: int, width: int, *, heads: int = 8, kv_heads: int = 2, inner: int | None = None,
    vocabulary: int | None = None, tied: bool = False,
) -> nn.Module:  # fmt: skip
    """Random layers, so wide by default that arithmetic outweighs Python, as in a real model.

    The output layer is then 21 % of the arithmetic, as in Llama-3.2-1B.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary or 24 * width, hidden_size=width, intermediate_size=inner or 11 * width // 4,
        num_hidden_layers=num_layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=512, use_cache=False, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def adapter_config(contestant: str, targets: Any = ATTENTION, rank: int = RANK, **options: Any) -> Any:
    """The configuration of a contestant's adapter. PiSSA starts from its fast SVD."""
    modules = targets if isinstance(targets, str) else list(targets)
    if contestant.startswith("frozencore"):
        constructor = "random" if contestant == UNCALIBRATED else "fcca"
        return FrozenCoreConfig(r=rank, target_modules=modules, constructor=constructor, task_type="CAUSAL_LM")
    return LoraConfig(
        r=rank, lora_alpha=rank, target_modules=modules, use_dora=contestant == "dora", task_type="CAUSAL_LM",
        init_lora_weights="pissa_niter_4" if contestant == "pissa" else True, **options,
    )  # fmt: skip


def with_adapter(base: nn.Module, contestant: str, targets: Any = ATTENTION, rank: int = RANK) -> nn.Module:
    """A contestant in training mode. It shares the base's weights, except those that PiSSA moves into its factors.

    The floor has no adapter: its input embeddings require a gradient, so that it flows through every layer.
    """
    model = deepcopy(base)
    if contestant == FLOOR:
        model.requires_grad_(False).enable_input_require_grads()
    else:
        model = get_peft_model(model, adapter_config(contestant, targets, rank))
    if contestant != "pissa":
        weights = dict(base.named_parameters())
        for name, parameter in model.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if not parameter.requires_grad:
                parameter.data = weights[plain].data
    return model.train()


def random_ids(rows: int, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))


def completion_batch(ids: Tensor) -> Batch:
    """The last quarter of each row is the completion; the model is asked for no other logits."""
    tokens = ids.shape[1]
    kept = torch.arange(3 * tokens // 4 - 1, tokens - 1, device=ids.device)
    targets = ids[:, kept + 1]
    return {"input_ids": ids, "logits_to_keep": kept, "labels": targets, "shift_labels": targets}


def completions_only(batch: Mapping[str, Any]) -> Batch:
    """The batch with labels at its completions, so that no other logits are computed."""
    targets = predicted(batch["labels"])
    kept = (targets != IGNORED).any(dim=0).nonzero().flatten()
    targets = targets[:, kept]
    return {**batch, "logits_to_keep": kept, "labels": targets, "shift_labels": targets}


def plain_passes(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Forward and backward of a frozen model, with the gradient passed through every layer down to the embeddings."""
    model.requires_grad_(False)
    for batch in batches:
        ids, rest = batch["input_ids"], {name: own for name, own in batch.items() if name != "input_ids"}
        model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_(), **rest).loss.backward()


class Stepper:
    """A model with fused AdamW on what it trains; a step is forward and backward of each batch, clipping, update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True) if self.trained else None

    def step(self, *batches: Batch) -> None:
        for batch in batches:
            (self.model(**batch).loss / len(batches)).backward()
        self.update()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def update(self) -> None:
        if self.optimizer is not None:
            nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
