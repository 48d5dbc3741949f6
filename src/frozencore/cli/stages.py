"""The progress of a job's stages: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from frozencore.text import time_in_words

LABELS = {
    "start": "Start",
    "load": "Load model and rows",
    "hash": "Hash the model",
    "score base": "Score the base model",
    "calibration": "Calibrate",
    "bases": "Build the bases",
    "rate": "Measure the rate",
    "try rate": "Try the rate",
    "train": "Train",
    "validate": "Score validation rows",
    "score": "Score",
}
IMPORTS = "imports and checks"
LINE_EVERY_S = 10.0  # between two lines of a stage, if there is no terminal
NARROWEST_BAR, WIDEST_BAR, BESIDE_BAR = 6, 30, 82  # columns; a label, counts, a time and a note stand beside a bar


@dataclass
class Stage:
    """One stage of the work.

    Attributes:
        spent_s: Seconds since the stage last printed an end.
        first, already: The time of the first report, and the number of steps done then.
        reported: The time of the last printed line.
        end: The last report, if it ended the stage.
        in_all_s: Seconds of the whole stage.
    """

    first: float
    already: int
    reported: float
    spent_s: float = 0.0
    in_all_s: float = 0.0
    end: tuple[int, int | None, str] | None = None


class StageDisplay:
    """Show the stages of a job; called with a stage, the steps done, their total, and a note.

    The time since the previous report counts for the reporting stage, so the stages add up to the whole time, which
    begins with the command. A command imports what takes seconds while this is shown, and then calls :meth:`started`. A
    stage may end several times: scoring ends for accuracy and then for loss. Each end prints a line.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console = console
        self.clock = clock
        self.began = self.latest = clock()
        self.stages: dict[str, Stage] = {}
        self.bars: dict[str, TaskID] = {}
        width = console.width - BESIDE_BAR
        bar = [BarColumn(bar_width=min(WIDEST_BAR, width))] if width >= NARROWEST_BAR else []
        self.progress = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<21}", markup=False),
            *bar,
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
        )

    def __enter__(self) -> StageDisplay:
        began = getattr(self.console, "began", None)
        self.began = self.latest = self.clock() if began is None else began
        if self.console.is_terminal:
            self.progress.start()
        if began is not None:
            self("start", 0, 1, IMPORTS)
            if not self.console.is_terminal:
                self.console.print(f"{LABELS['start']}: {IMPORTS}", highlight=False)
        return self

    def started(self) -> None:
        """Report that the command has imported what it needs."""
        if "start" in self.stages:
            self("start", 1, 1, IMPORTS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()
        if error is None and self.stages:
            whole = self.clock() - self.began
            rest = whole - sum(stage.in_all_s - stage.spent_s for stage in self.stages.values())
            self.console.print(f"In all: {whole:.1f} s, {rest:.1f} s of it between the stages", highlight=False)

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        now = self.clock()
        current = self.stages.setdefault(stage, Stage(now, done, now))
        is_end, report = total is not None and done >= total, (done, total, note)
        if current.end is not None and current.end != report:  # the stage continues with other work
            current.end, current.first, current.already = None, now, done
        current.spent_s += now - self.latest
        current.in_all_s += now - self.latest
        self.latest = now
        if self.console.is_terminal:
            self._move_bar(stage, done, total, note)
        elif current.end is None and (is_end or now - current.reported >= LINE_EVERY_S):
            self._print_line(LABELS.get(stage, stage), current, now, report)
        if is_end and current.end is None:
            current.end, current.spent_s = report, 0.0

    def _move_bar(self, stage: str, done: int, total: int | None, note: str) -> None:
        if stage not in self.bars:
            self.bars[stage] = self.progress.add_task(LABELS.get(stage, stage), total=total, note=note)
        self.progress.update(self.bars[stage], completed=done, total=total, note=note)
        bar = next(bar for bar in self.progress.tasks if bar.id == self.bars[stage])
        bar.start_time = bar.get_time() - self.stages[stage].in_all_s
        if bar.finished:
            bar.finished_time = self.stages[stage].in_all_s

    def _print_line(self, label: str, stage: Stage, now: float, report: tuple[int, int | None, str]) -> None:
        done, total, note = report
        noted = f" ({note})" if note else ""
        if total is not None and done >= total:
            self.console.print(f"{label}: {total} in {stage.spent_s:.1f} s{noted}", highlight=False)
        elif done > stage.already:
            stage.reported = now
            counts, to_go = f"{done}", ""
            if total is not None:
                seconds = (now - stage.first) / (done - stage.already) * (total - done)
                counts, to_go = f"{done} of {total}", f", {time_in_words(seconds)} to go"
            self.console.print(f"{label}: {counts}{noted}{to_go}", highlight=False)
