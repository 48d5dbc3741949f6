"""The cost of a shared basis in quality: tables and figure of the study of 24 tenants, from its lines.

Means are over tenants, and over the seeds in which an arm has every tenant. Differences are paired by tenant and seed.
Their 95 % intervals resample the tenants and the seeds: a resample holds the same seeds for all of its tenants, because
the tenants of a seed share a basis. An interval of one seed holds for that seed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, NullFormatter
from numpy.typing import NDArray
from scipy.stats import spearmanr

from harness import RESULTS, lines_of, table

LINES = RESULTS / "tenants-quality.jsonl"
MANIFEST = RESULTS / "tenants-quality" / "manifest.json"
Arm = tuple[str, int]
Record = Mapping[str, Any]
Measure = Literal["accuracy", "loss"]
Rows = NDArray[np.float64]
"""(tenants, seeds)."""

OWN, GROUPED, WIDE, MEAN = ("own", 16), ("grouped", 16), ("grouped", 32), ("mean", 16)
PROSE, WEIGHTS, RANDOM = ("generic", 16), ("weights", 16), ("random", 16)
GROUPS = "one basis, FCCA for groups"
NAMES: dict[Arm, str] = {
    OWN: "its own basis",
    GROUPED: GROUPS,
    MEAN: "one basis, FCCA of the mean",
    PROSE: "one basis, FCCA of plain prose",
    WEIGHTS: "one basis, LoRA-XS",
    RANDOM: "one random basis",
    ("lora", 1): "a LoRA, r = 1",
    ("lora", 16): "a LoRA, r = 16",
}
CORES = [arm for arm in NAMES if arm[0] != "lora"]
NO_DATA = ("weights", "random")
NUM_RESAMPLES, NUM_RANKINGS = 10_000, 2000
TIMES: dict[Measure, float] = {"accuracy": 100.0, "loss": 1.0}
DIGITS: dict[Measure, int] = {"accuracy": 1, "loss": 3}


def named(arm: Arm) -> str:
    return NAMES.get(arm) or f"{NAMES[arm[0], 16]}, r = {arm[1]}"


class Study:
    """The lines by arm, and the tenants as the manifest tells them."""

    def __init__(self, lines: Path = LINES, manifest: Path = MANIFEST) -> None:
        self.tenants: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))["tenants"]
        records = lines_of(lines)
        self.base = {record["tenant"]: record for record in records if record["phase"] == "base"}
        by_seed: dict[Arm, dict[int, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
        for record in records:
            if record["phase"] == "final":
                by_seed[record["arm"], record["rank"]][record["seed"]][record["tenant"]] = record
        whole = {
            arm: {seed: found for seed, found in sorted(seeds.items()) if found.keys() == self.tenants.keys()}
            for arm, seeds in by_seed.items()
        }
        order = [*NAMES, *sorted(by_seed.keys() - NAMES.keys(), key=lambda arm: (arm[1], arm[0]))]
        self.arms = {arm: whole[arm] for arm in order if whole.get(arm)}

    def names(self, calibrated: bool | None = None) -> list[str]:
        """The tenants: all, or those that took part in calibration, or the others."""
        return [name for name, one in self.tenants.items() if calibrated in (None, one["calibrated"])]

    def some(self, arm: Arm) -> Record:
        return next(iter(next(iter(self.arms[arm].values())).values()))

    def values(self, arm: Arm, measure: str, names: Sequence[str], seeds: Sequence[int] | None = None) -> Rows:
        found = self.arms[arm]
        return np.array([[found[seed][name][measure] for seed in seeds or found] for name in names])

    def common_seeds(self, one: Arm, other: Arm) -> list[int]:
        return [seed for seed in self.arms[one] if seed in self.arms[other]]

    def differences(self, arm: Arm, other: Arm, measure: Measure, names: Sequence[str]) -> Rows:
        """The arm's value minus the other's, of the seeds that both have."""
        seeds = self.common_seeds(arm, other)
        values, others = (self.values(one, measure, names, seeds) for one in (arm, other))
        return TIMES[measure] * (values - others)


@cache
def resampled(num_tenants: int, num_seeds: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The tenants that each resample holds, and its seeds, which are the same for all of its tenants."""
    draw = np.random.default_rng(0)
    tenants = draw.integers(num_tenants, size=(NUM_RESAMPLES, num_tenants))
    return tenants, draw.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))


