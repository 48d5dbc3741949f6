"""The common parts of benchmarks: options, runs that take turns, tables, and the file of results and versions."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from frozencore.files.atomic_write import write_json
from frozencore.tune.cost import PeakMemory
from frozencore.tune.provenance import Provenance

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
Quartiles = tuple[float, float, float]
Record = dict[str, Any]


def load_average() -> float | None:
    """Programs that wanted to run, on average over the last minute, this one included; None where no one counts."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def parser_of(doc: str | None, name: str, ending: str = "json") -> argparse.ArgumentParser:
    """The options of every benchmark: ``--quick`` and ``--out``.

    Args:
        name: The results file is ``results/NAME.ENDING`` unless ``--out`` names another.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Tiny sizes: does it run? Its numbers mean nothing.")
    parser.add_argument(
        "--out", type=Path, help=f"Default: results/{name}.{ending} beside this file; nothing is written with --quick."
    )
    parser.set_defaults(name=name, ending=ending)
    return parser


def lines_of(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def results_file(options: argparse.Namespace) -> Path | None:
    return options.out or (None if options.quick else RESULTS / f"{options.name}.{options.ending}")


def study_file(options: argparse.Namespace) -> Path:
    """The file of a study, which reads the lines that it has to go on with it."""
    if (file := results_file(options)) is None:
        raise SystemExit("--quick needs --out FILE: nothing of it belongs into the results.")
    return file


def write_found(options: argparse.Namespace, **found: Any) -> None:
    """Write the results with the machine's load, its processors and the versions of the libraries."""
    if (out := results_file(options)) is not None:
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        about = {"benchmark": options.name, "quick": options.quick, "cpus": cpus, "load": load_average()}
        write_json(out, about | found | {"provenance": Provenance.here().content()})


def cpu_s(run: Callable[[], Any]) -> float:
    """Processor seconds of this process: on one thread, wall time without what other programs took."""
    started = time.process_time()
    run()
    return time.process_time() - started


def wall_s(run: Callable[[], Any]) -> float:
    """Wall seconds until a CUDA device, if there is one, is idle again."""
    synchronise()
    started = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - started


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_of(model: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes that a call holds at most, above what was held before."""
    memory = PeakMemory(model)
    held = memory.largest
    run()
    return max(0, memory.largest - held)


def take_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds by run, the order turned round in every other round; one round before is untimed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            seconds = cpu_s(runs[name])
            if number:
                times[name].append(seconds)
    return times


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median, lower and upper quartile."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return round(middle, 4), round(low, 4), round(high, 4)


def ratios(times: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """Quartiles of each round's time over the reference's of the same round."""
    return quartiles([mine / theirs for mine, theirs in zip(times, reference, strict=True)])


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(own) for name, own in times.items()}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, on a page and in a terminal; all columns but the first to the right."""
    first, *lines = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join([first, "|---" + "|--:" * (len(headings) - 1) + "|", *lines]) + "\n"


def with_range(found: Sequence[float], form: str = ".2f") -> str:
    """``1.02 (1.01 to 1.04)``: a middle, a low and a high value."""
    middle, low, high = (format(value, form) for value in found)
    return f"{middle} ({low} to {high})"
