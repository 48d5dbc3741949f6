"""Groups that halve when memory runs out: every row is scored, and counted once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from frozencore.errors import ModelError
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import LOGITS_BUDGET, score_in_groups
from frozencore.tune.scoring.score import held_out_loss
from tiny import draw_examples, tiny_qwen2

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
    rows = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(9, seed=5))]
    model = tiny_qwen2()
    expected = held_out_loss(model, rows, pad_id=0)

    def refuse(_: torch.nn.Module, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].numel() > 30:
            raise torch.OutOfMemoryError("injected")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert held_out_loss(model, rows, pad_id=0) == pytest.approx(expected, abs=1e-5)
