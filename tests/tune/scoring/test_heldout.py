"""Held-out loss against a sum over tokens in float64, in groups that halve when memory runs out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from all_logits import tiny_all_logits
from frozencore.errors import DataError, ModelError
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import LOGITS_BUDGET, score_in_groups
from frozencore.tune.scoring.score import held_out_loss, row_losses
from tiny import draw_examples, tiny_gpt2, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(9, seed=5))]


@pytest.mark.parametrize("tokens_per_batch", [1, 30, None])
@pytest.mark.parametrize("make_model", [tiny_qwen2, tiny_gpt2])
def test_the_loss_is_the_mean_over_completion_tokens(
    make_model: Callable[[], nn.Module], tokens_per_batch: int | None
) -> None:
    model = make_model().train()
    reference = copy.deepcopy(model).double().eval()
    total, count = 0.0, 0
    by_row = []
    for row in ROWS:
        logprobs = reference(torch.tensor([row.input_ids])).logits[0].detach().log_softmax(-1)
        for position in range(max(1, row.num_context), len(row.input_ids)):
            total -= float(logprobs[position - 1, row.input_ids[position]])
            count += 1
        by_row.append((total - sum(nats for nats, _ in by_row), count - sum(tokens for _, tokens in by_row)))
    actual = row_losses(model, ROWS, pad_id=0, tokens_per_batch=tokens_per_batch)
    assert actual.mean == pytest.approx(total / count, abs=1e-5)
    assert actual.nats == pytest.approx([nats for nats, _ in by_row], abs=1e-4)
    assert list(actual.tokens) == [tokens for _, tokens in by_row]
    assert model.training


def test_a_nan_in_the_model_and_rows_without_a_token_to_predict_are_refused() -> None:
    with pytest.raises(DataError, match="at least one completion token"):
        held_out_loss(tiny_qwen2(), [TokenRow("row-1", [3], 0)], pad_id=0)
    model = tiny_qwen2()
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        held_out_loss(model, ROWS, pad_id=0)


def test_a_model_that_cannot_leave_logits_out_has_the_same_loss() -> None:
    expected = held_out_loss(tiny_qwen2(), ROWS, pad_id=0)
    assert held_out_loss(tiny_all_logits(), ROWS, pad_id=0) == pytest.approx(expected, rel=1e-6)


CPU = torch.device("cpu")


def refusing(most: int, done: list[int]) -> Callable[[list[int]], None]:
    def score(rows: list[int]) -> None:
        if len(rows) > most:
            raise torch.OutOfMemoryError("injected")
        done.extend(rows)

    return score


@pytest.mark.parametrize("size", [(10, 0), (1, LOGITS_BUDGET // 64)])
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow), 100])
def test_every_row_is_scored_once_whatever_fits(size: tuple[int, int], most: int) -> None:
    done: list[int] = []
    steps: list[tuple[str, int, int, str]] = []
    score_in_groups(
        refusing(most, done), [size] * 100, CPU, tokens_per_batch=640, progress=lambda *step: steps.append(step)
    )
    assert sorted(done) == list(range(100))
    assert [done for _, done, _, _ in steps] == sorted(done for _, done, _, _ in steps)
    assert steps[-1][:3] == ("score", 100, 100)
    assert bool(steps[-1][3]) == (most < 64)


def test_a_row_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ModelError, match="One row of 10 tokens does not fit in the memory of cpu"):
        score_in_groups(refusing(0, []), [(10, 0)] * 3, CPU)


def test_the_held_out_loss_counts_no_token_twice() -> None:
    model = tiny_qwen2()
    expected = held_out_loss(model, ROWS, pad_id=0)

    def refuse(_: torch.nn.Module, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].numel() > 30:
            raise torch.OutOfMemoryError("injected")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert held_out_loss(model, ROWS, pad_id=0) == pytest.approx(expected, abs=1e-5)
