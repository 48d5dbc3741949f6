"""The tables and the picture of ``datasets_quality.py``: differences of two arms, means of arms, each data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np

import figures
from datasets_quality import ALL_LINEAR, ARMS, BY_SET, LORA, LOWER, is_calibrated, is_newcomer
from frozencore_lab.reports.statistics import holm, signed_rank
from harness import Record, table, with_range
from tenant_tables import with_interval

TUNED, FIRST, MEASURED = ("tuned", 16), ("fcca", 16), ("measured", 16)
FCCA_ALL, LORA_ALL = (f"fcca{ALL_LINEAR}", 16), (f"lora{ALL_LINEAR}", 1)
CHOSEN_LORA, CHOSEN_SMALL, CHOSEN_FCCA = ("chosen", 16), ("chosen", 1), ("chosen_fcca", 16)


def every(_: str) -> bool:
    return True


Difference = tuple[str, tuple[str, int], tuple[str, int], Callable[[str], bool]]
DIFFERENCES: Sequence[Difference] = [
    ("own basis (of 16 rows) minus shared FCCA", ("own", 16), FIRST, every),
    ("shared FCCA minus LoRA, r = 1", FIRST, ("lora", 1), every),
    ("shared FCCA minus shared Random", FIRST, ("random", 16), every),
    ("later: own basis as of tune minus shared FCCA, newcomers to this", TUNED, FIRST, is_newcomer),
    ("later: the same, those whose rows made it too", TUNED, FIRST, is_calibrated),
    ("later: own basis minus shared FCCA, both at measured rates", TUNED, MEASURED, every),
    ("later: own basis as of tune minus LoRA, r = 16", TUNED, ("lora", 16), every),
    ("later: LoRA, r = 16, at the best of three rates each minus at one rate", CHOSEN_LORA, ("lora", 16), every),
    ("later: own basis as of tune minus LoRA, r = 16, at the best of three rates each", TUNED, CHOSEN_LORA, every),
    ("later: own basis as of tune minus shared FCCA, the best of three rates each", TUNED, CHOSEN_FCCA, every),
    ("later: shared FCCA minus LoRA, r = 16, both at the best of three rates each", CHOSEN_FCCA, CHOSEN_LORA, every),
    ("later: LoRA, r = 1, at the best of three rates each minus at one rate", CHOSEN_SMALL, ("lora", 1), every),
    ("later: shared FCCA minus LoRA, r = 1, both at the best of three rates each", CHOSEN_FCCA, CHOSEN_SMALL, every),
    ("later: shared FCCA, r = 32, minus LoRA, r = 1", ("fcca", 32), ("lora", 1), every),
    ("later: shared FCCA on all linear layers minus on attention", FCCA_ALL, FIRST, every),
    ("later: shared FCCA on all linear layers minus LoRA, r = 1", FCCA_ALL, ("lora", 1), every),
    ("later: shared FCCA minus LoRA, r = 1, both on all linear layers", FCCA_ALL, LORA_ALL, every),
    ("later: basis of compressed LoRAs minus shared FCCA, newcomers to both", ("compressed", 16), FIRST, is_newcomer),
    ("later: the same, those whose rows made both", ("compressed", 16), FIRST, is_calibrated),
    ("later: FCCA of every data set's gradient minus FCCA of their sum", ("joint", 16), FIRST, every),
]
"""The three that were set before the runs, then later ones: two arms, and the data sets that count."""
BESIDE: Sequence[Difference] = [
    ("own basis as of tune minus shared FCCA, both at measured rates", TUNED, MEASURED, every),
    ("shared FCCA at measured rates minus LoRA, r = 1", MEASURED, ("lora", 1), every),
]
AT_SMALL: Sequence[Difference] = [
    *BESIDE,
    ("shared FCCA at measured rates minus shared Random", MEASURED, ("random", 16), every),
]
AT_HALF: Sequence[Difference] = [
    *BESIDE,
    ("later: shared FCCA, r = 32, minus r = 16, both at measured rates", ("measured", 32), MEASURED, every),
    ("later: shared FCCA at half the measured rates minus at these", ("halved", 16), MEASURED, every),
]
AT_CODER: Sequence[Difference] = [
    ("shared FCCA at measured rates minus LoRA, r = 1, at .004", MEASURED, ("lora, at 0.004", 1), every),
    ("the same, at .002", MEASURED, ("lora, at 0.002", 1), every),
    ("shared FCCA at measured rates minus shared Random at .03", MEASURED, ("random, at 0.03", 16), every),
    ("the same, at .015", MEASURED, ("random, at 0.015", 16), every),
]
"""Those of the table by size: of SmolLM2, and of Qwen2.5-Coder with half a billion and with 1.5 billion parameters."""
EQUAL = {"loss": 0.03, "exact": 2.0}
DIGITS = {"loss": 3, "exact": 1}
STAR = 0.05
ENOUGH = 12
"""How many data sets an arm needs for a mean beside those of others."""
NAMES = {
    "base": "the base model", "fcca": "one FCCA basis", "own": "its own basis of 16 rows", "lora": "a LoRA",
    "random": "one Random basis", "rawgrad": "one RawGrad basis", "eva": "one EVA basis",
    "lora_xs": "one LoRA-XS basis", "tuned": "its own basis, as of tune",
    "measured": "one FCCA basis, a measured rate each",
    "halved": "one FCCA basis, half of a measured rate each", "chosen": "a LoRA, the best of three rates each",
    "chosen_fcca": "one FCCA basis, the best of three rates each",
    "compressed": "one basis of compressed LoRAs", "joint": "one FCCA basis of every set's gradient",
    LOWER[0]: "its own basis of 16 rows at half the rate",
    FCCA_ALL[0]: "one FCCA basis, all linear layers", LORA_ALL[0]: "a LoRA, all linear layers",
}  # fmt: skip


def by_set(lines: Sequence[Record], arm: tuple[str, int], measure: str) -> dict[str, float]:
    """The mean over seeds of a measure, by data set."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["phase"] == "final" and (line["arm"], line["rank"]) == arm:
            found.setdefault(line["tenant"], []).append(line[measure])
    return {name: float(np.mean(values)) for name, values in found.items()}


