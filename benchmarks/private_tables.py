"""The cost of privacy on a real model: tables and figure of docs/private.md.

The records are those of private.py, private_moments.py and private_attack.py.

Means over trainings with their standard deviation. Trainings of two arms share no randomness, so the intervals of their
differences are Welch's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from scipy.stats import ttest_ind

from harness import RESULTS, Record, lines_of, table, with_quartiles
from quality_tables import TASKS, half_interval, spread

LINES = RESULTS / "private.jsonl"
OF_MOMENTS = RESULTS / "private_moments.jsonl"
OF_ATTACK = RESULTS / "private_attack.jsonl"
NAMES = {
    "public": "core, basis of public rows", "random": "core, random basis", "lora-1": "LoRA, r = 1",
    "lora-16": "LoRA, r = 16",
}  # fmt: skip
BASES = {
    "own": "the private rows, no privacy", "public": "public rows", "random": "random",
    "moments": "noisy G, a and d", "whitened": "noisy G in the public metric",
}  # fmt: skip


class Study:
    """The final lines of each task by arm and epsilon; those without an epsilon trained plainly."""

    def __init__(self, lines: Path = LINES) -> None:
        self.base: dict[str, Record] = {}
        self.finals: dict[str, dict[tuple[str, float | None], list[Record]]] = defaultdict(lambda: defaultdict(list))
        for record in lines_of(lines):
            if record["phase"] == "base":
                self.base[record["task"]] = record
            elif record["phase"] == "final":
                self.finals[record["task"]][record["arm"], record["epsilon"]].append(record)

    def epsilons(self, task: str) -> list[float | None]:
        """From none, which is no privacy, to the smallest."""
        found = {epsilon for _, epsilon in self.finals[task]}
        return sorted(found, key=lambda epsilon: -(epsilon or float("inf")))


def quality(study: Study) -> str:
    """Accuracy and loss of each arm at each epsilon, a table for each task."""
    return "\n".join(quality_of(study, task) for task in study.finals)


def quality_of(study: Study, task: str) -> str:
    found, epsilons = study.finals[task], study.epsilons(task)
    before = f"{100 * study.base[task]['accuracy']:.1f} / {study.base[task]['loss']:.3f}"
    rows = [["base model", "", "", *(before for _ in epsilons)]]
    for arm, name in NAMES.items():
        of_arm = [one for (of, _), several in found.items() if of == arm for one in several]
        if of_arm:
            private = next((one for one in of_arm if one["epsilon"]), None)
            options = f"{private['learning_rate']:g}, {private['clip']:g}" if private else ""
            cells = [in_cell(found[arm, epsilon]) for epsilon in epsilons]
            rows.append([name, f"{of_arm[0]['values']:,}", options, *cells])
    noise = {epsilon: several[0].get("noise_multiplier") for (_, epsilon), several in found.items() if several}
    said = ["not private" if epsilon is None else f"ε = {epsilon:g}, σ = {noise[epsilon]:.2f}" for epsilon in epsilons]
    return table([f"{TASKS[task]}: accuracy, % / loss", "values", "rate, clip (private)", *said], rows)


def in_cell(records: list[Record]) -> str:
    if not records:
        return ""
    parts = []
    for measure, times, digits in (("accuracy", 100.0, 1), ("loss", 1.0, 3)):
        values = [one[measure] for one in records]
        parts.append(spread(values, digits, times) if len(values) > 1 else f"{times * values[0]:.{digits}f}")
    return f"{' / '.join(parts)} (n = {len(records)})"


def apart(study: Study) -> str:
    """The loss of a core on public rows' basis minus that of the others, with 95 % intervals."""
    rows = []
    for task, epsilon, arm, mine, theirs in pairs(study):
        interval = ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
        middle = fmean(mine) - fmean(theirs)
        what = "not private" if epsilon is None else f"ε = {epsilon:g}"
        rows.append(
            [f"{TASKS[task]}, {what}: minus {NAMES[arm]}", f"{middle:+.3f}",
             f"{interval.low:+.3f} to {interval.high:+.3f}"]
        )  # fmt: skip
    return table([f"loss of the {NAMES['public']}", "difference", "95 % interval"], rows)


def pairs(study: Study) -> Iterator[tuple[str, float | None, str, list[float], list[float]]]:
    """Each task, epsilon and other arm with the losses of both, where both have two trainings at least."""
    for task, found in study.finals.items():
        for epsilon in study.epsilons(task):
            for arm in list(NAMES)[1:]:
                mine, theirs = ([one["loss"] for one in found[of, epsilon]] for of in ("public", arm))
                if min(len(mine), len(theirs)) > 1:
                    yield task, epsilon, arm, mine, theirs


