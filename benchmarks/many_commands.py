"""What a user pays: 32 tenants by one ``frozencore tune-many`` against 32 ``frozencore tune``, as whole commands.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/many_commands.py   # under ten minutes;  --quick: tiny sizes
    python benchmarks/many_commands.py --page      # the table of docs/many-cores.md from the results, nothing run

The pocket model, 32 word problems a tenant of which three are held out, three epochs, on one saved basis, with one row
an optimiser step or eight. ``tune`` is told to generate nothing (``--samples 0 --exact-match no``): then both do the
same, train, score held-out rows before and after, and write an adapter and a record. It still draws a figure, which is
its own. The first eight tenants are tuned one by one, and counted four times. Processor time is that of the command and
all that it starts, from its first import to its exit. The losses of both must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
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

from rich.console import Console
from rich.table import Table

from frozencore.files.whole_file import write_json, write_text
from frozencore.tune.pocket.word_problems import COMPLETION, NUM_KINDS, PROMPT, draw
from frozencore.tune.run.provenance import provenance
from frozencore.words import num_of
from machine import load_average, machine_name

RESULTS = Path(__file__).parent / "results" / f"many-commands-{machine_name()}.json"
PAGE = Path(__file__).parents[1] / "docs" / "many-cores.md"
FROZENCORE = [sys.executable, "-m", "frozencore"]
ENOUGH_S = 540.0  # all turns together
ALIKE = 1e-4  # of the losses of a tenant by either command


@dataclass(frozen=True)
class Size:
    """How many tenants train together, how many of them alone, and on how much."""

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
            problem = draw(drawn, i % NUM_KINDS)
            row = {"prompt": PROMPT.format(**problem), "completion": COMPLETION.format(**problem)}
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
    """Of all losses of a tenant's two runs, the largest, relative."""
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


def tables(result: dict[str, Any]) -> str:
    """The generated block of the page."""
    size = Size(**result["size"])
    lines = [
        f"What a user pays for {size.num_tenants} tenants of {size.num_rows} rows, {size.epochs} epochs, on one basis: "
        "whole commands with their start, the",
        "pocket model, one thread ([benchmarks/many_commands.py](../benchmarks/many_commands.py)).",
        "",
        f"| rows a step | | one `tune-many` | `tune`, {size.num_tenants} times | times as long |",
        "|---|---|--:|--:|--:|",
    ]
    named = (("processor_s", "processor"), ("wall_s", "clock"), ("training_s", "of it steps"))
    for row in result["rows"]:
        for name, words in named:
            ours, theirs = row["together"][name], row["one by one"][name]
            lines.append(
                f"| {row['rows_a_step']} | {words} | {ours:.1f} s | {theirs:.0f} s | {row['times'][name]:.1f} |"
            )
    load = max(row["load"] for row in result["rows"])
    lines += [
        "",
        f"`tune` was measured on {size.num_alone} of the {size.num_tenants} tenants and counted "
        f"{size.num_tenants // size.num_alone} times; medians of {num_of(result['rounds'], 'turn')}, while up to "
        f"{load:.0f} programs wanted the two cores.",
    ]
    return "\n".join(lines)


def write_page(result: dict[str, Any], page: Path) -> None:
    between = re.compile(r"(?<=<!-- many-commands:begin -->\n).*?(?=<!-- many-commands:end -->)", re.DOTALL)
    write_text(page, between.sub(lambda _: tables(result) + "\n", page.read_text(encoding="utf-8")))


def show(result: dict[str, Any]) -> None:
    shown = Table("rows a step", "seconds", "tune-many", "tune, one by one", "times as long")
    for row in result["rows"]:
        for name, times in row["times"].items():
            ours, theirs = row["together"][name], row["one by one"][name]
            shown.add_row(str(row["rows_a_step"]), name, f"{ours:.1f}", f"{theirs:.1f}", f"{times:.2f}")
    Console(width=100).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Two tenants of four rows: does it run?")
    parser.add_argument("--rounds", type=int, default=2, help="Turns at most, of those that end in time.")
    parser.add_argument("--page", action="store_true", help="Write the table of the page from the results.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.out.read_text()), PAGE)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = QUICK if options.quick else Size()
    rows, rounds = measure(size, 1 if options.quick else options.rounds)
    result = {
        "benchmark": "many-commands", "quick": options.quick, "rounds": rounds, "size": vars(size), "rows": rows,
        "provenance": provenance(),
    }  # fmt: skip
    show(result)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
