"""Mutated files and crafted folders against every loader: how many were tried, and that only our own errors came out.

    python benchmarks/fuzz.py                    # a minute; figures go to results/fuzz.json beside this file
    python benchmarks/fuzz.py --seconds 600 --seed 1

Half of the time goes to bytes. A seed file of each kind is made by the library itself (fuzz_files.py). A mutation flips
bits, cuts, doubles or overwrites stretches of bytes, puts in text that breaks parsers, or gives a JSON field (a
safetensors header's too) another value. The other half goes to values: an adapter or a basis gets a value of another
type, a huge number, an endless expression, or tensors of other shapes, dtypes and names (fuzz_ways.py), under a seal
that fits, and goes through every way in. What is tried may be taken, or refused with an error of ours in one line.
Anything else, or a loader that computes longer than ``SLOWEST_S``, is a failure, and what caused it is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from frozencore.errors import FrozenCoreError
from frozencore.files.whole_file import write_json
from frozencore.tune.run.provenance import provenance
from fuzz_files import make_targets
from fuzz_ways import draw, make_sources, ways_in, ways_into_a_basis

SLOWEST_S = 20.0
POISON = (
    b"\x00", b"\xff\xfe", b"NaN", b"1e999", b"-1", b"9" * 400, b"null", b"true", b"[]", b"{}", b'"', b"[" * 3000,
    b"../../", b"\\u0000", b"\\ud800", b"\n", b"\r", b"\t", b"\xe2\x80\xa8", b"18446744073709551615",
    b"&a [*a]", b"!!python/object/apply:os.system [id]", b"---\n", b"!!bool maybe", b"!!timestamp x", b"!!int",
    b"2020-13-45", b"<<: ", b"F64", b"BF16", b"I8", b"FROZENCORE", b"LORA",
)  # fmt: skip


@dataclass
class Tally:
    """The outcomes of the files of one kind."""

    tried: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    spent_s: float = 0.0


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four changes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64))
        # Half of the changes go to the beginning, where a header is.
        place = rng.randrange(min(len(data), 400) + 1) if rng.random() < 0.5 else place
        match rng.randrange(8):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = data[place : place + length]
            case 4:
                data[place : place + length] = rng.randbytes(length)
            case 5:
                data[place:place] = rng.choice(POISON)
            case 6:
                poison = rng.choice(POISON)
                data[place : place + len(poison)] = poison
            case _:
                data = _other_value(data, rng)
    return bytes(data)


def _other_value(data: bytearray, rng: random.Random) -> bytearray:
    """Another value somewhere in JSON text: the whole file, or the header of a safetensors file."""
    start = 8 if data[8:9] == b"{" else 0
    length = int.from_bytes(data[:8], "little") if start else len(data)
    try:
        tree = json.loads(bytes(data[start : start + length]))
    except (ValueError, RecursionError):
        return data
    places = list(_places(tree))
    if not places:
        return data
    holder, key = rng.choice(places)
    holder[key] = rng.choice((None, True, -1, 0, 2**63, 1e300, "", "x", "../x", [], {}, [1, 2], {"a": 1}, "F32", "U8"))
    text = json.dumps(tree).encode()
    return bytearray((len(text).to_bytes(8, "little") if start else b"") + text + data[start + length :])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def fuzz(seconds: float, seed: int, keep: Path) -> dict[str, Tally]:
    """Try files and folders until the time is over, which both halves share, and within them all kinds of files."""
    with TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        halves = (mutated_files(Path(made) / "files", seed, keep), crafted_folders(Path(made) / "folders", seed, keep))
        outcomes: tuple[dict[str, Tally], dict[str, Tally]] = ({}, {})
        for tried, half in zip(outcomes, halves, strict=True):
            tried.update(next(half))  # before the clock starts
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            spent = [sum(one.spent_s for one in tried.values()) for tried in outcomes]
            next(halves[spent.index(min(spent))])
    return outcomes[0] | outcomes[1]


def mutated_files(folder: Path, seed: int, keep: Path) -> Iterator[dict[str, Tally]]:
    """Yields its tallies, and then tries one file at each step."""
    folder.mkdir()
    rng, targets = random.Random(seed), make_targets(folder)
    for target in targets:
        target.load(target.folder)
    contents = {target.kind: (target.folder / target.file).read_bytes() for target in targets}
    outcomes = {target.kind: Tally() for target in targets}
    while True:
        yield outcomes
        target = min(targets, key=lambda one: outcomes[one.kind].spent_s)
        path, mutated = target.folder / target.file, mutate(contents[target.kind], rng)
        path.write_bytes(mutated)
        if _try(target.load, target.folder, outcomes[target.kind]):
            _keep(keep, f"{target.kind}-{len(outcomes[target.kind].failures)}-{Path(target.file).name}", mutated)
        path.write_bytes(contents[target.kind])


def crafted_folders(folder: Path, seed: int, keep: Path) -> Iterator[dict[str, Tally]]:
    """Yields its tallies, and then crafts one folder at each step, which goes through every way in."""
    folder.mkdir()
    rng, sources = random.Random(seed), make_sources(folder)
    adapter, basis = ways_in(folder), ways_into_a_basis(folder)
    outcomes = {f"crafted adapter: {name}": Tally() for name in adapter}
    outcomes |= {f"crafted basis: {name}": Tally() for name in basis}
    while True:
        yield outcomes
        source = rng.choice(sorted(sources.values()))
        place = folder / "crafted"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
        done = draw(place, rng)
        ways = [(f"crafted adapter: {name}", load, place) for name, load in adapter.items()]
        if (place / "basis").is_dir():
            ways += [(f"crafted basis: {name}", load, place / "basis") for name, load in basis.items()]
        for kind, load, where in ways:
            if _try(load, where, outcomes[kind]):
                outcomes[kind].failures[-1] += f" ({source.name}: {done})"
                _keep(keep, f"{kind}-{len(outcomes[kind].failures)}.txt", outcomes[kind].failures[-1].encode())


def _try(load: Callable[[Path], object], path: Path, outcome: Tally) -> bool:
    """Whether a loader failed on what lies there."""
    started = time.process_time()  # whatever else the machine does
    outcome.tried += 1
    failure = None
    try:
        load(path)
        outcome.taken += 1
    except FrozenCoreError as error:
        outcome.refused[type(error).__name__] += 1
        if len(str(error).splitlines()) != 1:
            failure = f"not one line: {str(error)[:200]!r}"
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    took = time.process_time() - started
    outcome.spent_s += took
    outcome.slowest_s = max(outcome.slowest_s, took)
    if took > SLOWEST_S:
        failure = f"took {took:.1f} s"
    if failure is not None:
        outcome.failures.append(failure)
    return failure is not None


def _keep(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name.replace(" ", "_").replace(":", "")).write_bytes(content)


def show(outcomes: dict[str, Tally]) -> None:
    table = Table(title=f"{sum(o.tried for o in outcomes.values()):,} mutated files and crafted folders")
    for heading in ("kind", "tried", "taken", "refused", "failures", "slowest"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, one in outcomes.items():
        table.add_row(
            kind, f"{one.tried:,}", f"{one.taken:,}", f"{one.refused.total():,}", str(len(one.failures)),
            f"{one.slowest_s:.2f} s",
        )  # fmt: skip
    Console(width=120).print(table)
    for kind, one in outcomes.items():
        for failure, count in Counter(one.failures).most_common(5):
            print(f"{kind}: {count} x {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="Folder for files that failed.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    started = time.monotonic()
    outcomes = fuzz(options.seconds, options.seed, options.keep)
    show(outcomes)
    rows = [
        {"kind": kind, "tried": one.tried, "taken": one.taken, "refused": dict(one.refused),
         "failures": len(one.failures), "slowest_s": round(one.slowest_s, 3)}
        for kind, one in outcomes.items()
    ]  # fmt: skip
    run = {"seed": options.seed, "seconds": round(time.monotonic() - started, 1)}
    totals = {name: sum(row[name] for row in rows) for name in ("tried", "taken", "failures")}
    write_json(options.out, {"benchmark": "fuzz", **run, **totals, "rows": rows, "provenance": provenance()})
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
