"""What a person sees while a run works: a bar per stage on a terminal, a line per stage in a file."""

from __future__ import annotations

import io

from rich.console import Console

from frozencore.cli.display import StageDisplay


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


def test_in_a_file_a_stage_is_one_line_when_it_ends_however_often_it_speaks() -> None:
    printed = io.StringIO()
    with StageDisplay(Console(file=printed, width=120)) as stages:
        for done in (1, 2, 4, 4):
            stages("train", done, 4, "loss 1.500")
        stages("load", 1, None, "never ends")
    (line,) = printed.getvalue().strip().splitlines()
    assert line.startswith("Train: 4 in ")
    assert line.endswith(" s (loss 1.500)")
