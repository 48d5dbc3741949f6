"""Tables of layers, on reports whose numbers are known."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from frozencore.adapter.inspection import AngleReport, BasisReport, CaptureReport, LayerReport
from frozencore.cli.inspect import inspection_table
from frozencore.tune.pocket import pocket_model_path
from frozencore.words import counted

Command = Callable[..., tuple[int, str, str]]
BASIS = BasisReport((8, 6), 2, 4, 112, 3e-8, 1.25, 2.5, 0.75)
CAPTURE = CaptureReport(3.0, 0.4, 5.0, 0.9, (2.0, 1.5), 2, 7.0, 9.0)
ANGLES = AngleReport(0.875, 0.625)


def shown(renderable: object) -> str:
    console = Console(width=220, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("capture", [None, CAPTURE])
@pytest.mark.parametrize("angles", [None, ANGLES])
def test_an_inspection_has_columns_for_what_was_given_and_for_nothing_else(
    capture: CaptureReport | None, angles: AngleReport | None
) -> None:
    report = LayerReport(BASIS, capture, angles)
    text = shown(inspection_table({"layer.0": report, "layer.1": report}))
    assert "2 layers; 8 trained values (32 bytes), bases 224 bytes; largest |PᵀP - I| 3.0e-08" in text
    assert ("‖PᵀGQ‖" in text, "40%" in text) == (capture is not None,) * 2
    assert ("cos P" in text, "0.875" in text) == (angles is not None,) * 2


def test_an_inspection_is_a_line_a_quantity_unless_every_layer_is_asked_for() -> None:
    cores = {f"layer.{i}": replace(BASIS, core_norm=float(i), output_coherence=1.0 + i) for i in range(120)}
    reports = {name: LayerReport(basis, None, None) for name, basis in cores.items()}
    short, long = (shown(inspection_table(reports, every_layer=every)) for every in (False, True))
    assert len(short.splitlines()) < 20
    assert "120 layers (--all-layers shows each)" in short
    cells = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:6]] for line in short.splitlines()
             if line.startswith("│")}  # fmt: skip
    assert cells["‖R‖"] == ["0", "59.5", "119", ""]  # no norm of a core is worse than another
    assert cells["coher. P"] == ["1.0", "60.5", "120.0", "layer.119"]
    assert all(f" {name} " in long for name in reports)
    assert "8 x 6" in long


def test_the_worst_layer_decides_what_is_said_of_orthonormality() -> None:
    worse = LayerReport(replace(BASIS, orthonormality_error=1e-3), None, None)
    reports = {"a": LayerReport(BASIS, None, None), "b": worse}
    assert "|PᵀP - I| 1.0e-03" in shown(inspection_table(reports))
    assert "PᵀP" not in shown(inspection_table(reports, orthonormal=False))  # the default coordinates promise none


def test_layers_stand_in_the_order_of_their_numbers() -> None:
    assert sorted(["layers.10.q", "layers.2.v", "layers.2.q"], key=counted) == [
        "layers.2.q",
        "layers.2.v",
        "layers.10.q",
    ]


def write_sums(file: Path, seed: int, word: str) -> Path:
    drawn = random.Random(seed)
    sums = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(20)]
    rows = [{"prompt": f"{word} {a} and {b}?", "completion": f" {a + b}"} for a, b in sums]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "known.jsonl", 0, "How many is")


@pytest.fixture
def calibrated(command: Command, known: Path, tmp_path: Path) -> Path:
    words = ("--model", pocket_model_path(), "--rank", 4, "--data", known, "--output", tmp_path / "c")
    assert command("calibrate", *words)[0] == 0
    return tmp_path / "c"


def test_a_folder_is_said_to_hold_what_the_commands_wrote(command: Command, calibrated: Path) -> None:
    status, out, err = command("inspect", calibrated)
    assert (status, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()[:3]] == [
        str(calibrated / name) for name in ("moments.safetensors", "adapter", "basis")
    ]
    assert "‖R‖" in out
    run = calibrated.parent / "runs" / "[red]first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "result.json").write_text("{")
    status, out, err = command("inspect", run)  # no adapter, so that is all
    assert (status, err, out.count("\n")) == (0, "", 2)
    assert "[red]first/result.json: a record, but not of a run, or damaged\n" in out
    assert "with --resume continues" in out
    assert command("inspect", run.parent)[1] == f"{run.parent}: 1 folder with a record: [red]first\n"