def interval(values: Rows) -> tuple[float, float, float]:
    """The mean and its 95 % interval."""
    tenants, seeds = resampled(*values.shape)
    means = values[tenants[:, :, None], seeds[:, None, :]].mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def in_words(values: Rows, digits: int) -> str:
    return with_limits(*interval(values), digits)


def with_limits(middle: float, low: float, high: float, digits: int) -> str:
    return f"{middle:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def size_in_words(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} KB"


def mean_of(study: Study, arm: Arm, measure: Measure, names: Sequence[str]) -> str:
    return f"{TIMES[measure] * study.values(arm, measure, names).mean():.{DIGITS[measure]}f}"


def arms_table(study: Study, measure: Measure) -> str:
    """Each arm: its mean over the calibrated tenants and over the others, and the differences from own bases."""
    groups = [study.names(True), study.names(False)]
    before = (TIMES[measure] * fmean(study.base[name][measure] for name in names) for names in groups)
    rows = [["base model", "", "", *(f"{value:.{DIGITS[measure]}f}" for value in before), "", ""]]
    for arm, seeds in study.arms.items():
        means = [mean_of(study, arm, measure, names) for names in groups]
        apart = [apart_from_own(study, arm, measure, names) for names in groups]
        rows.append([named(arm), f"{study.some(arm)['learning_rate']:g}", str(len(seeds)), *means, *apart])
    what = {"accuracy": "accuracy, %", "loss": "loss, nats a token"}[measure]
    heads = [
        f"{what}; each tenant has",
        "learning rate",
        "seeds",
        f"{len(groups[0])} calibrated",
        f"{len(groups[1])} newcomers",
    ]
    return table([*heads, "calibrated, minus own", "newcomers, minus own"], rows)


def apart_from_own(study: Study, arm: Arm, measure: Measure, names: Sequence[str]) -> str:
    if arm == OWN or OWN not in study.arms:
        return ""
    return in_words(study.differences(arm, OWN, measure, names), DIGITS[measure])


def bytes_table(study: Study) -> str:
    """The bytes that each tenant adds, and the share of its moment that its basis holds."""
    rows = []
    for arm in study.arms:
        some = study.some(arm)
        sizes = [size_in_words(some[name]) for name in ("disk_bytes", "memory_bytes", "training_bytes")]
        share = "" if arm[0] == "lora" else f"{study.values(arm, 'share', study.names()).mean():.2f}"
        rows.append([named(arm), f"{some['values']:,}", *sizes, share])
    return table(["a tenant has", "values", "on disk", "in memory", "state held while training", "share held"], rows)


def tenants_table(study: Study) -> str:
    """Accuracy and loss of each tenant: in the arms that have a name, then in those of other ranks."""
    arms = [arm for arm in NAMES if arm in study.arms]
    rows = []
    for name, about in study.tenants.items():
        before = study.base[name]
        place = "" if about["calibrated"] else " (newcomer)"
        rows.append(
            [f"{name}{place}: {about['about']}", str(about["rows"]["train"]),
             f"{100 * before['accuracy']:.0f} / {before['loss']:.2f}", *scores(study, name, arms)]
        )  # fmt: skip
    whole = table(["tenant", "rows", "base model", *map(named, arms)], rows)
    more = [arm for arm in study.arms if arm not in NAMES]
    if not more:
        return whole
    others = table(["tenant", *map(named, more)], [[name, *scores(study, name, more)] for name in study.tenants])
    return f"{whole}\nThe same at other ranks:\n\n{others}"


def scores(study: Study, name: str, arms: Sequence[Arm]) -> list[str]:
    """A tenant's accuracy and loss in each arm."""
    means = ([study.values(arm, measure, [name]).mean() for measure in ("accuracy", "loss")] for arm in arms)
    return [f"{100 * accuracy:.0f} / {loss:.2f}" for accuracy, loss in means]


