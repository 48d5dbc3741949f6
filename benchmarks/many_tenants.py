"""How many tenants train at once: ``tune-many`` with 10 to 10,000 tenants of eight rows, all of them side by side.

    OMP_NUM_THREADS=1 python benchmarks/many_tenants.py --sizes 10 100 1000      # --quick: three tenants
    OMP_NUM_THREADS=1 python benchmarks/many_tenants.py --sizes 1000 --model smollm2 --steps 1

Each size runs in a process of its own on the pocket model or another, FCCA of rank 16 on a basis that is calibrated
once on the rows of ten tenants. A tenant has eight short sums in a file of its own: seven to train on, all of them in
each step, and one to score. Seconds are processor seconds of that process, so that other programs count little: in
reading rows, training, and writing (scoring, adapter, record); the rest is the start and the base model's scores. A
line is added to the results for each size.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from frozencore.progress import no_progress
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.cost import process_peak_bytes
from frozencore.tune.many.finisher import Finisher
from frozencore.tune.many.run import execute_many
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import TunedRecord
from harness import load_average, parser_of, results_file, table

ROWS, CALIBRATED = 8, 10
PARTS = ("reading", "training", "writing")


def write_tenants(folder: Path, num_tenants: int) -> None:
    """Sums, of which each tenant has an odd idea of its own."""
    folder.mkdir(parents=True)
    for number in range(num_tenants):
        drawn, lines = random.Random(number), []
        for _ in range(ROWS):
            a, b = drawn.randrange(30), drawn.randrange(30)
            lines.append(json.dumps({"prompt": f"How many is {a} and {b}?", "completion": f" {a + b + number % 7}"}))
        (folder / f"tenant-{number:05}.jsonl").write_text("\n".join(lines) + "\n")


def config_of(model: str, data: Path, **more: Any) -> RunConfig:
    return make_config(model=model, data=data, device="cpu", **more)


class Clock:
    """Processor seconds by part of ``execute_many``, from its progress; and the memory held before rows are read."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PARTS, "start"), 0.0)  # the start has the base model's scores
        self.held = 0
        self._before, self._part = time.process_time(), "start"

    def enter(self, part: str) -> None:
        now = time.process_time()
        self.seconds[self._part] += now - self._before
        self._before, self._part = now, part

    def progress(self, stage: str, done: int, total: int | None, note: str = "", /) -> None:
        if stage == "load" and self._part == "start" and done:
            self.held = process_peak_bytes()
        if stage == "load" and done:
            self.enter("start" if done == total else "reading")
        elif stage == "score base" and done == total:
            self.enter("training")


def measure(model: str, steps: int, tenants: Path, basis: Path, out: Path) -> dict[str, Any]:
    """Train all tenants of a folder at once, in this process."""
    clock, finish, num_tenants = Clock(), Finisher.__call__, len(list(tenants.iterdir()))

    def timed(finisher: Finisher, ended: Mapping[str, Any]) -> None:
        clock.enter("writing")
        finish(finisher, ended)
        clock.enter("training")

    Finisher.__call__ = timed
    started = time.perf_counter()
    config = config_of(model, tenants, basis=str(basis), epochs=steps)
    outcomes = execute_many(config, out, clock.progress, num_slots=num_tenants)
    clock.enter("start")
    records = [outcome for outcome in outcomes.values() if isinstance(outcome, TunedRecord)]
    return {
        "model": model,
        "tenants": num_tenants,
        "finished": len(records),
        "steps": records[0].training.num_steps,
        "wall_s": time.perf_counter() - started,
        "cpu_s": clock.seconds,
        "held_bytes": clock.held,
        "peak_above_bytes": process_peak_bytes() - clock.held,
        "state_bytes": num_tenants * records[0].state_held_bytes,
        "values": records[0].num_trainable,
    }


def table_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """One line a size: processor milliseconds of a tenant by part, memory and state."""
    rows = []
    for line in sorted(lines, key=lambda one: (one["model"], one["tenants"])):
        each = [f"{1e3 * line['cpu_s'][part] / line['tenants']:.1f}" for part in PARTS]
        rows.append([
            line["model"], f"{line['tenants']:,}", str(line["steps"]),
            f"{sum(line['cpu_s'].values()) / line['tenants']:.3f}", *each,
            f"{line['peak_above_bytes'] / 1e6:,.0f} MB", f"{line['state_bytes'] / 1e6:,.1f} MB",
        ])  # fmt: skip
    head = [
        "model",
        "tenants",
        "steps",
        "seconds a tenant",
        *(f"{part}, ms" for part in PARTS),
        "peak above the model",
        "training state",
    ]
    return table(head, rows)


def main() -> None:
    parser = parser_of(__doc__, "many_tenants", "jsonl")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--model", default="pocket", help="pocket, smollm2 or a folder.")
    parser.add_argument("--steps", type=int, default=2, help="Optimizer steps of each tenant.")
    parser.add_argument("--one", type=Path, nargs=3, help=argparse.SUPPRESS)  # a size's own process
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(options.model, options.steps, *options.one)))
        return
    out = results_file(options)
    lines = []
    with TemporaryDirectory() as aside:
        folder = Path(aside)
        write_tenants(folder / "calibrated", 3 if options.quick else CALIBRATED)
        execute_calibration(
            config_of(options.model, folder / "calibrated"), folder / "shop", no_progress, of_tenants=True
        )
        for size in [3] if options.quick else options.sizes:
            write_tenants(folder / str(size), size)
            places = [folder / str(size), folder / "shop" / "basis", folder / f"out-{size}"]
            same = ["--model", options.model, "--steps", str(options.steps)]
            words = [sys.executable, __file__, *same, "--one", *map(str, places)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            here = Provenance.here("cpu").content()
            lines.append({**found, "quick": options.quick, "load": load_average(), "provenance": here})
            print(table_of(lines), flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")


if __name__ == "__main__":
    main()
