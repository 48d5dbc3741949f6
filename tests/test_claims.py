"""Every measured number of the README and of docs/ stands in a file of this repository that the page names.

A page says where its numbers come from in a comment that its reader does not see:

    <!-- source: lab/results/frontier/report/tables/one-basis-loss.md; 0.21 = 2.110 - 1.896 -->

The comment holds up to the next heading or the next such comment. Each number with a decimal point, a unit or a
thousands separator must then stand in one of its files, rounded as the page rounds it. A number that the page computed
stands after a semicolon with its computation, whose numbers stand in the files. Settings are in backticks and are not
checked, nor is code. Blocks between ``NAME:begin`` and ``NAME:end`` are written by a program; the test of that program
compares them.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = r"(?=\.?\d)(?:\d{1,3}(?:[,_]\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?"
UNITS = {
    "%": 100, "points": 100, "ms": 1e3, "µs": 1e6, "ps": 1e12, "s": 1, "min": 1 / 60, "h": 1 / 3600, "times": 1,
    "nats": 1, "bytes": 1, "KB": 1e-3, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9, "KiB": 2**-10, "MiB": 2**-20, "GiB": 2**-30,
}  # fmt: skip
UNIT = rf"(?:\s?(?P<unit>{'|'.join(UNITS)})(?![\w/]))?"
MEASURED = re.compile(rf"(?<![\w.,/-])(?P<value>{NUMBER}){UNIT}(?![\w]|[.,]\d|-\d)")
SOURCE = re.compile(r"<!-- source: ([^>]*?) -->")
GENERATED = re.compile(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", flags=re.DOTALL)
CLAIM = re.compile(r"\b(ahead|behind|level with|best|better|worse|beats?|wins?|no LoRA)\b", flags=re.IGNORECASE)
NEEDED = {
    "how many runs": r"\b(\d+|one|two|three|four|five|six) (seeds?|rounds|runs)\b|\bn = \d+",
    "an interval or a deviation": r"±|\bintervals?\b|\bquartiles?\b|\bdeviations?\b",
    "what it holds for": r"tiny1m|pocket|SmolLM2|Qwen|Llama|\bwidth\b|\bwide\b",
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
PLAIN = {*range(33), 100, 1000, 10**6, 10**9}  # numbers of a computation that nobody measured


@dataclass(frozen=True)
class Section:
    """A part of a page whose numbers have the same sources; ``raw`` has its settings and code too."""

    line: int
    text: str
    raw: str
    sources: tuple[str, ...]
    computed: tuple[str, ...]


def sections(page: Path) -> Iterator[Section]:
    """The parts of a page, from a heading or a comment on sources to the next."""
    raw = GENERATED.sub(_blank, page.read_text(encoding="utf-8"))
    text = re.sub(r"^( *)```.*?^\1```", _blank, raw, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", _blank, text)
    rows = list(zip(text.splitlines(), raw.splitlines(), strict=True))
    starts = [i for i, (row, _) in enumerate(rows) if row.startswith("#") or SOURCE.search(row)]
    for start, end in zip([0, *starts], [*starts, len(rows)], strict=True):
        named = SOURCE.search(rows[start][0]) if rows else None
        files, *computed = (part.strip() for part in named[1].split(";")) if named else ("",)
        own, whole = ("\n".join(row[i] for row in rows[start + bool(named) : end]) for i in (0, 1))
        yield Section(start + 1, own, whole, tuple(files.split()), tuple(computed))


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def measured(text: str) -> Iterator[tuple[str, str]]:
    """Each number of a text that somebody measured or counted, and its unit."""
    for found in MEASURED.finditer(re.sub(r"<!--.*?-->", "", text)):
        value, unit = found["value"], found["unit"] or ""
        if value and (unit or "," in value or re.search(r"\.\d", value)):
            yield value, unit


@cache
def numbers_in(source: str) -> tuple[float, ...]:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith("records.jsonl"):
        return tuple(_over_seeds([json.loads(line) for line in text.splitlines()]))
    return tuple(_leaves(json.loads(text)) if source.endswith(".json") else _numbers(text))


def _over_seeds(records: list[dict[str, Any]]) -> Iterator[float]:
    """Mean and deviation of every number of the records of one configuration but for its seed."""
    configurations: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kind = json.dumps({key: value for key, value in record["config"].items() if key != "seed"}, sort_keys=True)
        configurations.setdefault(kind, []).append(record)
    for own in configurations.values():
        flat = [_flat(record) for record in own]
        for name in flat[0]:
            values = [record[name] for record in flat if name in record]
            if len(values) == len(own) > 1:
                yield from (mean(values), stdev(values))


def _flat(record: dict[str, Any]) -> dict[str, float]:
    groups = {"": record} | {key: value for key, value in record.items() if isinstance(value, dict)}
    pairs = ((f"{group}.{key}", value) for group, own in groups.items() for key, value in own.items())
    return {name: value for name, value in pairs if isinstance(value, int | float)}


def _numbers(text: str) -> Iterator[float]:
    yield from (float(re.sub("[,_]", "", value)) for value in re.findall(rf"(?<![\w.]){NUMBER}", text) if value)


def _leaves(found: object) -> Iterator[float]:
    if isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _leaves(one)
    elif isinstance(found, int | float):
        yield float(found)
    elif isinstance(found, str):
        yield from _numbers(found)


def stands_in(value: str, unit: str, pool: Iterable[float]) -> bool:
    """Whether a number of the pool is this one as the page rounds it, in the page's unit or in its base unit."""
    mantissa, _, exponent = value.replace(",", "").partition("e")
    half = 0.5000001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    shown, scales = float(value.replace(",", "")), {1, UNITS.get(unit, 1)}
    return any(math.isfinite(x) and abs(abs(x) * scale - shown) <= half for x in pool for scale in scales)


