"""The progress of a run on the screen: a bar per stage on a terminal, a line per stage in a file."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.text import Text

from frozencore.cli.display import PlainConsole, table_of
from frozencore.cli.stages import StageDisplay


def test_on_a_terminal_each_stage_is_one_bar_that_moves_to_its_total_and_keeps_its_last_note() -> None:
    printed = io.StringIO()
    with StageDisplay(Console(file=printed, force_terminal=True, width=120)) as stages:
        stages("train", 1, 4, "loss 2.000")
        stages("train", 4, 4, "loss 1.500")
        stages("a stage of its own", 2, None, "")
        bars = [(bar.description, bar.completed, bar.total, bar.fields["note"]) for bar in stages.progress.tasks]
    assert bars == [("Train", 4, 4, "loss 1.500"), ("a stage of its own", 2, None, "")]
    assert "loss 1.500" in printed.getvalue()
    assert "4/4" in printed.getvalue()


def test_in_a_file_a_long_stage_says_every_few_seconds_how_far_it_is_and_how_long_it_takes() -> None:
    printed, now = io.StringIO(), iter([0.0, 0.0, 0.0, 4.0, 10.0, 11.0, 80.0, 90.0, 90.0])
    with StageDisplay(Console(file=printed, width=120), clock=lambda: next(now)) as stages:
        for done in (50, 52, 55, 56, 90, 100):  # as a run that is resumed begins
            stages("train", done, 100, f"loss {done}")
    assert printed.getvalue().splitlines() == [
        "Train: 55 of 100 (loss 55), 90 s to go",  # 45 steps of 2 s
        "Train: 90 of 100 (loss 90), 20 s to go",
        "Train: 100 in 90.0 s (loss 100)",
        "In all: 90.0 s, 0.0 s of it between the stages",
    ]


def test_a_stage_that_goes_on_after_its_end_gets_a_line_for_each_end() -> None:
    """Accuracy, then loss, then samples: what no line said was counted as calibration."""
    printed, now = io.StringIO(), iter([0.0, 0.0, 5.0, 9.0, 12.0, 20.0, 20.0])
    with StageDisplay(Console(file=printed, width=120), clock=lambda: next(now)) as stages:
        stages("score base", 6, 6)
        stages("score base", 6, 6, "loss")
        stages("score base", 3, 3, "samples")
        stages("calibration", 2, 2)
    assert printed.getvalue().splitlines() == [
        "Score the base model: 6 in 5.0 s",
        "Score the base model: 6 in 4.0 s (loss)",
        "Score the base model: 3 in 3.0 s (samples)",
        "Calibrate: 2 in 8.0 s",
        "In all: 20.0 s, 0.0 s of it between the stages",
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["load", "train", "score"]), st.integers(0, 3), st.sampled_from([None, 2, 3]),
                  st.sampled_from(["", "loss"]), st.integers(0, 20)),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_whatever_stages_report_the_seconds_of_the_lines_add_up(
    reports: list[tuple[str, int, int | None, str, int]],
) -> None:
    printed, now = io.StringIO(), [0.0]
    with StageDisplay(Console(file=printed, width=120), clock=lambda: now[0]) as stages:
        for stage, done, total, note, seconds in reports:
            now[0] += seconds
            stages(stage, done, total, note)
    *lines, last = printed.getvalue().splitlines()
    whole, rest = map(float, re.findall(r"[\d.]+(?= s)", last))
    ends = [float(found[1]) for line in lines if (found := re.search(r" in ([\d.]+) s", line))]
    assert whole == sum(seconds for *_, seconds in reports)
    assert sum(ends) + rest == pytest.approx(whole)


def test_in_a_command_the_time_before_the_first_stage_counts_too() -> None:
    printed, now = PlainConsole(file=io.StringIO(), width=120), iter([3.0, 3.0, 9.0, 11.0, 11.5])
    printed.began = 2.0
    with StageDisplay(printed, clock=lambda: next(now)) as stages:
        stages.started()
        stages("load", 1, 1)
    assert printed.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "Start: imports and checks",
        "Start: 1 in 7.0 s (imports and checks)",
        "Load model and rows: 1 in 2.0 s",
        "In all: 9.5 s, 0.5 s of it between the stages",
    ]


def test_on_a_terminal_a_command_shows_a_bar_while_it_imports() -> None:
    shown = PlainConsole(file=io.StringIO(), width=120, force_terminal=True)
    shown.began = 0.0
    with StageDisplay(shown) as stages:
        (bar,) = stages.progress.tasks
        assert (bar.description, bar.completed, bar.fields["note"]) == ("Start", 0, "imports and checks")
        stages.started()
        assert bar.finished


def test_a_bar_counts_from_the_end_of_the_stage_before_it() -> None:
    now = iter([0.0, 0.0, 6.0, 20.0, 20.0])
    with StageDisplay(Console(file=io.StringIO(), force_terminal=True), clock=lambda: next(now)) as stages:
        stages("load", 1, 1)
        stages("score base", 6, 6)
        first, second = (bar.finished_time for bar in stages.progress.tasks)
    assert first is not None
    assert second is not None
    assert (round(first), round(second)) == (6, 14)


def test_a_path_that_is_wider_than_the_screen_stays_whole_and_other_words_are_wrapped() -> None:
    printed, path = io.StringIO(), f"/home/anna/{'a-long-folder/' * 6}adapter"
    console = PlainConsole(file=printed, width=60)
    console.print(Group(Text(f"The scores, the record and the answers of this run are in {path}.")))
    lines = printed.getvalue().splitlines()
    assert any(path in line for line in lines)
    assert all(len(line) <= 60 for line in lines if path not in line)


def test_a_narrow_table_keeps_its_numbers_whole() -> None:
    headings = ("subject", "task", "rows", "accuracy %", "± se", "majority", "truncated", "nats/token")
    row = ("a-long-name", "reviews.jsonl", "60", "68.3", "6.1", "50.0", "34", "13.894")
    printed = io.StringIO()
    console = PlainConsole(file=printed, width=60)
    console.print(table_of(None, headings, [row], names=("subject", "task"), screen=console))
    assert all(f" {number} " in printed.getvalue() for number in ("60", "68.3", "6.1", "50.0", "34", "13.894"))
    assert max(map(len, printed.getvalue().splitlines())) <= 60
