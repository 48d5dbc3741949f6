"""benchmarks/whitening.py: the whole study at its tiniest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forked
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_the_study_measures_every_unit_once(tmp_path: Path) -> None:
    found = forked.study(BENCHMARKS / "whitening.py", tmp_path / "found.jsonl")
    spreads = {one["unit"]: one["input_spread"] * one["error_spread"] for one in found if one["phase"] == "spread"}
    assert len(spreads) == 4
    assert all(spread > 1 for spread in spreads.values())
    finals = {(one["constructor"], one["unit"]): one for one in found if one["phase"] == "final"}
    units = {"0", "2", "smallest", "largest"}
    assert set(finals) == {(name, unit) for name in ("fcca", "rawgrad", "filora") for unit in units}
    layers = {unit: finals["fcca", unit]["layers"] for unit in units}
    assert layers["2"] == [2]
    assert max(spreads[str(one)] for one in layers["smallest"]) <= min(spreads[str(one)] for one in layers["largest"])
    for name in ("fcca", "rawgrad", "filora"):  # the best rate of a search trains the final run
        tried = {one["learning_rate"]: one["loss"] for one in found
                 if one["phase"] == "search" and (one["constructor"], one["unit"]) == (name, "largest")}  # fmt: skip
        assert finals[name, "largest"]["learning_rate"] == min(tried, key=tried.__getitem__)


def test_the_spread_is_the_largest_channel_over_the_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from whitening import layer_of, spread

    assert spread([torch.tensor([1.0, 2.0, 8.0]), torch.tensor([3.0, 1.0, 1.0])]) == pytest.approx(12**0.5)
    assert layer_of("model.layers.12.self_attn.q_proj.P") == 12


def test_the_table_pairs_seeds_and_orders_layers_by_their_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import whitening_tables

    lines = [{"phase": "base", "loss": 6.0}]
    for layer, (of_inputs, of_errors) in enumerate([(10.0, 2.0), (4.0, 9.0), (3.0, 3.0)]):
        lines.append({"phase": "spread", "unit": str(layer), "input_spread": of_inputs, "error_spread": of_errors})
    for seed in (43, 42):  # in the order of the measurements, which need not be that of the seeds
        for unit, layers in {"0": [0], "1": [1], "2": [2], "largest": [0, 1]}.items():
            for constructor, extra in {
                "fcca": 0.0,
                "rawgrad": 0.1 * sum(layers),
                "filora": -0.2 - 0.2 * sum(layers),
            }.items():
                loss = seed / 100 + extra * (1.5 if seed == 43 else 0.5)
                lines.append({"phase": "final", "unit": unit, "layers": layers, "constructor": constructor,
                              "seed": seed, "loss": loss})  # fmt: skip
    file = tmp_path / "whitening.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    study = whitening_tables.Study(file)
    assert study.units == ["1", "0", "2", "largest"]
    assert study.spread("largest") == pytest.approx((40.0 * 18.0) ** 0.5)
    assert study.gains("2", "rawgrad") == pytest.approx([0.1, 0.3])
    first = whitening_tables.losses(study).splitlines()[2]
    assert first.startswith("| layer 1 | 4 | 9 |")
    half = 12.706 * 0.1 / 2**0.5 / 2**0.5  # t of one degree of freedom; the gains .05 and .15 scatter by .1 / sqrt 2
    assert f"+0.100 ± {half:.3f}" in first
    both = whitening_tables.over_layers(study).splitlines()[-1]
    assert [cell.split()[0] for cell in both.split("|")[2:4]] == ["-0.50", "+0.50"]  # ranks 2 3 1 with 1 2 3, 3 2 1
    whitening_tables.figure(study, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
