"""The demo: the pocket model learns its four tasks with every constructor and LoRA, and shows what each was worth.

Every run is an ordinary run of :mod:`frozencore.lab.run.execute`, in worker processes of one thread each; the pocket
model is too small for more.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from frozencore.cli.tables import comparison_table, percent
from frozencore.constructors import CONSTRUCTORS
from frozencore.lab.pocket import POCKET_TASKS, pocket_model_path
from frozencore.lab.reports.figures.demo import accuracy_figure, mean_accuracy
from frozencore.lab.reports.pages.demo import write_page
from frozencore.lab.run.config import RunConfig, make_config
from frozencore.lab.run.record import TunedRecord
from frozencore.whole_file import write_json

DEMO_METHODS = (*CONSTRUCTORS, "lora")
# Of 1e-3, 2e-3 and 5e-3 the one that did best on every task's validation rows (tune --evaluate-on validation).
LORA_LEARNING_RATE = 5e-3
MOST_WORKERS = 8
NOTE = (
    "One seed, a pocket model of 1.3 million parameters and generated tasks: it shows that every part works and what "
    "each basis was worth here. Single runs differ by many points from seed to seed: it ranks nothing, and it is no "
    "reproduction of the paper."
)

Cell = tuple[str, str]
"""A task and a method."""
Event = tuple[Cell, str, int, int | None]


def demo_configs(seed: int) -> dict[Cell, RunConfig]:
    """One run for each task and method; a batch of 8 is the protocol's 1 x 8 in one forward pass."""
    return {
        (task, method): make_config(
            model=str(pocket_model_path()), task=task, method=method, seed=seed, batch_size=8, accumulation=1,
            learning_rate=LORA_LEARNING_RATE if method == "lora" else None, dtype="float32", device="cpu",
        )
        for task in POCKET_TASKS
        for method in DEMO_METHODS
    }  # fmt: skip


def run_demo(out: Path, console: Console, *, num_workers: int | None = None, seed: int = 42) -> list[dict[str, Any]]:
    """Run the demo and write ``results.json``, ``accuracy.png``, ``index.html`` and a folder for each run.

    What an earlier demo left in ``out`` is replaced.
    """
    started = time.perf_counter()
    configs = demo_configs(seed)
    runs = out / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    num_workers = num_workers or min(MOST_WORKERS, os.cpu_count() or 1)
    records = _run_all(configs, runs, _Board(console, configs), num_workers)
    results = [_result(record) for record in records]
    write_json(out / "results.json", results)
    accuracy_figure(
        results, out / "accuracy.png", "The pocket model's tasks, one seed: accuracy and its standard error"
    )
    write_page(out / "index.html", "frozencore demo", NOTE, results, [out / "accuracy.png"])
    console.print(comparison_table(results))
    console.print(_means(results))
    console.print(NOTE, style="dim")
    console.print(
        f"{len(results)} runs in {time.perf_counter() - started:.0f} s on {num_workers} workers. "
        f"Open {out / 'index.html'}; records in {out / 'results.json'}.",
        highlight=False,
    )
    return results


def _result(record: TunedRecord) -> dict[str, Any]:
    """The line of ``results.json`` for one run."""
    assert record.score is not None  # the tasks of the demo have an accuracy
    keys = {
        "task", "method", "seed", "trainable_parameters", "accuracy_before", "accuracy", "held_out_loss_before",
        "held_out_loss", "calibration_s", "training_s", "adapter_bytes", "peak_memory_bytes",
    }  # fmt: skip
    return record.model_dump(include=keys) | {
        "standard_error": record.score.standard_error,
        "chance": record.score.chance,
    }


def _means(results: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Mean over the tasks", title_justify="left")
    table.add_column("method")
    table.add_column("accuracy %", justify="right")
    table.add_column("trained values", justify="right")
    trained = {result["method"]: result["trainable_parameters"] for result in results}
    for method, accuracy in mean_accuracy(results).items():
        table.add_row(method, percent(accuracy), f"{trained[method]:,}")
    return table


def _run_all(configs: Mapping[Cell, RunConfig], runs: Path, board: _Board, num_workers: int) -> list[TunedRecord]:
    context = multiprocessing.get_context("spawn")
    events: Queue[Event] = context.Queue()
    with ProcessPoolExecutor(num_workers, context, _start_worker, (events,)) as pool, board:
        futures = {
            pool.submit(_run_cell, cell, config, runs / "-".join(cell)): cell for cell, config in configs.items()
        }
        try:
            _follow(futures, events, board)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _follow(futures: Mapping[Future[TunedRecord], Cell], events: Queue[Event], board: _Board) -> None:
    waiting = set(futures)
    while waiting:
        try:
            cell, stage, done, total = events.get(timeout=0.2)
            board.show(cell, stage, done, total)
        except queue.Empty:
            pass
        for future in [future for future in waiting if future.done()]:
            waiting.remove(future)
            board.finish(futures[future], future.result())


_events: Queue[Event] | None = None


def _start_worker(events: Queue[Event]) -> None:
    global _events  # a pool's initialiser has no other way to hand a queue to its tasks
    _events = events
    import torch

    torch.set_num_threads(1)


def _run_cell(cell: Cell, config: RunConfig, out: Path) -> TunedRecord:
    from frozencore.lab.run.execute import execute

    events = _events
    assert events is not None
    return execute(config, out, lambda stage, done, total, _: events.put((cell, stage, done, total)))


@dataclass
class _Board:
    """The live display: a grid of methods and tasks on a terminal, a line per finished run elsewhere."""

    console: Console
    configs: Mapping[Cell, RunConfig]
    cells: dict[Cell, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self.task = self.progress.add_task("runs", total=len(self.configs))
        self.live = Live(console=self.console, refresh_per_second=5, get_renderable=self._render, transient=True)

    def __enter__(self) -> _Board:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.console.print(f"{len(self.configs)} runs")
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(self, cell: Cell, stage: str, done: int, total: int | None) -> None:
        if cell in self.cells and self.cells[cell].startswith("[bold]"):
            return
        self.cells[cell] = f"{stage} {done / total:.0%}" if total else stage

    def finish(self, cell: Cell, record: TunedRecord) -> None:
        assert record.accuracy_before is not None
        assert record.accuracy is not None
        before, after = percent(record.accuracy_before), percent(record.accuracy)
        self.cells[cell] = f"[bold]{before} → {after}"
        self.progress.advance(self.task)
        if not self.console.is_terminal:
            done = int(self.progress.tasks[0].completed)
            self.console.print(f"[{done}/{len(self.configs)}] {cell[0]} {cell[1]}: {before} → {after} %", markup=False)

    def _render(self) -> Group:
        tasks = list(dict.fromkeys(task for task, _ in self.configs))
        table = Table(title="accuracy before → after, %", title_justify="left")
        table.add_column("method")
        for task in tasks:
            table.add_column(task, justify="right", min_width=15)
        for method in dict.fromkeys(method for _, method in self.configs):
            table.add_row(method, *(self.cells.get((task, method), "[dim]·") for task in tasks))
        return Group(table, self.progress)
