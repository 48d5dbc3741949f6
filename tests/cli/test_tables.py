"""Tables on the screen, on records and reports whose numbers are known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from frozencore.adapter.inspection import AngleReport, BasisReport, CaptureReport, LayerReport
from frozencore.cli.layer_tables import inspection_table
from frozencore.cli.tables import run_summary, verdict
from frozencore.tune.run.config import make_config
from frozencore.tune.run.record_parts import AccuracyDetails
from frozencore.words import counted
from frozencore_lab.reports.sheets.render import rich_table
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label
from made_up import made_up_record

BASIS = BasisReport((8, 6), 2, 4, 4, 112, 3e-8, 1.25, 2.5, 0.75)
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
    assert "|PᵀP - I| 1.0e-03" in shown(inspection_table({"a": LayerReport(BASIS, None, None), "b": worse}))


@pytest.mark.parametrize(
    ("accuracy", "majority", "said"),
    [
        (0.60, 0.5, "Beats the majority class (50.0 %), clearly."),
        (0.53, 0.5, "Beats the majority class (50.0 %), within two standard errors."),
        (0.50, 0.5, "Does not beat the majority class (50.0 %)."),
        (0.60, None, "Beats the base model (25.0 %), clearly."),
        (0.20, None, "Does not beat the base model (25.0 %)."),
    ],
)
def test_a_run_is_measured_by_the_majority_class_or_else_by_its_base(
    accuracy: float, majority: float | None, said: str
) -> None:
    assert verdict(accuracy, 0.25, AccuracyDetails(standard_error=0.02, majority_class=majority)) == said


def test_a_run_on_ones_own_rows_shows_its_loss_and_no_verdict() -> None:
    config = {"model": "somewhere/model", "data": "rows.jsonl"}
    record = made_up_record({"task": None}, config=config, accuracy=..., accuracy_before=..., score=...)
    text = shown(run_summary(record))
    assert "fcca on rows.jsonl" in text
    assert f"1.800 │ {record.held_out_loss:.3f}" in text
    assert "accuracy" not in text
    assert "beat" not in text.lower()


@pytest.mark.parametrize("method", ["fcca", "pissa"])
def test_a_run_says_the_recipe_that_its_method_chose(method: str) -> None:
    recipe = make_config(model="pocket", task="svamp", method=method)
    own = {"learning_rate": recipe.resolved_learning_rate, "warmup": recipe.resolved_warmup}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": {**own, "batch_size": 1, "accumulation": 8}}
    text = shown(run_summary(made_up_record({"task": "svamp"}, method=method, resolved=resolved)))
    rate = {"fcca": "0.01", "pissa": "0.0002"}[method]
    assert f"262 steps of 8 rows, 1 at a time; learning rate {rate}, warm-up 0.1 of them." in text


def test_a_run_says_in_how_many_rounds_it_trained() -> None:
    recipe = {"learning_rate": 5e-3, "warmup": 0.1, "batch_size": 1, "accumulation": 8, "refresh": 7}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": recipe}
    text = shown(run_summary(made_up_record({"task": "svamp"}, resolved=resolved)))
    assert "262 steps of 8 rows, 1 at a time, in 7 rounds; learning rate" in text
    assert "36,864 trained values; 432.0 KiB of state held while training; saved in 28.3 MiB" in text
    several = made_up_record({"task": "svamp"}, resolved=resolved, values_in_all=7 * 36_864)
    assert "36,864 trained values at once, 258,048 in all; " in shown(run_summary(several))


def test_a_run_says_which_step_it_kept_and_why() -> None:
    scores = [
        {"step": 88, "held_out_loss": 0.5, "accuracy": 0.75},
        {"step": 176, "held_out_loss": 0.4, "accuracy": 0.7},
    ]
    kept = {"every": "epoch", "rows": 70, "kept_step": 88, "by": "accuracy", "scores": scores, "time_s": 2.5}
    text = shown(run_summary(made_up_record({"task": "svamp"}, selection=kept)))
    assert "Kept step 88 of 262: accuracy 75.0 % on 70 validation rows, the best of 2 scores, which took 2.5 s." in text
    by_loss = [{"step": 262, "held_out_loss": 0.25}]
    kept = {"every": 300, "rows": 4, "kept_step": 262, "by": "held_out_loss", "scores": by_loss, "time_s": 1.0}
    assert "Kept step 262 of 262: loss 0.250 on 4" in shown(
        run_summary(made_up_record({"task": "svamp"}, selection=kept))
    )
    none = {"every": "epoch", "rows": 0, "kept_step": 262}
    text = shown(run_summary(made_up_record({"task": "svamp"}, selection=none)))
    assert "No rows to validate on beside those trained on: the last of 262 steps is kept." in text
    assert "step" not in shown(run_summary(made_up_record({"task": "svamp"})))


def test_on_a_screen_averages_stand_below_the_rows_and_what_is_best_is_bold() -> None:
    rows = ((label("a"), SheetCell("79.7", "1.5", best=True)), (label("b"), SheetCell("68.1")))
    sheet = Sheet("t", "A title", "", ("task", "FCCA"), rows, foot=((label("Mean"), SheetCell("73.9")),))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(rich_table(sheet))
    text = Text.from_ansi(console.file.getvalue())  # type: ignore[attr-defined]
    assert text.plain.index("79.7 ± 1.5") < text.plain.index("68.1") < text.plain.index("73.9")
    bold = "".join(text.plain[span.start : span.end] for span in text.spans if "bold" in str(span.style))
    assert "79.7 ± 1.5" in bold
    assert "68.1" not in bold
    assert "73.9" not in bold


def test_layers_stand_in_the_order_of_their_numbers() -> None:
    assert sorted(["layers.10.q", "layers.2.v", "layers.2.q"], key=counted) == [
        "layers.2.q",
        "layers.2.v",
        "layers.10.q",
    ]


def falling(losses: list[float], **recipe: object) -> str:
    training = {"num_steps": len(losses), "final_loss": losses[-1], "losses": losses}
    own = {"learning_rate": 1e-2, "warmup": 0.1, "batch_size": 8, "accumulation": 1, "epochs": 3}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": own | recipe}
    return shown(run_summary(made_up_record({"task": "svamp"}, resolved=resolved, training=training)))


def test_a_run_whose_loss_was_still_falling_says_so_and_what_to_try() -> None:
    said = falling([4.0 * 0.9**step for step in range(40)])
    assert "The training loss was still falling: " in said
    assert "Try --epochs 6 or a larger --lr." in " ".join(said.split())


def test_a_run_whose_loss_no_longer_falls_or_only_swings_says_nothing_of_it() -> None:
    flat = [4.0 * 0.5**step + 0.3 for step in range(40)]
    swinging = [0.3 + 0.25 * (-1) ** step - 0.001 * step for step in range(40)]
    for losses in (flat, swinging, flat[:4]):
        assert "falling" not in falling(losses)
