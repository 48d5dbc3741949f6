"""What a person sees while a run works: a bar per stage on a terminal, a plain line per stage elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from frozencore.lab.run.interrupted import kept_of

LABELS = {
    "load": "Load model and rows",
    "score base": "Score the base model",
    "calibration": "Calibrate",
    "ranks": "Spend the rank budget",
    "bases": "Build the bases",
    "train": "Train",
    "validate": "Score validation rows",
    "score": "Score",
}


def resume_line(out: Path) -> str:
    """From where a run goes on that is to be resumed."""
    kept = kept_of(out)
    return f"Nothing to go on from in {out}: from the start" if kept is None else f"Goes on from {kept} in {out}"


class StageDisplay:
    """Shows stages as they come; call it with a stage, the steps done, their total, and a note."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[str, TaskID] = {}
        self.started: dict[str, float] = {}
        self.finished: set[str] = set()
        self.progress = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )

    def __enter__(self) -> StageDisplay:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        label = LABELS.get(stage, stage)
        if not self.console.is_terminal:
            self._line(stage, label, done, total, note)
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(label, total=total, note=note)
        self.progress.update(self.tasks[stage], completed=done, total=total, note=note)

    def _line(self, stage: str, label: str, done: int, total: int | None, note: str) -> None:
        started = self.started.setdefault(stage, time.perf_counter())
        if total is None or done < total or stage in self.finished:
            return
        self.finished.add(stage)
        elapsed = time.perf_counter() - started
        self.console.print(f"{label}: {total} in {elapsed:.1f} s" + (f" ({note})" if note else ""), highlight=False)
