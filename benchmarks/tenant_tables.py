"""What the lines of the studies of tenants say: arms, differences with intervals, tables, a picture of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

import figures
from harness import Record, table, with_range
from tenant_rows import QUICK_TENANTS, TENANTS

DRAWS = 10_000  # of the bootstrap
MEASURES = {"accuracy": (100.0, 1), "loss": (1.0, 3)}
"""The factor and the digits with which a table shows a measure."""
Arm = tuple[str, int]
"""The name of an arm and its rank."""
Lines = Mapping[str, Sequence[Record]]
"""An arm's lines by tenant, one for each seed."""
Groups = Mapping[str, Sequence[tuple[str, str, int]]]
"""Arms (label, arm, rank) that are compared with the first of their group, on the tenants that all of them have."""


def arms_of(*files: Iterable[Record]) -> dict[Arm, Lines]:
    """Final lines by arm and tenant, one for each seed that has the most tenants; the base model is an arm of rank 0.

    Where rates were compared, the lines are those of the best rate on validation rows, among rates with most lines.
    """
    found: dict[Arm, dict[float | None, dict[int, dict[str, Record]]]] = {}
    for line in (line for file in files for line in file if line["phase"] in ("base", "final")):
        rates = found.setdefault((line.get("arm", "base"), line.get("rank", 0)), {})
        rates.setdefault(line.get("learning_rate"), {}).setdefault(line.get("seed", 42), {})[line["tenant"]] = line
    arms = {}
    for arm, rates in found.items():
        by_rate = []
        for seeds in rates.values():
            most = max(map(len, seeds.values()))
            whole = [of for _, of in sorted(seeds.items()) if len(of) == most]
            by_rate.append({name: [of[name] for of in whole] for name in TENANTS | QUICK_TENANTS if name in whole[0]})
        most = max(map(len, by_rate))
        arms[arm] = min((of for of in by_rate if len(of) == most), key=validated)
    return arms


def validated(arm: Lines) -> float:
    return fmean(line.get("validation_loss", 0.0) for own in arm.values() for line in own)


def values_of(arm: Lines, names: Sequence[str], measure: str) -> NDArray[np.float64]:
    """(tenants, seeds), accuracies in per cent."""
    return MEASURES[measure][0] * np.array([[line[measure] for line in arm[name]] for name in names])


def with_interval(found: NDArray[np.float64], sources: Sequence[str]) -> tuple[float, float, float]:
    """The mean over tenants and seeds, and its 95 % interval.

    Tenants of one data set are alike, so each draw takes data sets with replacement, then as many tenants of each as it
    has, and seeds for all of them.

    Args:
        found: (tenants, seeds).
        sources: The data set of each tenant.
    """
    draw, num_seeds = np.random.default_rng(0), found.shape[1]
    members = [[i for i, source in enumerate(sources) if source == one] for one in dict.fromkeys(sources)]
    seeds = draw.integers(num_seeds, size=(DRAWS, num_seeds))
    by_tenant = found[:, seeds].mean(axis=2).T  # (draws, tenants)
    sums, counts = np.zeros(DRAWS), np.zeros(DRAWS)
    for drawn in draw.integers(len(members), size=(len(members), DRAWS)):
        for source, own in enumerate(members):
            taken = np.flatnonzero(drawn == source)
            tenants = np.array(own)[draw.integers(len(own), size=(len(taken), len(own)))]
            sums[taken] += by_tenant[taken[:, None], tenants].sum(axis=1)
            counts[taken] += len(own)
    low, high = np.quantile(sums / counts, [0.025, 0.975])
    return float(found.mean()), float(low), float(high)


def apart(arm: Lines, first: Lines, names: Sequence[str], measure: str) -> tuple[float, float, float]:
    """The mean difference and its interval."""
    found = values_of(arm, names, measure) - values_of(first, names, measure)
    return with_interval(found, [(TENANTS | QUICK_TENANTS)[name].task for name in names])


def less(arm: Lines, first: Lines, names: Sequence[str], measure: str) -> str:
    """The same for a table."""
    return with_range(apart(arm, first, names, measure), f"+.{MEASURES[measure][1]}f")


