"""What a person sees while a run works: a bar per stage on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from frozencore.tune.run.interrupted import kept_of
from frozencore.words import time_in_words

LABELS = {
    "load": "Load model and rows",
    "score base": "Score the base model",
    "calibration": "Calibrate",
    "ranks": "Spend the rank budget",
    "bases": "Build the bases",
    "try bases": "Try bases",
    "try places": "Try ranks and targets",
    "train": "Train",
    "validate": "Score validation rows",
    "score": "Score",
}


def resume_line(out: Path) -> str:
    """From where a run goes on that is to be resumed."""
    kept = kept_of(out)
    return f"Nothing to go on from in {out}: from the start" if kept is None else f"Goes on from {kept} in {out}"


LINE_EVERY_S = 10.0  # of a stage that goes on, where there is no terminal
NARROWEST_BAR, WIDEST_BAR, BESIDE_BAR = 6, 30, 82  # a label, counts, a time and a note of training


class StageDisplay:
    """Shows stages as they come; call it with a stage, the steps done, their total, and a note.

    Args:
        clock: Seconds, from any beginning.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console = console
        self.clock = clock
        self.tasks: dict[str, TaskID] = {}
        self.latest = clock()  # when something was last told: the next stage begins then, and not at its first word
        self.started: dict[str, tuple[float, float, int]] = {}  # its beginning, its first word, and how far it was then
        self.told: dict[str, float] = {}
        self.finished: set[str] = set()
        self.progress = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<21}", markup=False),
            BarColumn(bar_width=min(WIDEST_BAR, max(NARROWEST_BAR, console.width - BESIDE_BAR))),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
        )

    def __enter__(self) -> StageDisplay:
        self.latest = self.clock()
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        label, now = LABELS.get(stage, stage), self.clock()
        began, *_ = self.started.setdefault(stage, (self.latest, now, done))
        self.latest = now
        if not self.console.is_terminal:
            self._line(stage, label, done, total, note, now)
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(label, total=total, note=note)
            bar = next(bar for bar in self.progress.tasks if bar.id == self.tasks[stage])
            bar.start_time = bar.get_time() - (now - began)
        self.progress.update(self.tasks[stage], completed=done, total=total, note=note)

    def _line(self, stage: str, label: str, done: int, total: int | None, note: str, now: float) -> None:
        began, first, already = self.started[stage]
        noted = f" ({note})" if note else ""
        if stage in self.finished:
            return
        if total is not None and done >= total:
            self.finished.add(stage)
            self.console.print(f"{label}: {total} in {now - began:.1f} s{noted}", highlight=False)
        elif now - self.told.setdefault(stage, first) >= LINE_EVERY_S and done > already:
            self.told[stage] = now
            to_go = (
                "" if total is None else f", {time_in_words((now - first) / (done - already) * (total - done))} to go"
            )
            self.console.print(
                f"{label}: {done}" + ("" if total is None else f" of {total}") + f"{noted}{to_go}", highlight=False
            )
