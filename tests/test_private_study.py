"""benchmarks/private.py, private_moments.py and private_tables.py: both studies at their tiniest, and their tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import norm

import forked
from frozencore.calibration.collect import collect_moments
from frozencore.privacy import PrivateBudget, Schedule
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.run.models import load_model
from frozencore.tune.training.recipe import Recipe
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"
ARMS = {"public", "random", "lora-1", "lora-16"}


@pytest.mark.slow
def test_each_arm_trains_privately_and_plainly_and_a_second_run_measures_nothing(tmp_path: Path) -> None:
    lines = forked.study(BENCHMARKS / "private.py", tmp_path / "found.jsonl")
    finals = [record for record in lines if record["phase"] == "final"]
    assert {(one["arm"], one["epsilon"]) for one in finals} == {
        (arm, epsilon) for arm in ARMS for epsilon in (8.0, None)
    }
    private = [one for one in finals if one["epsilon"]]
    assert len({(one["noise_multiplier"], one["steps"]) for one in private}) == 1
    assert all(7 < one["spent"] <= 8 for one in private)


@pytest.mark.slow
def test_a_step_under_opacus_without_noise_is_adamw_on_the_mean_of_the_rows_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import private
    from harness import Results

    base, tokenizer = load_model(str(pocket_model_path()), dtype="float32", device="cpu")
    results = Results(Path("nowhere.jsonl"), {}, by=())
    study = private.Study(base, PromptEncoder(tokenizer), "pocket-sentiment", None, private.QUICK, results)
    recipe = Recipe(1e-2, 0.0, epochs=3, batch_size=len(study.rows))
    schedule = Schedule(PrivateBudget(1.0, 1e-3, clip=1e6), len(study.rows), len(study.rows), 3, noise_multiplier=0.0)

    def trained(*, under_opacus: bool) -> dict[str, torch.Tensor]:
        model = study.adapter("lora-1", 42, None)
        mine = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if under_opacus:
            study.train_under_opacus(model, recipe, schedule)
        else:
            optimizer = torch.optim.AdamW(mine.values(), weight_decay=0.0)
            for step in range(3):
                optimizer.param_groups[0]["lr"] = recipe.rate(step, 3)
                losses = [model(**batch).loss for batch in make_batches(study.rows, pad_id=0, batch_size=1)]
                torch.stack(losses).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = {name: p.detach().clone() for name, p in mine.items()}
        model.unload()
        return found

    expected, found = trained(under_opacus=False), trained(under_opacus=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_noisy_moments_are_calibrations_sums_with_each_row_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import private
    from harness import Results
    from private_moments import WAYS, Moments

    base, tokenizer = load_model(str(pocket_model_path()), dtype="float32", device="cpu")
    results = Results(Path("nowhere.jsonl"), {}, by=())
    study = private.Study(base, PromptEncoder(tokenizer), "pocket-sentiment", None, private.QUICK, results)
    found = Moments(study)
    batches = list(make_batches(study.rows, pad_id=study.encoder.pad_id, batch_size=5))
    layers = {name: base.get_submodule(name) for name in found.private}
    for name, expected in collect_moments(base, batches, layers).items():
        mine = found.private[name]
        assert mine.num_tokens == expected.num_tokens
        for part in WAYS["moments"]:
            one, other = mine.total(part), expected.total(part)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    model = found.model = study.adapter("random", 42, None)
    for way, parts in WAYS.items():
        if way == "moments":
            metric, found.metric = found.metric, {}
        for row in study.rows[:5]:
            for part in parts:
                longest = found.longest[way][part]
                (cut,) = found.sums([row], [part], {part: longest}).values()
                length = torch.stack([total.square().sum() for total in cut.values()]).sum().sqrt()
                assert float(length) <= 1.001 * longest
        found.metric = metric
    model.unload()
    clean, noised = found.noisy("whitened", None, 0), found.noisy("whitened", 8.0, 0)
    name = next(iter(clean))
    of_x, of_delta = metric[name]
    added = (noised[name].total("cross") - clean[name].total("cross")) * of_delta[:, None] * of_x
    sigma = float(added.std()) / found.longest["whitened"]["cross"]
    # Balle and Wang (2018): the delta of one Gaussian mechanism of that sigma at epsilon 8
    delta = norm.cdf(0.5 / sigma - 8 * sigma) - math.exp(8) * norm.cdf(-0.5 / sigma - 8 * sigma)
    assert 0.1 * study.scale.delta < delta < study.scale.delta


@pytest.mark.slow
def test_noisy_moments_are_compared_and_trained_on(tmp_path: Path) -> None:
    lines = forked.study(BENCHMARKS / "private_moments.py", tmp_path / "found.jsonl")
    shares = {(one["basis"], one["epsilon"]): one["share"] for one in lines if one["phase"] == "share"}
    assert shares["own", None] > shares["moments", None] > shares["moments", 8.0]
    (final,) = [one for one in lines if one["phase"] == "final"]
    assert final["spent"] <= 4 < final["epsilon"]


def test_the_tables_hold_means_deviations_and_welchs_intervals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import private_tables

    common = {"task": "sst2", "values": 30720, "learning_rate": 0.02, "clip": 1.0, "noise_multiplier": 0.714}
    lines = [{"phase": "base", "task": "sst2", "accuracy": 0.5, "loss": 3.0}]
    for arm, epsilon, losses in (
        ("public", 8.0, (0.2, 0.3, 0.4)), ("lora-1", 8.0, (0.5, 0.5, 0.8)), ("public", None, (0.1,)),
    ):  # fmt: skip
        for seed, loss in enumerate(losses):
            lines.append(
                common
                | {"phase": "final", "arm": arm, "epsilon": epsilon, "seed": seed, "accuracy": 0.75, "loss": loss}
            )
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study = private_tables.Study(file)
    of_moments = [
        {"phase": "share", "basis": "whitened", "epsilon": 8.0, "share": 0.25},
        {"phase": "share", "basis": "own", "epsilon": None, "share": 0.5},
        {"phase": "final", "basis": "whitened", "epsilon": 8.0, "accuracy": 0.7, "loss": 0.6},
    ]
    losses = [[1.0, 2.0] * 10, [3.0, 4.0] * 10]
    of_attack = [
        {"epsilon": epsilon, "steps": 80, "area_of_loss": area, "area_of_fall": 0.5, "losses": losses, "told": [1, 0]}
        for epsilon, area in ((None, 0.9), (1.0, 0.4), (1.0, 0.6), (1.0, 0.5))
    ]
    blocks = private_tables.blocks(study, {"rows": []}, of_moments, of_attack)
    assert "75.0 ± 0.0 / 0.300 ± 0.100 (n = 3)" in blocks["private-quality"]
    assert "75.0 / 0.100 (n = 1)" in blocks["private-quality"]
    assert "not private | ε = 8, σ = 0.71 |" in blocks["private-quality"]
    # 0.3 - 0.6; variances 0.01 and 0.03 over three: t(3.2 degrees) = 3.07 times 0.1155
    assert "| SST-2, ε = 8: minus LoRA, r = 1 | -0.300 | -0.655 to +0.055 |" in blocks["private-apart"]
    assert "| the private rows, no privacy | 0.500 |  |" in blocks["private-moments"]
    assert "| noisy G in the public metric |  | 0.250 |" in blocks["private-moments"]
    assert "| noisy G in the public metric | 70.0 / 0.600 (n = 1) |" in blocks["private-moments-trained"]
    assert "| public rows | 75.0 ± 0.0 / 0.300 ± 0.100 (n = 3) |" in blocks["private-moments-trained"]
    plain, private = blocks["private-attack"].splitlines()[2:]
    assert plain == "| not private, 80 steps | 1 | 0.900 | 0.500 | 1 | 1 of 20 | 1.5 | 3.5 |"
    # t(2) = 4.303 times 0.1 / sqrt(3); the falls do not scatter, but guessing does: sqrt(41 / 12 / 400) / sqrt(3)
    areas = "0.500 (0.252 to 0.748) | 0.500 (0.270 to 0.730)"
    assert private == f"| ε = 1, 80 steps | 3 | {areas} | 0.8808 | 3 of 60 | 1.5 | 3.5 |"
    private_tables.figure(study, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_caption_has_its_own_activity_and_three_others_as_choices(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from private import OWN_TASKS

    task = OWN_TASKS["hellaswag-activity"](shared_data)
    train, rows = task.source.rows("train", shared_data), list(task.source.rows("evaluation", shared_data))[:50]
    assert len({row["source_id"] for row in train}) == len(train) > 1000
    assert {row["activity_label"] for row in rows} <= {row["activity_label"] for row in train}
    examples = [task.to_example(row, f"evaluation-{place}") for place, row in enumerate(rows)]
    assert examples == [task.to_example(row, f"evaluation-{place}") for place, row in enumerate(rows)]
    for row, example in zip(rows, examples, strict=True):
        assert example.completion == f" {row['activity_label']}"
        assert len(set(example.choices)) == 4
        assert example.completion in example.choices
        assert example.prompt.startswith("Caption: ")
        assert example.prompt.endswith("\nActivity:")
    assert {example.choices.index(example.completion) for example in examples} == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_attack_runs_and_a_second_run_measures_nothing(tmp_path: Path) -> None:
    plain, short, private = forked.study(BENCHMARKS / "private_attack.py", tmp_path / "found.jsonl")
    assert plain["steps"] == private["steps"] == 2 * short["steps"]
    assert 7 < private["spent"] <= 8
    for one in (plain, short, private):
        members, others = one["losses"]
        pairs = [(mine < other) + (mine == other) / 2 for mine in members for other in others]
        assert one["area_of_loss"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
        assert sum(members) < sum(one["base_losses"][0])