def bar(study: Study) -> str:
    """Sentences: how far a basis for groups is from own bases, and whether that reaches the goal."""
    if not {OWN, GROUPED} <= study.arms.keys():
        return "Own bases and a basis for groups are not measured yet.\n"
    num_seeds = len(study.common_seeds(OWN, GROUPED))
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    scored = sum(one["rows"]["held-out"] for one in study.tenants.values())
    said = [
        f"SmolLM2, {len(study.tenants)} tenants, {scored:,} held-out rows, {seeds}. The differences are those of the "
        "basis for groups at rank 16, with `95 %` intervals in brackets."
    ]
    for who, most, names in (
        ("All tenants", 0.5, study.names()),
        ("The newcomers", 1.0, study.names(False)),
    ):
        found = study.differences(GROUPED, OWN, "accuracy", names)
        word = "reached" if found.mean() >= -most else "missed"
        points = in_words(found, 1)
        said.append(f"- {who}: {points} points from own bases. The goal, at most {most:g} below, is {word}.")
    for other in (arm for arm in (MEAN, PROSE, WEIGHTS, RANDOM) if arm in study.arms):
        points, loss = (
            in_words(study.differences(GROUPED, other, measure, study.names()), DIGITS[measure]) for measure in DIGITS
        )
        basis = named(other).removeprefix("one basis, ")
        said.append(f"- All tenants: {points} points in accuracy and {loss} nats a token in the loss from {basis}.")
    return "\n".join([said[0], "", *said[1:]]) + "\n"


def grouped_table(study: Study) -> str:
    """The basis for groups at each rank: the differences over all tenants from own bases and from LoRAs."""
    measures: dict[Measure, str] = {"accuracy": "points", "loss": "nats a token"}
    rows = []
    for arm in sorted(arm for arm in study.arms if arm[0] == "grouped"):
        for measure, unit in measures.items():
            cells = [
                in_words(study.differences(arm, other, measure, study.names()), DIGITS[measure])
                if other in study.arms else ""
                for other in (OWN, ("own", arm[1]), ("lora", 1), ("lora", 16))
            ]  # fmt: skip
            rows.append([f"r = {arm[1]}: {measure}, {unit}", *cells])
    return table(
        [GROUPS, "minus own, r = 16", "minus own of its rank", "minus LoRA, r = 1", "minus LoRA, r = 16"], rows
    )


def correlation(study: Study) -> str:
    """The correlation of the shares that bases hold with losses: over the bases of each tenant, and over tenants."""
    arms = [arm for arm in CORES if arm in study.arms]
    if len(arms) < 4 or OWN not in arms:
        return "Too few bases are measured to compare shares with losses.\n"
    names = study.names()
    seeds = [seed for seed in study.arms[OWN] if all(seed in study.arms[arm] for arm in arms)]
    shares, losses = (
        np.stack([study.values(arm, measure, names, seeds) for arm in arms], axis=1) for measure in ("share", "loss")
    )
    rows = [[f"the {len(arms)} bases of a tenant, mean over the tenants", within_tenants(shares, losses)]]
    read_data = [place for place, arm in enumerate(arms) if arm[0] not in NO_DATA]
    if 2 < len(read_data) < len(arms):
        found = within_tenants(shares[:, read_data], losses[:, read_data])
        rows.append([f"those {len(read_data)} of them that read data", found])
    own = arms.index(OWN)
    for place, arm in enumerate(arms):
        if arm != OWN:
            of_own, dearer = shares[:, place] / shares[:, own], losses[:, place] - losses[:, own]
            rows.append([f"the {len(names)} tenants: {named(arm)}", rank_interval(of_own, dearer)])
    return table(["rank correlation of share and loss over", "ρ"], rows)


def within_tenants(shares: NDArray[np.float64], losses: NDArray[np.float64]) -> str:
    """The rank correlation of share and loss over the bases of a tenant, and its mean over the tenants.

    Shapes: (tenants, bases, seeds); shares and losses are means over the seeds that a resample holds.
    """

    @cache
    def of_each(seeds: tuple[int, ...]) -> NDArray[np.float64]:
        pairs = zip(shares[:, :, seeds].mean(axis=2), losses[:, :, seeds].mean(axis=2), strict=True)
        return np.array([spearmanr(share, loss)[0] for share, loss in pairs])

    num_tenants, _, num_seeds = shares.shape
    drawn = zip(*resampled(num_tenants, num_seeds), strict=True)
    means = [of_each(tuple(sorted(seeds.tolist())))[tenants].mean() for tenants, seeds in drawn]
    low, high = np.quantile(means, [0.025, 0.975])
    return with_limits(of_each(tuple(range(num_seeds))).mean(), low, high, 2)


