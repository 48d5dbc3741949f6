"""benchmarks/tenant_rows.py and tenants_quality.py: the tenants' rows, and the whole study at its tiniest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forked
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.models import load_model
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.tasks.splits import normalised_text
from places import ROOT, SHARED

BENCHMARKS = ROOT / "benchmarks"
ARMS = {"own", "mean", "grouped", "generic", "weights", "random", "lora"}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def examples_in(file: Path) -> list[Example]:
    return [Example(**{**row, "choices": tuple(row["choices"])}) for row in lines_of(file)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tenants") / "found.jsonl"
    ended = forked.ended(forked.script(BENCHMARKS / "tenants_quality.py", "--quick", "--out", out), out.parent)
    assert ended.status == 0, ended.err[-2000:]
    return out


@pytest.mark.slow
def test_each_tenant_has_a_line_in_each_arm_and_a_second_run_measures_nothing(measured: Path) -> None:
    finals = [record for record in lines_of(measured) if record["phase"] == "final"]
    assert len(finals) == len(ARMS) * 4
    assert {(record["arm"], record["tenant"]) for record in finals} == {
        (arm, tenant) for arm in ARMS for tenant in json.loads(manifest_of(measured))["tenants"]
    }
    before = measured.read_bytes()
    again = forked.ended(
        forked.script(BENCHMARKS / "tenants_quality.py", "--quick", "--out", measured), measured.parent
    )
    assert again.status == 0, again.err[-2000:]
    assert measured.read_bytes() == before


def manifest_of(measured: Path) -> str:
    return (measured.with_suffix("") / "manifest.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_losses_of_the_base_model_are_those_of_the_library_without_the_end_token(measured: Path) -> None:
    model, tokenizer = load_model(str(pocket_model_path()), dtype="float32", device="cpu")
    encoder = PromptEncoder(tokenizer, style="plain")
    for record in lines_of(measured):
        if record["phase"] == "base":
            examples = examples_in(measured.with_suffix("") / "held-out" / f"{record['tenant']}.jsonl")
            rows = encoder.training_rows([encoder.render(example) for example in examples])
            cut = [type(row)(row.id, row.input_ids[:-1], row.num_context) for row in rows]
            assert record["loss"] == pytest.approx(held_out_loss(model, cut, pad_id=encoder.pad_id), rel=1e-4)


@pytest.mark.slow
def test_a_shared_basis_is_one_and_holds_less_of_a_tenant_than_its_own(measured: Path) -> None:
    finals = [record for record in lines_of(measured) if record["phase"] == "final"]
    own = {record["tenant"]: record["share"] for record in finals if record["arm"] == "own"}
    for arm in ARMS - {"own", "lora"}:
        of_arm = [record for record in finals if record["arm"] == arm]
        assert len({record["basis"] for record in of_arm}) == 1
        assert all(record["share"] < own[record["tenant"]] for record in of_arm)
    assert len({record["basis"] for record in finals if record["arm"] == "own"}) == len(own)


@pytest.mark.slow
def test_a_learning_rate_is_the_best_that_was_tried(measured: Path) -> None:
    records = lines_of(measured)
    for arm in ARMS:
        tried = [record for record in records if record["phase"] == "search" and record["arm"] == arm]
        best = min(tried, key=lambda record: record["loss"])["learning_rate"]
        assert {r["learning_rate"] for r in records if r["phase"] == "final" and r["arm"] == arm} == {best}


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs the public data sets")
def test_rows_of_the_tenants_are_the_same_each_time_and_no_text_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tenant_rows

    tenants = tenant_rows.make_tenants(tenant_rows.TENANTS, SHARED / "data")
    first = tenant_rows.write_tenants(tenants, tmp_path / "one")
    again = tenant_rows.write_tenants(tenant_rows.make_tenants(tenant_rows.TENANTS, SHARED / "data"), tmp_path / "two")
    assert first == again
    about = json.loads((tmp_path / "one" / "manifest.json").read_text(encoding="utf-8"))["tenants"]
    assert len(about) == 24
    assert sum(not one["calibrated"] for one in about.values()) == 8
    assert len({one["task"] for one in about.values()}) == 6
    assert all(50 <= one["rows"]["train"] <= 300 for one in about.values())
    bodies: list[str] = []
    for name, tenant in tenants.items():
        rows = [row for part in tenant.rows.values() for row in part]
        bodies += [row.id for row in rows]
        assert len({normalised_text(row) for row in rows}) == len(rows)
        if len({row.choices for row in rows}) == 1 and name != "arc-letters":  # some of ARC have three options or five
            counts = [sum(row.completion == choice for row in rows) for choice in rows[0].choices]
            assert max(counts) - min(counts) <= 1, name
    assert len(set(bodies)) == len(bodies)


def made_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Twelve tenants: on the basis for groups each is 0.1 better and as accurate; the second seed of LoRA lacks one."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tenants_quality_tables

    names = [f"tenant-{number}" for number in range(12)]
    rows = {"train": 64, "validation": 32, "held-out": 48}
    about = {name: {"about": "made up", "calibrated": name < "tenant-4", "rows": rows} for name in names}
    (folder / "manifest.json").write_text(json.dumps({"tenants": about}))
    lines = [{"phase": "base", "tenant": name, "loss": 4.0, "accuracy": 0.5} for name in names]
    sizes = {"values": 16, "disk_bytes": 1234, "memory_bytes": 64, "training_bytes": 192, "learning_rate": 0.01}
    for number, name in enumerate(names):
        for (arm, rank), better in {
            ("own", 16): 0.0,
            ("grouped", 16): 0.1,
            ("mean", 16): 0.0,
            ("lora", 1): 0.2,
        }.items():
            for seed in (42, 43):
                if (arm, seed, name) != ("lora", 43, "tenant-0"):
                    loss = 1.0 + 0.01 * number + 0.001 * seed - better
                    about_arm = {"arm": arm, "rank": rank, "seed": seed, "tenant": name, "share": 1 - loss / 10}
                    lines.append({"phase": "final", **about_arm, "loss": loss, "accuracy": 0.75, **sizes})
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tenants_quality_tables, tenants_quality_tables.Study(folder / "lines.jsonl", folder / "manifest.json")


def test_differences_are_paired_by_tenant_and_seed_and_a_seed_without_a_tenant_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, study = made_up(tmp_path, monkeypatch)
    assert list(study.arms["lora", 1]) == [42]
    loss = tables.arms_table(study, "loss")
    assert "| one basis, FCCA for groups | 0.01 | 2 |" in loss
    assert loss.count("-0.100 (-0.100 to -0.100)") == 2  # the tenants differ among one another, the pairs do not
    assert loss.count("-0.200 (-0.200 to -0.200)") == 2
    assert "The goal, at most 0.5 below, is reached" in tables.bar(study)
    assert "| a LoRA, r = 1 | 1 | 75.0 | +0.0 (+0.0 to +0.0) |" in tables.readme(study)


def test_an_interval_resamples_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import numpy as np

    from tenants_quality_tables import interval

    drawn = np.random.default_rng(1).normal(0.0, 1.0, (200, 1)) + np.zeros((200, 3))
    middle, low, high = interval(drawn)
    standard_error = drawn[:, 0].std() / 200**0.5
    assert middle == pytest.approx(drawn.mean())
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.05)


def test_an_effect_of_a_seed_that_its_tenants_share_widens_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effects -1, 0 and 1 of three seeds: all resampled seeds are the first in one resample of 27."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import numpy as np

    from tenants_quality_tables import interval, within_tenants

    shared = np.tile([-1.0, 0.0, 1.0], (24, 1))
    assert interval(shared) == pytest.approx((0.0, -1.0, 1.0))
    _, low, high = interval(np.random.default_rng(1).permuted(shared, axis=1))  # each tenant has effects of its own
    assert high - low < 1.0

    shares = np.zeros((24, 3, 3)) + np.array([0.0, 1.0, 2.0])[:, None]  # (tenants, bases, seeds)
    assert within_tenants(shares, shares) == "+1.00 (+1.00 to +1.00)"
    assert within_tenants(shares, shares * [1.0, 1.0, -1.1]) == "+1.00 (-1.00 to +1.00)"  # one seed is turned round


def test_a_share_that_goes_with_the_loss_in_every_tenant_has_a_rank_correlation_of_minus_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, study = made_up(tmp_path, monkeypatch)
    study.arms["random", 16] = {
        seed: {name: {**one, "loss": one["loss"] + 0.3, "share": one["share"] - 0.3} for name, one in found.items()}
        for seed, found in study.arms["own", 16].items()
    }
    study.arms["mean", 16] = {
        seed: {name: {**one, "loss": one["loss"] + 0.1, "share": one["share"] - 0.1} for name, one in found.items()}
        for seed, found in study.arms["own", 16].items()
    }
    assert "mean over the tenants | -1.00 (-1.00 to -1.00) |" in tables.correlation(study)
    assert "| those 3 of them that read data | -1.00 (-1.00 to -1.00) |" in tables.correlation(study)