def primary_table(lines: Sequence[Record]) -> str:
    """Differences of two arms on the data sets that both have, beside what counts as equal."""
    return _of_differences(_difference_rows(lines, DIFFERENCES))


def sizes_table(small: Sequence[Record], half: Sequence[Record], coder: Sequence[Record]) -> str:
    """Such differences of three models."""
    sizes = {"135M": (small, AT_SMALL), "0.5B": (half, AT_HALF), "1.5B": (coder, AT_CODER)}
    rows = [
        [f"{size}: {title}", *cells]
        for size, (lines, wanted) in sizes.items()
        for title, *cells in _difference_rows(lines, wanted)
    ]
    return _of_differences(rows)


def _of_differences(rows: list[list[str]]) -> str:
    heads = ["difference", "data sets", "loss", "equal within .03", "exact match, points", "equal within 2"]
    return table(heads, rows) if rows else "Not measured yet.\n"


def _difference_rows(lines: Sequence[Record], wanted: Sequence[Difference]) -> list[list[str]]:
    rows = []
    for title, one, other, counts in wanted:
        cells = []
        for measure, digits in DIGITS.items():
            every = apart(lines, one, other, measure)
            differences = {name: value for name, value in every.items() if counts(name)}
            if len(differences) < 2:
                break
            _, low, high = interval_of(differences)
            equal = "yes" if max(abs(low), abs(high)) <= EQUAL[measure] else "not shown"
            cells += [str(len(differences)), in_words(differences, digits), equal]
        else:
            rows.append([title, *cells[:3], *cells[4:]])
    return rows


def apart(lines: Sequence[Record], arm: tuple[str, int], first: tuple[str, int], measure: str) -> dict[str, float]:
    """An arm minus another by data set, for those that both have."""
    mine, theirs = by_set(lines, arm, measure), by_set(lines, first, measure)
    return {name: mine[name] - theirs[name] for name in sorted(mine.keys() & theirs.keys())}


