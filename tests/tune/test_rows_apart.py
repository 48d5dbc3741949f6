"""No row's result depends on the rows that share its batch, also where a router adds a loss of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.scoring.exact_match import generate_greedily
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import adapted

SIZE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def experts(output_router_logits: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        **SIZE, num_local_experts=4, output_router_logits=output_router_logits, router_aux_loss_coef=1.0
    )
    return MixtralForCausalLM(config).eval()


def rows() -> list[TokenRow]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 9, 12, 13, 20, 7, 16, 6)
    return [TokenRow(f"r{n}", torch.randint(3, 300, (n,), generator=generator).tolist(), 2) for n in lengths]


ROWS = rows()


def test_the_trained_core_does_not_depend_on_the_batch_size() -> None:
    found = []
    for batch_size, overhead_tokens in ((1, None), (4, None), (8, 5)):
        model = adapted("random", model=experts(), target_modules=["o_proj"])
        recipe = Recipe(
            learning_rate=1e-2, warmup=0.0, epochs=2, batch_size=batch_size, accumulation=8 // batch_size,
            overhead_tokens=overhead_tokens,
        )  # fmt: skip
        losses = train(model, ROWS, recipe, pad_id=0).training.losses
        found.append((losses, [p.detach() for p in model.parameters() if p.requires_grad]))
    for losses, values in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5)
        for value, wanted in zip(values, found[0][1], strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-5)


def test_a_router_adds_nothing_to_the_rows_loss_and_does_not_end_a_generation(encoder: PromptEncoder) -> None:
    contexts = [row.input_ids[:5] for row in ROWS]
    both = []
    for switched in (True, False):
        model = adapted("random", model=experts(switched), target_modules=["o_proj"])
        answers = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=4)
        recipe = Recipe(learning_rate=1e-2, warmup=0.0, batch_size=4, accumulation=2)
        both.append((answers, train(model, ROWS, recipe, pad_id=0).training.losses))
        assert model.config.output_router_logits is switched
    assert both[0] == both[1]