def groups_table(arms: Mapping[Arm, Lines], groups: Groups, more: str, cell: Callable[[Sequence[Record]], str]) -> str:
    """Every group of which at least two arms are there.

    Args:
        more: The heading of one more column.
        cell: Its text for an arm's lines.
    """
    rows = []
    for group, members in groups.items():
        here = [(label, arms[arm, rank]) for label, arm, rank in members if (arm, rank) in arms]
        names = [name for name in here[0][1] if all(name in of for _, of in here)] if here else []
        if len(here) < 2 or len(names) < 2 or members[0][1:] not in arms:
            continue
        first = here[0][1]
        for label, of in here:
            cells = []
            for measure, (_, digits) in MEASURES.items():
                cells.append(f"{values_of(of, names, measure).mean():.{digits}f}")
                cells.append("" if of is first else less(of, first, names, measure))
            shown = cell([line for name in names for line in of[name]])
            rows.append([f"{group}: {label}" if of is first else label, str(len(names)), shown, *cells])
    heads = ["each tenant has", "n", more, "accuracy, %", "minus first", "loss", "minus first"]
    return table(heads, rows) if rows else "Not measured yet.\n"


# ----------------------------------------------------------------------------------------------------------- the tables

LABELS = {"own": "its own basis", "pooled": "one basis of the rows of 16 tenants", "lora": "a LoRA"}
SHARING: Sequence[tuple[str, str, int]] = [
    *((f"{LABELS[arm]}, r = {rank}", arm, rank) for arm, rank in (("own", 16), ("own", 8), ("own", 32))),
    *((f"{LABELS['pooled']}, r = {rank}", "pooled", rank) for rank in (8, 16, 32)),
    *((f"{LABELS['lora']}, r = {rank}", "lora", rank) for rank in (1, 16)),
    ("the base model", "base", 0),
]
OWN, POOLED = ("its own basis, r = 16", "own", 16), ("one FCCA of the rows of 16 tenants, r = 16", "pooled", 16)
OTHERS: Sequence[tuple[str, str, int]] = [
    ("RawGrad of these rows, r = 16", "rawgrad", 16),
    ("LoRA-XS, r = 16", "lora_xs", 16),
    ("Random, r = 16", "random", 16),
    ("FCCA, r = 64, of which each trains 256 entries a layer", "entries", 64),
]
STARTS = {
    "zero": "zero", "mean": "the mean of 16 cores", "weighted": "their mean weighted by likeness",
    "nearest": "the nearest core",
}  # fmt: skip
STARTED: Groups = {
    "eight newcomers": [(label, f"start {start}", 16) for start, label in STARTS.items()],
    "with a quarter of their rows": [(label, f"start {start}, a quarter", 16) for start, label in STARTS.items()],
    "LoRA, r = 16": [
        ("as usual", "lora, start zero", 16),
        ("the mean product of 16 LoRAs, cut to r = 16", "lora, start mean", 16),
    ],
}
COMPRESSED: Groups = {
    "cores on own bases, of 16 tenants": [
        ("their own basis, r = 16", "own", 16),
        ("compressed, r = 16", "own, learned", 16),
        ("compressed, r = 32", "own, learned", 32),
        ("compressed, r = 16, trained on for an epoch", "own, learned, trained on", 16),
    ],
    "newcomers": [
        ("their own basis, r = 16", "own", 16),
        ("one FCCA of the rows of 16 tenants, r = 16", "newcomers, pooled", 16),
        ("learned from the cores of 16 tenants, r = 16", "newcomers, learned", 16),
        ("learned from the cores of 16 tenants, r = 32", "newcomers, learned", 32),
    ],
    "LoRAs of r = 16, every other tenant": [
        ("the LoRA", "lora", 16),
        ("compressed, r = 16", "lora, compressed", 16),
        ("compressed, r = 32", "lora, compressed", 32),
        ("the mean core for everybody, r = 16", "lora, mean", 16),
    ],
    "LoRAs of r = 16, all tenants": [
        ("the LoRA", "lora", 16),
        *((f"compressed, r = {rank}", "lora of all, compressed", rank) for rank in (16, 32, 64)),
    ],
    "LoRAs of r = 16, on a basis of 16 others": [
        ("the LoRA", "lora", 16),
        ("put on it, r = 16", "lora, others", 16),
    ],
    "LoRAs of r = 1, all tenants": [
        ("the LoRA", "lora", 1),
        *((f"compressed, r = {rank}", "lora 1, compressed", rank) for rank in (16, 32, 64)),
    ],
}
ONE_SEED: Groups = {
    f"LoRAs of r = {own}, all from one random start": [
        ("the LoRA", "lora, one seed", own),
        *((f"compressed, r = {rank}", f"lora of rank {own}, one seed, compressed", rank) for rank in (16, 32, 64)),
    ]
    for own in (16, 1)
}


def of_newcomers(arms: Mapping[Arm, Lines]) -> dict[Arm, Lines]:
    """The lines of tenants that took no part in calibration."""
    return {arm: {name: own for name, own in of.items() if not TENANTS[name].calibrated} for arm, of in arms.items()}


