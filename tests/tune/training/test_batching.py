"""Groups of similar length: the cheapest cut of every one, and the same step as rows in the order they come."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
import torch

from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import GROUPS, GroupingCollator, group_by_length
from tiny import adapted, draw_examples, tiny_all_logits, tiny_bart, tiny_qwen2


def rows_of_many_lengths(num: int) -> list[TokenRow]:
    drawn, ids = random.Random(3), [i for e in draw_examples(20, seed=5) for i in e.ids]
    lengths = [drawn.randint(3, 30) for _ in range(num)]
    return [TokenRow(f"row-{i}", ids[i : i + length], drawn.randint(1, length - 1)) for i, length in enumerate(lengths)]


ROWS = rows_of_many_lengths(20)


def cost(lengths: list[int], groups: list[list[int]], overhead_tokens: int) -> int:
    return sum(len(group) * max(lengths[i] for i in group) + overhead_tokens for group in groups)


def cheapest(lengths: list[int], most_tokens: int, overhead_tokens: int) -> int:
    """Over every way to put rows into groups, one after the other."""

    @cache
    def of_the_rest(rest: tuple[int, ...]) -> int:
        if not rest:
            return 0
        found = []
        for bits in range(2 ** (len(rest) - 1)):
            group = [rest[0], *(length for j, length in enumerate(rest[1:]) if bits >> j & 1)]
            left = tuple(length for j, length in enumerate(rest[1:]) if not bits >> j & 1)
            if len(group) == 1 or len(group) * max(group) <= most_tokens:
                found.append(len(group) * max(group) + overhead_tokens + of_the_rest(left))
        return min(found)

    return of_the_rest(tuple(lengths))


@pytest.mark.parametrize("overhead_tokens", [0, 5, 40])
@pytest.mark.parametrize("most_tokens", [1, 30, 60, 10_000])
def test_no_other_grouping_of_a_step_is_cheaper(most_tokens: int, overhead_tokens: int) -> None:
    drawn = random.Random(most_tokens + overhead_tokens)
    for _ in range(5):
        lengths = [drawn.randint(1, 20) for _ in range(7)]
        groups = group_by_length(lengths, most_tokens, overhead_tokens)
        assert sorted(i for group in groups for i in group) == list(range(7))
        assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= most_tokens for g in groups)
        assert cost(lengths, groups, overhead_tokens) == cheapest(lengths, most_tokens, overhead_tokens)
        firsts = [lengths[group[0]] for group in groups]
        assert all(a >= b for a, b in pairwise(firsts))  # what does not fit in memory fails at once


def test_groups_hold_little_padding_where_one_batch_is_half_of_it() -> None:
    together = PaddingCollator(0)(ROWS)["attention_mask"]
    groups = GroupingCollator(0, most_tokens=10_000, overhead_tokens=10)(ROWS)[GROUPS]
    padded = [(group["attention_mask"] == 0).sum().item() for group in groups]
    assert 4 * sum(padded) < (together == 0).sum().item()
    assert sum(group["attention_mask"].sum().item() for group in groups) == together.sum().item()


def test_a_decoder_whose_own_loss_does_not_shift_the_labels_learns_the_next_token() -> None:
    model = tiny_bart()
    before = held_out_loss(model, ROWS, pad_id=0)
    recipe = Recipe(learning_rate=1e-2, warmup=0.0, epochs=20, batch_size=20, accumulation=1)
    report = train(model, ROWS, recipe, pad_id=0)
    assert report.training.losses[0] == pytest.approx(before, rel=1e-5)
    assert held_out_loss(model, ROWS, pad_id=0) < 0.8 * before


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_all_logits])
def test_steps_of_groups_are_the_steps_of_rows_as_they_come(make: type[torch.nn.Module]) -> None:
    plain = Recipe(learning_rate=1e-2, warmup=0.1, epochs=2, batch_size=8, accumulation=1)
    cut = Recipe(learning_rate=1e-2, warmup=0.1, epochs=2, batch_size=4, accumulation=2, overhead_tokens=5)
    models = [adapted("random", model=model) for model in (tiny_qwen2(), make())]
    one, other = (train(model, ROWS, recipe, pad_id=0) for model, recipe in zip(models, (plain, cut), strict=True))
    assert (one.training.num_steps, other.training.num_steps) == (6, 6)
    assert other.training.losses == pytest.approx(one.training.losses, rel=1e-5)
    values = [{n: p.detach() for n, p in model.named_parameters() if p.requires_grad} for model in models]
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-3, atol=1e-6)
