"""``make bench``: run every benchmark for a CPU in turn, and compare the results with the targets.

    python benchmarks/bench.py                             # under fifteen minutes
    python benchmarks/bench.py --data-root ../shared/data  # and SmolLM2
    python benchmarks/bench.py --quick                     # tiny sizes: does it run?

Writes ``results/<processor>-<cores>-cores.json`` with all parts. A part that fails or exceeds its limit is recorded
as failed; the others continue, and the exit status is then 1. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import speed_tables
from frozencore.errors import ModelError
from frozencore.tune.smollm2 import smollm2_path
from harness import machine_name, parser_of, write_found
from targets import check_targets

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """A script beside this file, its options, and its time limit in seconds; ``script`` if it differs from the name."""

    name: str
    options: tuple[str, ...] = ()
    limit_s: int = 300
    script: str = ""


NOT_EVA = (
    "floor",
    "floor, all logits",
    "frozencore fcca",
    "frozencore eva",
    "PEFT LoRA-GA",
    "PEFT CorDA",
    "PEFT PiSSA",
)
PARTS = (
    Part("growth", ("--runs", "2", "--step-runs", "7")),
    Part("ranks", ("--runs", "2")),
    Part("step", ("--rounds", "8")),
    Part("svd"),
    Part("memory"),
    Part("calibration", ("--runs", "2", "--without", "frozencore eva", "PEFT EVA", "PEFT CorDA", "PEFT PiSSA")),
    Part("calibration_eva", ("--runs", "1", "--without", *NOT_EVA), script="calibration"),  # minutes a run
)
SMOLLM2 = Part("smollm2", ("--rounds", "3"), 600)  # needs the tasks' data
BUDGET_S = 15 * 60  # for PARTS; one that would begin later does not run


def run_part(part: Part, folder: Path, limit_s: float, *, quick: bool) -> dict[str, Any]:
    """Run a part, and return its results or the reason of its failure; ``time_s`` is the time it took."""
    out, started = folder / f"{part.name}.json", time.perf_counter()
    words = [sys.executable, str(HERE / f"{part.script or part.name}.py"), "--out", str(out)]
    words += ["--quick"] if quick else part.options
    status, errors = run_whole(words, limit_s)
    if status is None:
        found = {"error": f"not finished after {limit_s:.0f} s"}
    elif status:
        found = {"error": f"exit status {status}: {errors.strip()[-600:]}"}
    else:
        found = json.loads(out.read_text())
    return found | {"time_s": time.perf_counter() - started}


def run_whole(words: list[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status and error output of a program; None if it was ended at its limit, with all its children."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as program:
        try:
            errors = program.communicate(timeout=limit_s)[1]
            return program.returncode, errors
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if options.quick:
        return [part for part in parts if not part.script]  # the tiny round of its script has it already
    if options.only and SMOLLM2.name not in options.only:
        return parts
    if options.data_root is None or not has_smollm2():
        print(f"{SMOLLM2.name} is left out: it needs --data-root (make bench DATA=DIR) and make smollm2.")
        return parts
    with_data = (*SMOLLM2.options, "--data-root", str(options.data_root))
    return [*parts, replace(SMOLLM2, options=with_data)]


def has_smollm2() -> bool:
    try:
        return smollm2_path().is_dir()
    except ModelError:
        return False


def main() -> int:
    parser = parser_of(__doc__, machine_name())
    parser.add_argument("--only", nargs="+", choices=[*(part.name for part in PARTS), SMOLLM2.name])
    parser.add_argument("--data-root", type=Path, help="Folder of the tasks' data, for SmolLM2.")
    parser.add_argument("--parts", type=Path, help="Keep every part's own file in this folder.")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended too
    started = time.perf_counter()
    parts: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for part in chosen_parts(options):
            left_s = part.limit_s if part.name == SMOLLM2.name else started + BUDGET_S - time.perf_counter()
            limit_s = min(part.limit_s, max(0.0, left_s))
            parts[part.name] = found = run_part(part, options.parts or Path(folder), limit_s, quick=options.quick)
            print(f"{part.name}: {found.get('error') or 'done'} ({found['time_s']:.0f} s)", flush=True)
    verdicts = [asdict(verdict) for verdict in check_targets(parts)]
    print(speed_tables.targets({"targets": verdicts}))
    time_s = time.perf_counter() - started
    write_found(options, machine=machine_name(), time_s=time_s, targets=verdicts, parts=parts)
    return int(any("error" in found for found in parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