def interval_of(differences: Mapping[str, float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval from resampling data sets."""
    return with_interval(np.array([[value] for value in differences.values()]), list(differences))


def in_words(differences: Mapping[str, float], digits: int) -> str:
    """The mean with its interval, as a table shows it."""
    return with_range(interval_of(differences), f"+.{digits}f")


def titled(arm: str, rank: int) -> str:
    return NAMES[arm] + f", r = {rank}" * (rank > 0)


def arms_table(lines: Sequence[Record]) -> str:
    """The mean of each arm over the data sets of all, and what it is above the shared FCCA on those of both.

    An arm that has few data sets so far has no mean.
    """
    arms = [arm for arm in (*ARMS, FCCA_ALL, LORA_ALL, LOWER) if len(by_set(lines, arm, "loss")) > 1]
    if FIRST not in arms:
        return "Not measured yet.\n"
    rates = {(line["arm"], line["rank"]): line["learning_rate"] for line in lines if line["phase"] == "final"}
    rows = []
    for arm, rank in arms:
        count, rate = len(by_set(lines, (arm, rank), "loss")), rates[arm, rank]
        shown = BY_SET.get(arm, "") if rate is None else f"{rate:g}"
        rows.append([titled(arm, rank), str(count), shown])
    whole = [found for arm in arms if arm != LOWER and len(found := set(by_set(lines, arm, "loss"))) >= ENOUGH]
    common = set.intersection(*whole) if whole else set()
    differences = {measure: [apart(lines, arm, FIRST, measure) for arm in arms] for measure in DIGITS}
    tests = [
        None if arm == FIRST else signed_rank([*of.values()])
        for measure in DIGITS
        for arm, of in zip(arms, differences[measure], strict=True)
    ]
    adjusted = iter(holm(tests))
    for measure, digits in DIGITS.items():
        for row, arm, of in zip(rows, arms, differences[measure], strict=True):
            values, p = by_set(lines, arm, measure), next(adjusted)
            has_mean = common and common <= values.keys()
            row.append(f"{np.mean([values[name] for name in common]):.{digits}f}" if has_mean else "")
            row.append("" if p is None else in_words(of, digits) + " *" * (p < STAR))
    heads = ["each data set has", "data sets", "learning rate"]
    of_all = f"of the {len(common)} of all"
    return table([*heads, f"loss {of_all}", "minus shared FCCA", f"exact match {of_all}, %", "minus shared FCCA"], rows)


EACH = (("base", 0), FIRST, TUNED, ("random", 16), ("lora", 1))
"""The arms of the table of each data set."""


def each_table(lines: Sequence[Record]) -> str:
    """Exact answers and loss of some arms on each data set that shared cores have; a star marks newcomers."""
    arms = [[by_set(lines, arm, measure) for measure in ("exact", "loss")] for arm in EACH]
    rows = []
    for name in sorted(by_set(lines, FIRST, "loss")):
        cells = (f"{exact[name]:.1f}, {loss[name]:.3f}" if name in loss else "" for exact, loss in arms)
        rows.append([name + " *" * is_newcomer(name), *cells])
    return table(["exact answers in %, loss", *(titled(*arm) for arm in EACH)], rows)


def cuts_table(lines: Sequence[Record]) -> str:
    """LoRAs as cores of one basis, and each cut alone, beside the LoRAs themselves on the same data sets."""
    whole, rows = ("lora", LORA), []
    found = {(line["arm"], line["rank"], line["sources"]): line for line in lines if line.get("sources")}
    for (arm, rank, sources), line in found.items():
        at, name = (arm, rank), arm.removeprefix(f"lora of {sources}, ")
        kept = fmean(by_set(lines, at, "kept").values())
        with_share = line["value_bytes"] + line["basis_bytes"] / sources
        cells = [f"{name}, r = {rank}", str(sources), f"{kept:.0%}", f"{line['value_bytes']:,}", f"{with_share:,.0f}"]
        for measure, digits in DIGITS.items():
            common = apart(lines, at, whole, measure)
            cells += [f"{fmean(by_set(lines, at, measure).values()):.{digits}f}", in_words(common, digits)]
        rows.append(cells)
    heads = ["each LoRA becomes", "LoRAs", "kept", "its bytes", "with its share of the basis"]
    return table([*heads, "loss", "minus LoRA", "exact match, %", "minus LoRA"], rows)


def picture(lines: Sequence[Record]) -> str:
    """The loss of each data set with the shared FCCA against that of each rival of the primary questions."""
    panels = []
    for other in (("tuned", 16), ("lora", 1), ("random", 16)):
        mine, theirs = by_set(lines, FIRST, "loss"), by_set(lines, other, "loss")
        places = [(theirs[name], mine[name]) for name in sorted(mine.keys() & theirs.keys())]
        panels.append((f"loss, {NAMES[other[0]]}, r = {other[1]}", places))
    about = "The held-out loss of each data set with a core on the shared FCCA basis against three rivals."
    note = [
        "Each point is a data set: nats a token with a core of r = 16 on one FCCA basis (height) and with the rival.",
        "SmolLM2-135M-Instruct. Below the line the shared core is better.",
    ]
    return figures.against(
        panels,
        "loss, shared FCCA, r = 16",
        "Shared, own or a LoRA: no difference in loss that we found. A random basis is worse.",
        about,
        note,
    )
