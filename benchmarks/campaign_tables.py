"""Tables from the records of campaigns: runs grouped by method and rate, means, and differences paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from frozencore.tune.record import StabilityRecord, TunedRecord
from frozencore_lab.reports.statistics import Scored, adjusted, paired_difference, scored
from harness import table

Runs = Sequence[Any]
"""Records of the runs of a method, or of any."""
Column = Callable[[Runs], str] | str
"""A function of a method's runs, or the key of a score whose difference from a reference's is shown."""
NAMES = {
    "fcca": "FCCA", "rawgrad": "RawGrad", "signgrad": "SignGrad", "filora": "FiLoRA", "eva": "EVA", "milora": "MiLoRA",
    "lora_xs": "LoRA-XS", "vera": "VeRA's bases", "random": "Random", "lora": "LoRA", "dora": "DoRA",
    "pissa": "PiSSA", "full": "full fine-tuning",
}  # fmt: skip
DEFAULTS = {
    "whiten": "both", "damping": 1e-3, "coordinates": "fisher", "rank": 16, "alpha": "auto", "targets": None,
    "fisher": "diagonal", "shrinkage": 0.0, "calibration_task": None, "calibration_size": 128, "dtype": "bfloat16",
}  # fmt: skip
"""What the ablations change, in the order of their lines, and FCCA's defaults."""


def grouped(runs: Runs, by: Callable[[Any], Hashable]) -> dict[Any, Runs]:
    found: dict[Hashable, list[Any]] = {}
    for run in runs:
        found.setdefault(by(run), []).append(run)
    return dict(found)


def named(run: TunedRecord) -> str:
    """The method as a table names it, with its rank (of a core if it is not 16) and its layers."""
    config, name = run.config.content(), NAMES[run.method]
    rank = config.get("rank", 16)
    if run.method in ("lora", "dora", "pissa") or rank != 16:
        name += f", r = {rank}"
    return f"{name}, all linear layers" if config.get("targets") == "all-linear" else name


def spread(values: Sequence[float], digits: int, times: float = 1.0) -> str:
    """The mean and the standard deviation."""
    return f"{times * fmean(values):.{digits}f} ± {times * stdev(values):.{digits}f}"


def mean(runs: Runs, key: str) -> float:
    return fmean(getattr(run, key) for run in runs)


def shows(key: str, digits: int, times: float = 1.0) -> Callable[[Runs], str]:
    return lambda runs: spread([getattr(run, key) for run in runs], digits, times)


accuracy, loss, risen = shows("accuracy", 1, 100), shows("held_out_loss", 3), shows("forgotten", 2)


def values(runs: Runs) -> str:
    return f"{runs[0].num_trainable:,}"


def rate(runs: Runs) -> str:
    return f"{runs[0].resolved.recipe['learning_rate']:g}"


def scores_by_row(runs: Runs, key: str) -> list[Scored]:
    """The scores of runs by row, where the records hold them."""
    return [found for one in runs if (found := scored(one, key)) is not None]


def differences(pairs: Iterable[tuple[Runs, Runs]], *keys: str) -> list[list[str]]:
    """Each pair's first minus second, a column for each key, with degrees of freedom.

    A star marks p < .05 after Holm over all pairs and columns.
    """
    pairs = list(pairs)
    found = adjusted(
        [paired_difference(*(scores_by_row(runs, key) for runs in pair)) for key in keys for pair in pairs]
    )
    stars = ["" if one.holm is None or one.holm >= 0.05 else " *" for one in found]
    cells = [
        f"{one.mean:+.3f} ± {one.half:.3f}{star}" + ("" if one.freedom is None else f" [{one.freedom:.0f}]")
        for one, star in zip(found, stars, strict=True)
    ]
    return [cells[column * len(pairs) : (column + 1) * len(pairs)] for column in range(len(keys))]