def value_of(tree: ast.expr, pool: tuple[float, ...]) -> float:
    """A computation; its numbers stand in the pool, but for those that nobody measured."""
    if isinstance(tree, ast.BinOp):
        return OPERATORS[type(tree.op)](value_of(tree.left, pool), value_of(tree.right, pool))
    assert isinstance(tree, ast.Constant)
    assert tree.value in PLAIN or stands_in(str(tree.value), "", pool), f"{tree.value} stands in no source"
    return float(tree.value)


def without_source(section: Section) -> list[str]:
    """The numbers of a part that stand in none of its files."""
    pool = tuple(x for source in section.sources for x in numbers_in(source))
    for computation in section.computed:
        shown, _, expression = computation.partition("=")
        value = value_of(ast.parse(expression.strip(), mode="eval").body, pool)
        assert stands_in(shown.strip(), "", (value,)), f"{computation}: it is {value}"
        pool += (float(shown.replace(",", "")),)
    return [f"{value} {unit}".strip() for value, unit in measured(section.text) if not stands_in(value, unit, pool)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_number_stands_in_a_file_that_the_page_names(page: Path) -> None:
    wrong = [f"{page.name}:{one.line} {number}" for one in sections(page) for number in without_source(one)]
    assert not wrong, "\n".join(wrong)


def claiming_blocks() -> Iterator[tuple[str, str]]:
    """Generated blocks, and parts whose numbers are of campaigns."""
    for page in PAGES:
        for block in GENERATED.finditer(page.read_text(encoding="utf-8")):
            yield f"{page.name}, {block[1]}", block[0]
        for one in sections(page):
            if any(source.startswith("lab/results/") for source in one.sources):
                yield f"{page.name}:{one.line}", one.raw


def test_a_claim_says_of_how_many_runs_it_is_how_sure_and_of_what() -> None:
    lacking = [
        f"{where}: {word[0]!r} without {what}"
        for where, block in claiming_blocks()
        if (word := CLAIM.search(block)) and any(measured(block))
        for what, said in NEEDED.items()
        if not re.search(said, block)
    ]
    assert not lacking, "\n".join(lacking)


def test_a_number_without_a_source_and_a_wrong_one_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    table = "lab/results/frontier/report/tables/one-basis-loss.md"
    page.write_text(
        "# A\nLoss 2.31 at `0.1`, rank 16.\n"
        f"<!-- source: {table}; 0.21 = 2.110 - 1.896 -->\n2.110, 2.11, 0.21; 2.112; 7 %\n"
    )
    _, bare, named = sections(page)
    assert without_source(bare) == ["2.31"]
    assert without_source(named) == ["2.112", "7 %"]