def figure(study: Study, file: Path) -> None:
    """Held-out loss over epsilon, a line for each arm."""
    tasks = list(study.finals)
    rows, columns = math.ceil(len(tasks) / 2), min(len(tasks), 2)
    drawn, frames = plt.subplots(rows, columns, figsize=(7 * columns, 4 * rows), squeeze=False, layout="constrained")
    for task, frame in zip(tasks, frames.flat, strict=False):
        epsilons = study.epsilons(task)[::-1]
        for number, (arm, name) in enumerate(NAMES.items()):
            known = [epsilon for epsilon in epsilons if study.finals[task][arm, epsilon]]
            losses = [[one["loss"] for one in study.finals[task][arm, epsilon]] for epsilon in known]
            at = [epsilons.index(epsilon) + 0.06 * (number - 1.5) for epsilon in known]
            (line,) = frame.plot(at, [fmean(own) for own in losses], marker="o", label=name)
            for place, own in zip(at, losses, strict=True):
                frame.plot([place] * len(own), own, ".", color=line.get_color(), alpha=0.5)
        said = ["not private" if epsilon is None else f"{epsilon:g}" for epsilon in epsilons]
        frame.set_xticks(range(len(said)), said)
        frame.set_xlabel("ε (delta 1e-5)")
        frame.set_ylabel("held-out loss, nats a token")
        frame.set_title(f"SmolLM2 on {TASKS[task]}")
    for frame in frames.flat[len(tasks) :]:
        frame.remove()
    drawn.legend(
        *frames.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(NAMES), frameon=False
    )
    drawn.savefig(file, dpi=150)
    plt.close(drawn)


def per_example(found: Record) -> str:
    """A step with the gradients of all rows over a plain step, by setting and contestant."""
    settings: dict[str, dict[str, Record]] = defaultdict(dict)
    for row in found["rows"]:
        settings[f"{row['targets']}, {row['num_rows']} rows of {row['num_tokens']} tokens"][row["contestant"]] = row
    names = {"frozencore": "core, r = 16", "lora-r16": "LoRA, r = 16, Opacus", "lora-r1": "LoRA, r = 1, Opacus"}
    rows = [
        [setting, *(with_quartiles(by_name[name]["over_plain"], ".3f") for name in names),
         *(f"{by_name[name]['gradient_bytes'] / 1e6:.1f} MB" for name in ("frozencore", "lora-r16"))]
        for setting, by_name in settings.items()
    ]  # fmt: skip
    return table(["over a plain step", *names.values(), "gradients of a core", "of LoRA, r = 16"], rows)


def moments_held(lines: Sequence[Record]) -> str:
    """The share of the private rows' whitened moment that each basis holds, if the whole epsilon is spent on it."""
    found = {(one["basis"], one["epsilon"]): f"{one['share']:.3f}" for one in lines if one["phase"] == "share"}
    epsilons = sorted({epsilon for _, epsilon in found if epsilon}, reverse=True)
    rows = [
        [name, *(found.get((basis, epsilon), "") for epsilon in (None, *epsilons))] for basis, name in BASES.items()
    ]
    return table(["basis", "without noise", *(f"ε = {epsilon:g}" for epsilon in epsilons)], rows)


def moments_trained(lines: Sequence[Record], study: Study) -> str:
    """Trainings that spend half of epsilon on the basis beside those that spend all of it on the training."""
    found = {**study.finals["sst2"]}
    for one in lines:
        if one["phase"] == "final":
            found.setdefault((one["basis"], one["epsilon"]), []).append(one)
    epsilons = sorted({one["epsilon"] for one in lines if one["phase"] == "final"}, reverse=True)
    rows = [
        [BASES[basis], *(in_cell(found.get((basis, epsilon), [])) for epsilon in epsilons)]
        for basis in ("whitened", "public", "random")
    ]
    return table(["basis of the core, SST-2: accuracy, % / loss", *(f"ε = {epsilon:g}" for epsilon in epsilons)], rows)


def attacked(lines: Sequence[Record]) -> str:
    """The results of an attack on trainings with access codes: means, and areas with 95 % intervals."""
    found: dict[tuple[int, float | None], list[Record]] = defaultdict(list)
    for one in lines:
        found[one["steps"], one["epsilon"]].append(one)
    rows = []
    for (steps, epsilon), own in sorted(found.items(), key=lambda item: (-(item[0][1] or math.inf), -item[0][0])):
        of_members, of_others = ([nat for one in own for nat in one["losses"][group]] for group in (0, 1))
        rows.append(
            [f"not private, {steps} steps" if epsilon is None else f"ε = {epsilon:g}, {steps} steps", str(len(own)),
             *(area_of(own, what) for what in ("area_of_loss", "area_of_fall")),
             "1" if epsilon is None else f"{1 / (1 + math.exp(-2 * epsilon)):.4f}",
             f"{sum(one['told'][0] for one in own)} of {len(of_members)}",
             f"{fmean(of_members):.1f}", f"{fmean(of_others):.1f}"]
        )  # fmt: skip
    headings = (
        "trainings", "n", "area by the loss", "by its fall", "largest area possible", "codes told",
        "loss of a member's digits", "of another's",
    )  # fmt: skip
    return table(headings, rows)


def area_of(own: Sequence[Record], what: str) -> str:
    """The mean area with its interval of t; areas scatter as those of guessing at least."""
    areas, (members, others) = [one[what] for one in own], own[0]["losses"]
    guessing = math.sqrt((len(members) + len(others) + 1) / 12 / len(members) / len(others))
    middle = fmean(areas)
    if len(areas) == 1:
        return f"{middle:.3f}"
    half = half_interval(areas, guessing)
    return f"{middle:.3f} ({max(0.0, middle - half):.3f} to {min(1.0, middle + half):.3f})"


def blocks(
    study: Study, gradients: Record, of_moments: Sequence[Record], of_attack: Sequence[Record]
) -> dict[str, str]:
    """The generated blocks of docs/private.md by name."""
    return {
        "private-moments": moments_held(of_moments),
        "private-moments-trained": moments_trained(of_moments, study),
        "private-quality": quality(study),
        "private-apart": apart(study),
        "private-attack": attacked(of_attack),
        "per-example": per_example(gradients),
    }
