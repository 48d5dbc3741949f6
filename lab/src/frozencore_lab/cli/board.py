"""Progress of a campaign on the screen: runs done and left, the work of each worker, the time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from frozencore.cli.display import LABELS
from frozencore.words import time_in_words
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.results import Tally
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker_pool import Event

LINE_EVERY = 10  # runs between two lines if there is no terminal


class Board:
    """Show the progress of a campaign: a live view on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, store: Store, *, line_every: int = LINE_EVERY) -> None:
        self.console = console
        self.store = store
        self.line_every = line_every
        self.stages: dict[int, str] = {}
        self.started = time.monotonic()
        self.done_at_start: int | None = None
        self.told = 0
        self.running: dict[int, Job] = {}
        self.progress = Bars(
            TextColumn("runs", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False), console=console,
        )  # fmt: skip
        self.task = self.progress.add_task("runs", total=None, note="")
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def __call__(self, standing: Tally, running: dict[int, Job], event: Event | None) -> None:
        over = standing.finished + standing.failed
        if self.done_at_start is None:
            self.done_at_start = over
        self.running = dict(running)
        note = f"{standing.failed} failed, {standing.left} left" + self._time_to_go(over, standing.left)
        self.progress.update(self.task, completed=over, total=over + standing.left, note=note)
        if event is None:
            return
        if event.kind == "stage":
            share = f" {event.done / event.total:.0%}" if event.total else ""
            self.stages[event.worker] = LABELS.get(event.stage, event.stage) + share
            return
        self.stages.pop(event.worker, None)
        if not self.console.is_terminal and (over >= self.told + self.line_every or not standing.left):
            self.told = over
            self.console.print(f"[{over}/{over + standing.left}] {note}", markup=False, highlight=False)

    def _time_to_go(self, over: int, left: int) -> str:
        done_here = over - (self.done_at_start or 0)
        if not done_here or not left:
            return ""
        seconds = (time.monotonic() - self.started) / done_here * left
        return f", about {time_in_words(seconds)} to go"

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for worker, job in sorted(self.running.items()):
            config = job.config
            table.add_row(
                f"worker {worker}", config.rows.learns, config.method.name, f"seed {config.rows.seed}",
                "search" if config.scoring.evaluate_on == "validation" else "",
                self.stages.get(worker, "starts"),
            )  # fmt: skip
        return Group(self.progress, table)
