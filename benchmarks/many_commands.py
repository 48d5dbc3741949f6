"""The time of whole commands for 32 tenants: one ``frozencore tune-many`` against 32 times ``frozencore tune``.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/many_commands.py   # under ten minutes;  --quick: tiny sizes

The pocket model, 32 word problems a tenant of which three are held out, three epochs, on one saved basis, with one row
an optimiser step or eight. ``tune`` is told to generate nothing (``--samples 0 --exact-match no``): then both do the
same, train, score held-out rows before and after, and write an adapter and a record. It still draws a figure, which is
its own. The first eight tenants are tuned one by one, and counted four times. Processor time is that of the command and
all that it starts, from its first import to its exit. The losses of both must agree.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tenant_tables
from frozencore.tune.pocket.tasks import PROBLEM, word_problem
from harness import load_average, machine_name, parser_of, write_found

FROZENCORE = [sys.executable, "-m", "frozencore"]
ENOUGH_S = 540.0  # all turns together
ALIKE = 1e-4  # of the losses of a tenant by either command


@dataclass(frozen=True)
class Size:
    """The number of tenants that train together, the number that also train alone, and their rows."""

    num_tenants: int = 32
    num_alone: int = 8
    num_rows: int = 32
    epochs: int = 3
    rows_a_step: tuple[int, ...] = (1, 8)


QUICK = Size(num_tenants=2, num_alone=1, num_rows=4, epochs=1, rows_a_step=(2,))


def write_rows(folder: Path, size: Size) -> list[Path]:
    """A file for each tenant."""
    folder.mkdir()
    files = []
    for number in range(size.num_tenants):
        drawn, lines = random.Random(number), []
        for i in range(size.num_rows):
            problem = PROBLEM(word_problem(drawn, i % 4), str(i))
            row = {"prompt": problem.prompt, "completion": problem.completion}
            lines.append(json.dumps(row) + "\n")
        files.append(folder / f"tenant-{number:02}.jsonl")
        files[-1].write_text("".join(lines))
    return files


def command(*words: object) -> dict[str, float]:
    """Seconds of a whole command, by the processor and by the clock."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([*FROZENCORE, *map(str, words)], capture_output=True, text=True)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"frozencore {words[0]} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return {
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_s": wall_s,
    }


def added(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    every = list(runs)
    return {name: sum(run[name] for run in every) for name in every[0]}


def training_s(folders: Iterable[Path]) -> float:
    return sum(record_in(folder)["training_s"] for folder in folders)


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def difference(one: Path, other: Path) -> float:
    """The largest relative difference between the losses of a tenant's two runs."""
    pairs = zip(*(of_steps(record_in(folder)) for folder in (one, other)), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def of_steps(record: dict[str, Any]) -> list[float]:
    return [*record["training"]["losses"], record["held_out_loss_before"], record["held_out_loss"]]


def race(work: Path, basis: Path, files: Sequence[Path], size: Size, rows_a_step: int, turn: int) -> dict[str, Any]:
    """One turn: all tenants by one command, and some of them by one each."""
    same = ("--model", "pocket", "--basis", basis, "--device", "cpu", "--epochs", size.epochs)
    same = (*same, "--batch-size", "auto", "--accumulation", rows_a_step)
    out = work / f"turn-{turn}-{rows_a_step}"
    together = command("tune-many", "--tenants", files[0].parent, *same, "--slots", size.num_tenants, "--out", out)
    alone = [out / "alone" / file.stem for file in files[: size.num_alone]]
    runs = [
        command("tune", "--data", file, *same, "--samples", 0, "--exact-match", "no", "--out", folder)
        for file, folder in zip(files, alone, strict=False)
    ]
    far = max(difference(out / folder.name, folder) for folder in alone)
    if far > ALIKE:
        sys.exit(f"The losses of a tenant by tune-many and by tune are to agree, but differ by {far:.1e}.")
    times = size.num_tenants / size.num_alone
    return {
        "together": together | {"training_s": training_s(out / file.stem for file in files)},
        "one by one": {
            name: times * seconds for name, seconds in (added(runs) | {"training_s": training_s(alone)}).items()
        },
        "difference": far,
        "load": load_average(),
    }


def measure(size: Size, most_turns: int) -> tuple[list[dict[str, Any]], int]:
    """By rows a step: medians over turns of each side's seconds, and of how many times ours the other's are.

    Also how many turns there were: one that would not end in time is not begun.
    """
    started, turns = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        files = write_rows(work / "rows", size)
        everybody = work / "everybody.jsonl"
        everybody.write_text("".join(file.read_text() for file in files))
        command("calibrate", "--model", "pocket", "--data", everybody, "--device", "cpu", "--out", work / "shop")
        basis = work / "shop" / "basis"
        for turn in range(most_turns):
            turns.append([race(work, basis, files, size, rows, turn) for rows in size.rows_a_step])
            spent_s = time.perf_counter() - started
            if spent_s * (turn + 2) / (turn + 1) > ENOUGH_S:
                break
    found = []
    for rows_a_step, own in zip(size.rows_a_step, zip(*turns, strict=True), strict=True):
        sides = {
            side: {name: median(turn[side][name] for turn in own) for name in own[0][side]}
            for side in ("together", "one by one")
        }
        times = {
            name: [turn["one by one"][name] / turn["together"][name] for turn in own]
            for name in ("processor_s", "wall_s", "training_s")
        }
        found.append(
            {
                "rows_a_step": rows_a_step,
                **sides,
                "times": {name: median(values) for name, values in times.items()},
                "times_of_turns": times,
                "difference": max(turn["difference"] for turn in own),
                "load": max(turn["load"] or 0.0 for turn in own),
            }
        )
    return found, len(turns)


def main() -> None:
    parser = parser_of(__doc__, f"many-commands-{machine_name()}")
    parser.add_argument("--rounds", type=int, default=2, help="Turns at most, of those that end in time.")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = QUICK if options.quick else Size()
    rows, rounds = measure(size, 1 if options.quick else options.rounds)
    result = {"rounds": rounds, "size": vars(size), "rows": rows}
    print(tenant_tables.many_commands(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
