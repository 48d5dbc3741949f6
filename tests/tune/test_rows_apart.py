"""No row's result depends on the rows that share its batch: LongRoPE, and the losses of routers, against rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Phi3Config, Phi3ForCausalLM

from adapted import adapted
from frozencore.calibration.collect import collect_moments
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.exact_match import generate_greedily
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import batches_of, draw_examples

LIMIT = 12
SIZE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def long_rope() -> nn.Module:
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
            "original_max_position_embeddings": LIMIT}  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**SIZE, original_max_position_embeddings=LIMIT, rope_parameters=rope)).eval()


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_of_rows_on_both_sides_of_long_ropes_limit_are_those_of_the_rows_alone(side: Any) -> None:
    examples = draw_examples(9, seed=4, longest=24)
    assert {len(example.ids) > LIMIT for example in examples} == {True, False}
    sums = []
    for batch_size in (1, 9):
        model = long_rope()
        layers = {name: module for name, module in model.named_modules() if name.endswith("o_proj")}
        found = collect_moments(model, batches_of(examples, batch_size, side), layers)
        sums.append({name: moments.cross for name, moments in found.items()})
    for name, cross in sums[0].items():
        torch.testing.assert_close(sums[1][name], cross, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [long_rope, experts])
def test_the_trained_core_does_not_depend_on_the_batch_size(make: Callable[[], nn.Module]) -> None:
    found = []
    for batch_size, pass_tokens in ((1, None), (4, None), (8, 5)):
        model = adapted("random", model=make(), target_modules=["o_proj"])
        recipe = Recipe(
            learning_rate=1e-2, warmup=0.0, epochs=2, batch_size=batch_size, accumulation=8 // batch_size,
            pass_tokens=pass_tokens,
        )  # fmt: skip
        losses = train(model, ROWS, recipe, pad_id=0).losses
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
        both.append((answers, train(model, ROWS, recipe, pad_id=0).losses))
        assert model.config.output_router_logits is switched
    assert both[0] == both[1]