def rows_of(methods: Mapping[str, Runs], reference: Runs, columns: Collection[Column]) -> dict[str, list[str]]:
    """The cells of each method; the reference has no difference from itself."""
    others = {name: runs for name, runs in methods.items() if runs is not reference}
    keys = [column for column in columns if isinstance(column, str)]
    less = iter(differences([(runs, reference) for runs in others.values()], *keys))
    rows: dict[str, list[str]] = {name: [] for name in methods}
    for column in columns:
        if isinstance(column, str):
            cells = dict(zip(others, next(less), strict=True))
        else:
            cells = {name: column(runs) for name, runs in methods.items()}
        for name, row in rows.items():
            row.append(cells.get(name, ""))
    return rows


def beside(
    first: str, methods: Mapping[str, Runs], reference: Runs, columns: Mapping[str, Column], *rows: list[str]
) -> str:
    """A table of methods; ``rows`` come before them."""
    cells = rows_of(methods, reference, columns.values())
    return table([first, *columns], [*rows, *([name, *own] for name, own in cells.items())])


# ----------------------------------------------------------------------------------------------------------- the blocks


def by_loss(methods: Mapping[str, Runs]) -> dict[str, Runs]:
    """The methods, the lowest mean loss first."""
    return dict(sorted(methods.items(), key=lambda item: mean(item[1], "held_out_loss")))


def by_values(methods: Mapping[str, Runs]) -> dict[str, Runs]:
    """The methods, the fewest trained values first."""
    return dict(sorted(methods.items(), key=lambda item: item[1][0].num_trainable))


def in_order(order: Callable[[Mapping[str, Runs]], Mapping[str, Runs]], runs: Runs) -> str:
    return of_task(order(grouped(runs, named)))


def of_task(methods: Mapping[str, Runs]) -> str:
    """A task's table: the base model, then the methods in their order."""
    fcca = methods["FCCA"]
    before = f"{100 * mean(fcca, 'accuracy_before'):.1f}", f"{mean(fcca, 'held_out_loss_before'):.3f}"
    columns = {
        "learning rate": rate, "values": values, "accuracy, %": accuracy, "held-out loss": loss,
        "minus FCCA's": "held_out_loss", "rise on other texts": risen, "rise minus FCCA's": "forgotten",
    }  # fmt: skip
    return beside("method", methods, fcca, columns, ["base model", "", "", *before, "", "", ""])


def by_rate(*campaigns: Runs) -> dict[str, dict[str, Runs]]:
    """The runs of the seeds that all campaigns have, by method and learning rate; a run that two have counts once."""
    seeds = set.intersection(*({run.seed for run in runs} for runs in campaigns))
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for run in (run for runs in campaigns for run in runs if run.seed in seeds):
        found.setdefault(named(run), {}).setdefault(rate([run]), {}).setdefault(run.seed, run)
    return {
        name: {one: [own[one][seed] for seed in sorted(seeds)] for one in sorted(own, key=float)}
        for name, own in found.items()
    }


def at_rates(reference: str, names: Sequence[str], *campaigns: Runs) -> str:
    """Loss against forgetting: methods at the rates of several campaigns, beside FCCA at one rate."""
    found = by_rate(*campaigns)
    methods = {f"{name}, {one}": runs for name in ("FCCA", *names) for one, runs in found[name].items()}
    return of_task(by_loss({"FCCA": methods.pop(f"FCCA, {reference}"), **methods}))


def as_core(name: str) -> str:
    """The name of a shape where all constructors are FCCA."""
    return name.replace("FCCA, all", "core, r = 16, all").replace("FCCA", "core")


EQUAL_VALUES = (
    ("FCCA, r = 32", "LoRA, r = 1"),
    ("FCCA, r = 32, all linear layers", "LoRA, r = 2"),
    ("FCCA, r = 64", "LoRA, r = 4"),
)