def sharing_table(who: str, lines: Sequence[Record]) -> str:
    """Own and shared bases and LoRAs for ``all`` tenants, or for ``newcomers``, which took no part in calibration."""
    arms = arms_of(lines)

    def size(of: Sequence[Record]) -> str:
        return f"{len({line['seed'] for line in of})}: {of[0]['disk_bytes']:,}" if "disk_bytes" in of[0] else ""

    return groups_table(arms if who == "all" else of_newcomers(arms), {who: SHARING}, "seeds: bytes on disk", size)


def bases_table(who: str, *files: Sequence[Record]) -> str:
    """Shared bases for ``all`` tenants, beside own ones, or for ``newcomers``, beside the pooled one."""
    arms = arms_of(*files)
    if who == "newcomers":
        arms = of_newcomers(arms | {("pooled", 16): arms.get(("newcomers, pooled", 16), {})})
        group, members = "8 newcomers", [POOLED, *OTHERS]
    else:
        arms = {arm: of for arm, of in arms.items() if len(of) == len(TENANTS)}
        group, members = "24 tenants", [OWN, POOLED, *OTHERS]
    return groups_table(arms, {group: members}, "values: bytes", _values_and_bytes)


def _values_and_bytes(of: Sequence[Record]) -> str:
    return next((f"{line['values']:,}: {line['memory_bytes']:,}" for line in of if "values" in line), "")


def starts_table(lines: Sequence[Record]) -> str:
    return groups_table(arms_of(lines), STARTED, "learning rate", lambda of: f"{of[0]['learning_rate']:g}")


def compress_table(groups: Groups, lines: Sequence[Record]) -> str:
    """Every group, with the shares kept."""

    def kept(own: Sequence[Record]) -> str:
        shares = [line["kept"] for line in own if "kept" in line]
        return f"{fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if shares else ""

    return groups_table(arms_of(lines), groups, "share kept", kept)


def kept_table(lines: Sequence[Record]) -> str:
    """The share kept by number of LoRAs and rank."""
    found = {(int(line["tenant"]), line["rank"]): line for line in lines if line["phase"] == "kept"}
    numbers, ranks = (sorted({key[side] for key in found}) for side in (0, 1))
    rows = [
        [f"{number} LoRAs", *(f"{found[number, r]['kept']:.0%} ({found[number, r]['least']:.0%})" for r in ranks)]
        for number in numbers
    ]
    return table(["share kept, mean (least)", *(f"r = {rank}" for rank in ranks)], rows)


# ---------------------------------------------------------------------------------------------------------- the picture

SHOWN = {
    ("LoRA", figures.NAVY): [("r = 1", "lora", 1), ("r = 16", "lora", 16)],
    ("core, its own basis", figures.GREY): [("r = 16", "own", 16)],
    ("core, shared basis", figures.ORANGE): [(f"r = {rank}", "pooled", rank) for rank in (8, 16, 32)],
}
"""Points (name, arm, rank) by label and colour of their kind."""


def losses_picture(sharing: Sequence[Record]) -> str:
    """The mean held-out loss of all tenants against the bytes of a tenant on disk; the shared basis is not counted.

    An interval is that of the difference from the core of rank 16 on the shared basis.
    """
    arms = arms_of(sharing)
    everyone, first = list(arms["pooled", 16]), arms["pooled", 16]

    def place(name: str, arm: Arm) -> tuple[float, str, figures.Point]:
        value = values_of(arms[arm], everyone, "loss").mean()
        middle, low, high = apart(arms[arm], first, everyone, "loss")
        point = figures.Point(value, value + low - middle, value + high - middle)
        return arms[arm][everyone[0]][0]["disk_bytes"], name, point

    kinds = [
        figures.Kind(label, colour, [place(name, (arm, rank)) for name, arm, rank in members])
        for (label, colour), members in SHOWN.items()
    ]
    about = "The mean held-out loss of 24 tenants against the bytes of a tenant; the numbers are in the table."
    note = [
        "SmolLM2-135M-Instruct, mean of 24 tenants and three seeds. Lower and to the left is better.",
        "Bars: 95 % intervals of the difference from the shared core of r = 16; they resample data sets and tenants.",
    ]
    title = "Beside the basis, sixty times fewer bytes than a LoRA of rank 16; in loss we found no difference"
    panels = [("held-out loss, nats a token", kinds)]
    return figures.planes(panels, "bytes of a tenant on disk", title, about, note, of_bytes=True)
