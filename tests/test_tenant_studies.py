"""What the studies of tenants in benchmarks/ conclude from: the mean of products, which lines stand, intervals."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures import ROOT
from frozencore.tune.load import load_model
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from frozencore.tune.scoring.exact_match import complete


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("tenant_tables"), import_module("tenants_quality")


def test_the_mean_of_products_cut_to_a_rank_is_the_leading_part_of_their_mean(studies: Any) -> None:
    drawn = torch.Generator().manual_seed(0)
    products = [(torch.randn(7, 2, generator=drawn), torch.randn(2, 5, generator=drawn)) for _ in range(3)]
    mean = torch.stack([B @ A for B, A in products]).mean(0)
    U, S, V = torch.linalg.svd(mean)
    B, A = studies[1].mean_of(products, 2)
    torch.testing.assert_close(B @ A, U[:, :2] * S[:2] @ V[:2])
    torch.testing.assert_close(torch.matmul(*studies[1].mean_of(products, 5)), mean)


def test_the_lines_of_an_arm_are_those_of_its_whole_seeds_and_of_the_rate_that_validation_rows_chose(
    studies: Any,
) -> None:
    def line(tenant: str, loss: float, **more: Any) -> dict[str, Any]:
        return {"phase": "final", "arm": "own", "rank": 16, "tenant": tenant, "loss": loss, **more}

    tenants = ("cola-first", "sst2-short")
    seeds = [line(tenant, 1, seed=seed) for seed in (43, 42) for tenant in tenants] + [line("sst2-short", 9, seed=44)]
    (arm,) = studies[0].arms_of(seeds).values()
    assert {name: [one["seed"] for one in own] for name, own in arm.items()} == {name: [42, 43] for name in tenants}
    rates = [
        line(tenant, loss, learning_rate=rate, validation_loss=validation)
        for rate, loss, validation in ((0.1, 1, 3), (0.2, 2, 2), (0.4, 3, 1))
        for tenant in tenants[: 1 if rate == 0.4 else 2]
    ]
    (arm,) = studies[0].arms_of(rates).values()
    assert studies[0].values_of(arm, tenants, "loss").tolist() == [[2.0], [2.0]]


def test_an_interval_draws_data_sets_so_that_many_tenants_of_one_do_not_narrow_it(studies: Any) -> None:
    found = np.array([[1.0]] * 9 + [[0.0]])
    middle, low, high = studies[0].with_interval(found, ["films"] * 9 + ["sums"])
    assert (middle, low, high) == (pytest.approx(0.9), 0.0, 1.0)


def test_a_data_set_is_scored_by_the_held_out_loss_and_by_the_exact_match_of_greedy_generation(
    studies: Any, tmp_path: Path
) -> None:
    study = import_module("datasets_quality")
    model, tokenizer = load_model("pocket", dtype="float32", device="cpu")
    encoder = PromptEncoder(tokenizer, style="plain")
    prompts = [row.prompt for row in import_module("tenant_study").rows_of(ROOT / "examples" / "reviews.jsonl")[:12]]
    empty = [encoder.encode([Row(str(i), prompt, " good")])[0] for i, prompt in enumerate(prompts)]
    texts = [one.text for one in complete(model, encoder, empty, max_new_tokens=4)[0]]
    some = [
        Row(str(i), prompt, text if i % 3 else " bad")
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    tenants = {"set": study.Tenant(study.TenantPlan("set", 0, ""), {"held-out": some})}
    results = study.Results(tmp_path / "lines.jsonl", {})
    found = study.Datasets(model, encoder, tenants, results, tmp_path, True).score(model, "set", "held-out")
    rows = encoder.encode(some)
    predictions, _ = complete(model, encoder, rows, max_new_tokens=8)
    (loss,) = held_out_losses(model, [rows], pad_id=encoder.pad_id)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["exact"] == pytest.approx(100 * sum(one.correct for one in predictions) / len(rows))


def test_the_tables_of_data_sets_pair_what_both_arms_have_and_name_what_is_shown(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, few_bits = import_module("datasets_tables"), import_module("few_bits")
    losses = {
        ("fcca", 16): (1.0, 2.0, 3.0, 9.0),
        ("own", 16): (0.9, 1.9, 2.9),
        ("lora", 1): (1.5, 2.5, 3.1),
        ("base", 0): (7.0, 7.0, 8.0),
    }
    lines = [
        {
            "phase": "final",
            "arm": arm,
            "rank": rank,
            "tenant": f"set-{i}",
            "loss": loss,
            "exact": 50.0,
            "learning_rate": 0.01,
        }
        for (arm, rank), of in losses.items()
        for i, loss in enumerate(of)
    ]
    same = "| not shown | +0.0 (+0.0 to +0.0) | yes |"
    found = f"| own basis (of 16 rows) minus shared FCCA | 3 | -0.100 (-0.100 to -0.100) {same}"
    assert found in study.primary_table(lines)
    assert "shared Random" not in study.primary_table(lines)
    assert "| set-0 | 50.0, 7.000 | 50.0, 1.000 |  |  | 50.0, 1.500 |" in study.each_table(lines)
    assert "| set-3 |  | 50.0, 9.000 |  |  |  |" in study.each_table(lines)
    at_half = [{**line, "arm": "measured"} if line["arm"] == "fcca" else line for line in lines]
    sizes = study.sizes_table(lines, at_half, [])
    assert "| 0.5B: shared FCCA at measured rates minus LoRA, r = 1 | 3 | -0.367 (-0.500 to -0.100) |" in sizes
    assert "135M: " not in sizes
    monkeypatch.setattr(study, "ENOUGH", 3)
    arms = study.arms_table([*lines, *({**line, "rank": 8} for line in lines[:2])])
    assert "| one FCCA basis, r = 8 | 2 | 0.01 |  | +0.000 (+0.000 to +0.000) |  | +0.0 (+0.0 to +0.0) |" in arms
    assert "| one FCCA basis, r = 16 | 4 | 0.01 | 2.000 |" in arms
    assert "| a LoRA, r = 1 | 3 | 0.01 | 2.367 | +0.367 (+0.100 to +0.500) |" in arms
    fewer = [{**line, "arm": "fcca, 4 bits", "loss": line["loss"] + 0.5, "value_bytes": 99} for line in lines[:4]]
    assert "| one FCCA basis, r = 16 | 4 | 99 | 4 | +0.500 (+0.500 to +0.500) |" in few_bits.bits_table(lines + fewer)
    rivals = [
        {**line, "arm": arm, "rank": 16} for arm, count in (("random", 2), ("tuned", 4)) for line in lines[:count]
    ]
    assert study.picture(lines + rivals).count("<circle") == 4 + 3 + 2
    tables = (study.primary_table, study.arms_table, few_bits.bits_table)
    assert [one([]) for one in tables] == ["Not measured yet.\n"] * 3


def test_diagonal_cores_are_found_where_they_are_and_keep_more_at_a_larger_rank(studies: Any) -> None:
    study, draw = import_module("diagonal"), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    U, V, sigmas = random(40, 6), random(30, 6), random(9, 6)
    updates = [(U * sigma, V.mT) for sigma in sigmas]
    left, right, found = study.diagonal(updates, 6, 200)
    for (B, A), sigma in zip(updates, found, strict=True):
        torch.testing.assert_close((left * sigma) @ right.mT, B @ A, rtol=0, atol=1e-4)
    unlike = [(random(40, 4), random(4, 30)) for _ in range(8)]
    lost = []
    for rank in (4, 16, 32):
        left, right, found = study.diagonal(unlike, rank)
        lost.append(
            sum(float(((left * s) @ right.mT - B @ A).square().sum()) for (B, A), s in zip(unlike, found, strict=True))
        )
    assert lost[0] > lost[1] > lost[2]
    assert lost[2] < 1e-6 * lost[0]


def test_codes_by_the_second_order_change_what_they_weigh_less_than_the_nearest_ones(studies: Any) -> None:
    study, draw = import_module("few_bits"), torch.Generator().manual_seed(0)
    cores, factors = (torch.randn(5, 6, 6, generator=draw) for _ in range(2))
    weights = factors @ factors.mT
    eye = torch.eye(6).expand(5, 6, 6)

    def changed(found: torch.Tensor, A: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        error = (found - cores).double()
        return torch.einsum("lmn,lnp,lpq,lmq->l", D.double(), error, A.double(), error)

    for bits in (1, 2, 4):
        nearest = study.all_rounded(cores, bits)
        better = study.by_second_order(cores, bits, weights, weights)
        assert (changed(better, weights, weights) < 0.9 * changed(nearest, weights, weights)).all()
        assert all(len(one.unique()) <= 2**bits for one in better)
        plain = study.by_second_order(cores, bits, eye, eye)
        torch.testing.assert_close(changed(plain, eye, eye), changed(nearest, eye, eye), rtol=0.02, atol=0)


def test_turned_cores_lose_less_where_one_value_is_large(studies: Any) -> None:
    study = import_module("few_bits")
    spiked = torch.full((1, 16, 16), 0.01)
    spiked[0, 0, 0] = 1.0
    error = [float((one - spiked).norm()) for one in (study.all_rounded(spiked, 2), study.turned(spiked, 2))]
    assert error[1] < error[0]


def test_a_model_reads_rounded_cores_from_a_step_on_while_the_values_themselves_move(studies: Any) -> None:
    study = import_module("few_bits")
    model, read = torch.nn.Linear(4, 4, bias=False), []
    core = model.weight
    model.register_forward_hook(lambda *_: read.append(core.detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    expected = core.detach().clone()
    with study.reading_rounded(model, [core], 2, 2):
        for step in range(4):
            model(torch.eye(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = study.all_rounded(expected[None], 2)[0] if step >= 2 else expected
            torch.testing.assert_close(read[-1], whole, rtol=0, atol=0)
            expected = expected - 0.125
            torch.testing.assert_close(core.detach(), expected)
    assert model(torch.eye(4)) is not None
    torch.testing.assert_close(read[-1], expected, rtol=0, atol=1e-6)


def test_loraquant_keeps_the_first_pairs_at_some_bits_and_the_signs_of_the_others(studies: Any) -> None:
    study, draw = import_module("loraquant"), torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(128, 3, generator=draw, dtype=torch.float64))[0] for _ in range(2))
    B, A = left * torch.tensor([3.0, 2.0, 0.5]), right.mT
    found, bits = study.loraquant({"one": (B, A), "two": (2 * B, A)}, 3, 0.99)
    assert bits == 2 * (2 * (3 * 256 + 4 * (16 + 3)) + (256 + 4 * 16))  # 9 and 4 of 13.25: two pairs first
    x, y = found["one"]
    for side, own in ((x.mT, left.mT), (y, right.mT)):
        groups = side.view(3, 2, 64)
        assert all(len(group.unique()) <= 8 for group in groups[:2].flatten(0, 1))
        assert all(len(group.abs().unique()) == 1 for group in groups[2])
        assert abs(float((side[2].sign() == own[2].sign()).double().mean()) - 0.5) == 0.5  # the pair's own sign is free
    error = float((x @ y - B @ A).norm() / (B @ A).norm())
    few = [float((study.uniform(side, 3, 64) - side).norm()) for side in (left.mT, right.mT)]
    assert error < 0.5
    assert max(few) < 0.5


def test_pairs_are_moved_to_where_their_rounded_product_is_nearer(studies: Any) -> None:
    study, draw = import_module("loraquant"), torch.Generator().manual_seed(0)
    b, a = (torch.randn(2, 128, generator=draw, dtype=torch.float64) for _ in range(2))
    moved = study.descended(b, a, 2, 64)

    def errors(x: torch.Tensor, y: torch.Tensor) -> list[float]:
        rounded = [study.uniform(side, 2, 64) for side in (x, y)]
        products = (torch.einsum("pm,pn->pmn", *pair) for pair in (rounded, (b, a)))
        return torch.sub(*products).flatten(1).norm(dim=1).tolist()

    assert all(new < old for new, old in zip(errors(*moved), errors(b, a), strict=True))


def test_the_fewest_bits_are_those_down_to_which_neither_interval_passes_the_margin(studies: Any) -> None:
    study = import_module("few_bits")

    def lines(arm: str, losses: tuple[float, ...], exact: tuple[float, ...]) -> list[dict[str, Any]]:
        return [
            {"phase": "final", "arm": arm, "rank": 16, "tenant": f"set-{i}", "loss": loss, "exact": right}
            for i, (loss, right) in enumerate(zip(losses, exact, strict=True))
        ]

    whole = lines("fcca", (1.0, 2.0, 3.0), (50.0, 60.0, 70.0))
    eight = lines("fcca, 8 bits", (1.004, 2.004, 3.004), (49.6, 59.6, 69.6))
    four = lines("fcca, 4 bits", (1.0, 2.0, 3.0), (49.4, 60.0, 70.0))  # the interval's end is .6 points lower
    two = lines("fcca, 2 bits", (1.0, 2.0, 3.0), (50.0, 60.0, 70.0))
    assert study.fewest_bits(whole, study.CORES) == 32
    assert study.fewest_bits(whole + eight, study.CORES) == 8
    assert study.fewest_bits(whole + eight + four + two, study.CORES) == 8
    worse = lines("fcca, 8 bits", (1.006, 2.006, 3.006), (50.0, 60.0, 70.0))
    assert study.fewest_bits(whole + worse, study.CORES) == 32