def rank_interval(x: Rows, y: Rows) -> str:
    """The rank correlation over the tenants of two means over the seeds."""
    drawn = zip(*(some[:NUM_RANKINGS] for some in resampled(*x.shape)), strict=True)
    found = [
        spearmanr(x[np.ix_(tenants, seeds)].mean(axis=1), y[np.ix_(tenants, seeds)].mean(axis=1))[0]
        for tenants, seeds in drawn
    ]
    low, high = np.nanquantile(found, [0.025, 0.975])
    return with_limits(spearmanr(x.mean(axis=1), y.mean(axis=1))[0], low, high, 2)


def readme(study: Study) -> str:
    """One row each: own basis, shared at two ranks, LoRA of rank 1 and 16, the newcomers on the first three."""
    new = study.names(False)
    shown = [
        (OWN, named(OWN), study.names()),
        (GROUPED, named(GROUPED), study.names()),
        (WIDE, named(WIDE), study.names()),
        (("lora", 1), named(("lora", 1)), study.names()),
        (("lora", 16), named(("lora", 16)), study.names()),
        (OWN, f"the {len(new)} newcomers: {named(OWN)}", new),
        (GROUPED, f"the {len(new)} newcomers: {named(GROUPED)}", new),
        (WIDE, f"the {len(new)} newcomers: {named(WIDE)}", new),
    ]
    rows = []
    for arm, label, names in shown:
        if arm in study.arms:
            means = [mean_of(study, arm, measure, names) for measure in ("accuracy", "loss")]
            apart = [apart_from_own(study, arm, measure, names) for measure in ("accuracy", "loss")]
            size = f"{study.some(arm)['disk_bytes']:,}"
            rows.append([label, str(len(study.arms[arm])), means[0], apart[0], means[1], apart[1], size])
    before = [fmean(one[measure] for one in study.base.values()) for measure in ("accuracy", "loss")]
    rows.append(["base model", "", f"{100 * before[0]:.1f}", "", f"{before[1]:.3f}", "", ""])
    heads = ["each tenant has", "seeds", "accuracy, %", "minus own", "loss", "minus own", "bytes on disk"]
    return table(heads, rows)


def blocks(study: Study) -> dict[str, str]:
    """The generated blocks of docs/many-cores.md by name."""
    return {
        "tenants-quality": "\n".join(
            [bar(study), grouped_table(study), arms_table(study, "accuracy"), arms_table(study, "loss")]
        ),
        "tenants-quality-bytes": bytes_table(study),
        "tenants-quality-each": tenants_table(study),
        "tenants-quality-shares": correlation(study),
    }


def figure(study: Study, path: Path) -> None:
    """Mean accuracy and loss, with 95 % intervals of the difference from own bases, against bytes."""
    drawn, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for axis, measure in zip(axes, ("accuracy", "loss"), strict=True):
        drawn_at: Counter[str] = Counter()
        for arm in study.arms:
            size, y = study.some(arm)["disk_bytes"], TIMES[measure] * study.values(arm, measure, study.names()).mean()
            x = size * 1.15 ** drawn_at[size_in_words(size)]  # side by side
            drawn_at[size_in_words(size)] += 1
            around = None
            if arm != OWN and OWN in study.arms:
                middle, low, high = interval(study.differences(arm, OWN, measure, study.names()))
                around = [[middle - low], [high - middle]]
            fmt = "s" if arm[0] == "lora" else "o"
            colour = f"C{list(NAMES).index(arm if arm in NAMES else (arm[0], 16))}"
            axis.errorbar(
                [x], [y], yerr=around, fmt=fmt, color=colour, ms=3 + arm[1] ** 0.5, capsize=3, label=named(arm)
            )
        axis.set_xscale("log")
        axis.margins(x=0.1)
        axis.xaxis.set_major_formatter(EngFormatter("B"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("bytes of a tenant on disk (set apart where they are equal)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, mean over tenants, %")
    axes[1].set_ylabel("loss, nats per answer token")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    drawn.suptitle(
        "SmolLM2-135M-Instruct, 24 tenants; bars: 95 % interval of the difference from own bases of rank 16",
        fontsize=10,
    )
    drawn.savefig(path, dpi=160)
    plt.close(drawn)