def at_equal_values(runs: Runs) -> str:
    """Cores beside LoRAs of about as many trained values: the differences, LoRA's minus the core's."""
    found = grouped(runs, named)
    sides = ([f"{as_core(name)}: {values(found[name])}" for name in pair] for pair in EQUAL_VALUES)
    pairs = [(found[lora], found[core]) for core, lora in EQUAL_VALUES]
    losses, rises = differences(pairs, "held_out_loss", "forgotten")
    rows = [[*pair, loss, rise] for pair, loss, rise in zip(sides, losses, rises, strict=True)]
    return table(["core: values", "LoRA: values", "held-out loss", "rise on other texts"], rows)


def one_rate(paper: Runs, seeds: Runs) -> str:
    """Constructors in orthonormal coordinates at one rate for all, beside rates of their own: losses less FCCA's.

    The runs of ``smollm2-seeds`` have the rates of their own, Fisher coordinates and the default scale.
    """
    found, used = grouped(paper, lambda run: rate([run])), {run.seed for run in paper}
    rates = {one: grouped(found[one], named) for one in sorted(found, key=float)}
    rates["their own"] = grouped([run for run in seeds if run.seed in used], named)
    names = [name for name in NAMES.values() if name in grouped(paper, named)]
    rows: dict[str, list[str]] = {name: [name] for name in names}
    columns = {
        "accuracy, %": lambda runs: f"{100 * mean(runs, 'accuracy'):.1f}",
        "held-out loss": loss,
        "minus FCCA's": "held_out_loss",
    }
    for methods in rates.values():
        shown = {name: methods[name] for name in names if name in methods}
        cells = rows_of(shown, methods["FCCA"], columns.values())
        for name in names:
            rows[name] += cells.get(name, ["", "not run", ""])
    accuracies, *others = columns
    heads = [text for one in rates for text in (f"{one}: {accuracies}", *others)]
    return table(["learning rate", *heads], rows.values())


def ablations(runs: Runs) -> str:
    """FCCA with one option changed: losses beside those of the default, a line a change."""

    def changes(run: TunedRecord) -> tuple[tuple[str, str], ...]:
        config = run.config.content()
        options = {**config, **config["core"], **config["calibration"]}
        return tuple((name, shown(options[name])) for name in DEFAULTS if options[name] != DEFAULTS[name])

    found, names = grouped([run for run in runs if isinstance(run, TunedRecord)], changes), list(DEFAULTS)
    default = found.pop(())
    changed = sorted(found.items(), key=lambda one: [(names.index(name), len(value), value) for name, value in one[0]])
    texts = (", ".join(f"{name} {value}" for name, value in of).replace("alpha none", "scale 1") for of, _ in changed)
    methods = {"default": default, **dict(zip(texts, (own for _, own in changed), strict=True))}
    columns = {"values": values, "accuracy, %": accuracy, "held-out loss": loss, "minus the default's": "held_out_loss"}
    return beside("changed", methods, default, columns)


def shown(value: object) -> str:
    if isinstance(value, list):
        return "/".join(name.removesuffix("_proj") for name in value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def outliers(runs: Runs) -> str:
    """Held-out losses of two constructors on a model whose channels are rescaled more and more, each at its best."""
    spreads = sorted(grouped(runs, lambda run: run.config.model.rpartition("-")[2]).items())
    both = [(grouped(of, named)["FCCA"], grouped(of, named)["RawGrad"]) for _, of in spreads]
    (less,) = differences([(rawgrad, fcca) for fcca, rawgrad in both], "held_out_loss")
    rows = [
        [name, *(f"{loss(own)} at {rate(own)}" for own in of), apart]
        for (name, _), of, apart in zip(spreads, both, less, strict=True)
    ]
    return table(["spread", "FCCA: loss, learning rate", "RawGrad: loss, learning rate", "RawGrad minus FCCA"], rows)


def stability(runs: Runs) -> str:
    """Mean cosines of the principal angles between bases of few and of many calibration rows, by the number of few."""
    found = grouped([run for run in runs if isinstance(run, StabilityRecord)], lambda run: run.num_calibration["basis"])
    rows = [[str(size), *(shows(f"cosine_{side}", 3)(found[size]) for side in "PQ")] for size in sorted(found)]
    return table(["calibration rows", "P", "Q"], rows)
