"""Rows laid end to end: the padded batch's loss and gradients, and no model that lets rows see one another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, T5Config, T5ForConditionalGeneration

from adapted import adapted, cores_of
from frozencore.calibration.counted_tokens import IGNORED
from frozencore.errors import ConfigError
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.training.batching import lay_end_to_end, require_rows_apart
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import VOCABULARY, draw_examples, tiny_gpt2, tiny_llama, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(12, seed=3))]
WHOLE = TokenRow("text", [5, 6, 7, 8], 0)  # a text, all of which is learned
RECIPE = {"learning_rate": 1e-2, "warmup": 0.3, "epochs": 2, "batch_size": 5, "accumulation": 2}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_are_those_of_the_padded_batch(
    make: Callable[[], nn.Module], attention: str, dtype: torch.dtype, within: float
) -> None:
    if attention == "eager" and dtype == torch.float64:
        within = 1e-6  # its softmax is in float32
    model = make().to(dtype)
    model.set_attn_implementation(attention)
    model.eval()
    require_rows_apart(model)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for batch in (PaddingCollator(0)([WHOLE, *ROWS]), lay_end_to_end([WHOLE, *ROWS])):
        model.zero_grad()
        targets = batch.pop("labels")[:, 1:]  # transformers' own loss is of float32
        loss = cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (padded, expected), (laid_out, gradients) = found
    torch.testing.assert_close(laid_out, padded, rtol=within, atol=within)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=within, atol=within)


def test_nothing_is_padding_and_no_row_foretells_the_next() -> None:
    rows = [WHOLE, *ROWS]
    batch = lay_end_to_end(rows)
    starts = (batch["position_ids"][0] == 0).nonzero().squeeze(-1)
    assert batch["input_ids"].shape == batch["labels"].shape == (1, sum(len(row.input_ids) for row in rows))
    assert len(starts) == len(rows)
    assert (batch["labels"][0, starts] == IGNORED).all()
    padded = PaddingCollator(0)(rows)["labels"][:, 1:]
    assert (batch["labels"][:, 1:] != IGNORED).sum() == (padded != IGNORED).sum()


def test_training_without_padding_is_the_padded_training() -> None:
    models = [adapted("random"), adapted("random")]
    reports = [
        train(model, ROWS, Recipe(**RECIPE, padding_free=unpadded), pad_id=0)  # type: ignore[arg-type]
        for model, unpadded in zip(models, (False, True), strict=True)
    ]
    assert reports[1].losses == pytest.approx(reports[0].losses, rel=1e-5)
    for layer, other in zip(cores_of(models[1]), cores_of(models[0]), strict=True):
        torch.testing.assert_close(layer.core("default"), other.core("default"), rtol=1e-3, atol=1e-5)


def bloom() -> nn.Module:
    return AutoModelForCausalLM.from_config(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2))


def mamba() -> nn.Module:
    return AutoModelForCausalLM.from_config(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1))


def t5() -> nn.Module:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **shape))


def leaky() -> nn.Module:
    """Takes positions, and looks at them in its embeddings alone."""
    model = tiny_gpt2()
    own = model.transformer.h[0].attn.forward
    model.transformer.h[0].attn.forward = lambda *args, **kwargs: own(*args, **{**kwargs, "attention_mask": None})
    return model


def positions_by_itself() -> nn.Module:
    """Keeps rows apart, and counts their positions from the beginning of the batch."""
    model = tiny_gpt2()
    own = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda ids: own(torch.arange(ids.shape[-1])[None])
    return model


@pytest.mark.parametrize("make", [bloom, mamba, t5, leaky, positions_by_itself])
def test_a_model_that_does_not_keep_rows_apart_is_refused_in_one_line(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="position_ids.* Leave --padding-free out"):
        require_rows_apart(make())


def test_a_recipe_that_pads_says_nothing_of_it() -> None:
    assert "padding_free" not in Recipe(**RECIPE).content()  # type: ignore[arg-type]
    assert Recipe(**RECIPE, padding_free=True).content()["padding_free"]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exclude each other"):
        Recipe(**RECIPE, padding_free=True, pass_tokens=100)  # type: ignore[arg-type]
