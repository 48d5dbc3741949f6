"""Do the gradients of rows say which training rows taught a core?  Flipped labels, halves of the rows, chosen rows.

    OMP_NUM_THREADS=1 nice -n 5 python benchmarks/row_scores.py --seeds 5                       # the pocket model
    python benchmarks/row_scores.py --model smollm2 --tasks sst2 --data-root DIR --only flipped
    python benchmarks/row_scores.py --quick

At the end of each of two epochs each training row i has the gradient g_i of its loss with respect to the cores, and
each asked row j (clean, held out) has e_j. Scores, summed over both: ``product`` <e_j, g_i> (TracIn); ``cosine``, the
same of unit vectors; ``inverse`` e_j' (G'G + λI)^-1 g_i with λ the mean of |g_i|². A checkpoint has the weight of the
learning rates that led to it, or all have the same (``equal``). Intervals are of 95 %.

flipped: a tenth of the labels is wrong. The area under the curve of each ranking for these rows, and its difference to
that of the rows' own loss, averaged over both checkpoints; over seeds by Student's t, for one seed over rows.

halves: new trainings on random halves (the linear datamodeling score): for each asked row the rank correlation of its
log-likelihood with the sum of its scores over the half; the mean over rows.

chosen: rows of all tasks together. For each task a new training on the twentieth of them that scores highest for its
asked rows; the loss on other rows of the task, above the mean of random twentieths.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch import Tensor

from frozencore import swap_core
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.per_example import losses_and_gradients
from frozencore.files.whole_file import write_lines
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.run.adapt import adapt_from_data
from frozencore.tune.run.config import make_config
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import prepare
from frozencore.tune.run.training_port import recipe_of
from frozencore.tune.scoring.forward import completion_logprobs
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import split_task
from frozencore.tune.training.checkpoints import checkpoints
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import epochs_for
from frozencore.tune.training.train import train
from harness import parser_of, table, write_found
from quality_tables import half_interval

POCKET = ("pocket-sentiment", "pocket-entailment", "pocket-comparison", "pocket-math")
DRAWS = 2000  # of a bootstrap
Interval = tuple[float, float, float]


def silent(*_: object) -> None:
    pass


class Study:
    """A training on rows of tasks, some with a wrong label, and the scores of its rows."""

    def __init__(self, folder: Path, options: Any, seed: int, tasks: Sequence[str], *, flips: bool) -> None:
        drawn, sets = random.Random(seed), {"train": [], "asked": [], "others": []}
        for task in tasks:
            share = options.rows // len(tasks)
            splits = split_task(find_task(task), options.data_root, num_train=share, num_evaluation=2 * options.asked)
            sets["train"] += splits.train
            sets["asked"] += splits.evaluation[: options.asked]
            sets["others"] += splits.evaluation[options.asked :]
        if len(tasks) > 1:
            drawn.shuffle(sets["train"])
        wrong = drawn.sample(range(len(sets["train"])), len(sets["train"]) // 10 if flips else 0)
        for place in wrong:
            row = sets["train"][place]
            other = drawn.choice([one for one in row.choices if one != row.completion])
            sets["train"][place] = replace(row, completion=other)
        for name, rows in {"train": sets["train"], "eval": sets["asked"] + sets["others"]}.items():
            lines = [{"prompt": row.prompt, "completion": row.completion} for row in rows]
            write_lines(folder / f"{name}.jsonl", lines)
        config = make_config(
            model=options.model, data=str(folder / "train.jsonl"), eval_data=str(folder / "eval.jsonl"), epochs=2,
            seed=seed, device="cpu", dtype=options.dtype, exact_match="no",
        )  # fmt: skip
        prepared = prepare(config, silent)
        self.pad_id, self.rows = prepared.encoder.pad_id, prepared.rows.train
        count = len(sets["asked"])
        self.asked, self.others = prepared.rows.held_out[:count], prepared.rows.held_out[count:]
        named = {f"row-{place + 1}" for place in wrong}
        self.is_wrong = np.array([row.id in named for row in self.rows])
        self.model, _ = adapt_from_data(config, prepared, resolve_targets(config, prepared.model), silent)
        self.recipe = recipe_of(config, prepared.rows, self.model)
        train(
            self.model, self.rows, self.recipe, pad_id=self.pad_id, checkpoint_dir=folder / "steps", identity={},
            resume=True,
        )  # fmt: skip
        self._score(sorted(checkpoints(folder / "steps"), key=lambda place: int(place.name.split("-")[1])))

    def _score(self, steps: Sequence[Path]) -> None:
        """``scores`` by name (asked x training rows), and ``own``: numbers of the training rows alone."""
        log = json.loads((steps[-1] / "trainer_state.json").read_text())["log_history"]
        self.scores, self.own, before = {}, {"loss": 0.0, "length": 0.0}, 0
        for place in steps:
            step = int(place.name.split("-")[1])
            rate = sum(one["learning_rate"] for one in log if before < one.get("step", 0) <= step and "loss" in one)
            before = step
            swap_core(self.model, place)
            (losses, G), (_, E) = self._gradients(self.rows), self._gradients(self.asked)
            lengths, unit = G.norm(dim=1), torch.nn.functional.normalize
            gram = (G @ G.T).double()
            damped = gram + gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
            forms = {
                "cosine": unit(E) @ unit(G).T,
                "product": E @ G.T,
                "inverse": torch.linalg.solve(damped, (G @ E.T).double()).T.float(),
            }
            for name, form in forms.items():
                for weight, said in ((rate, ""), (1.0, " equal")):
                    self.scores[name + said] = self.scores.get(name + said, 0.0) + weight * form
            self.own = {"loss": self.own["loss"] + losses, "length": self.own["length"] + lengths}
        self.own["loss at the last step"] = losses

    def _gradients(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
        found = [
            losses_and_gradients(self.model, batch)
            for batch in make_batches([rows[i] for i in order], pad_id=self.pad_id, batch_size=8)
        ]
        back = torch.tensor(order).argsort()
        return torch.cat([one[0] for one in found])[back].float(), torch.cat([one[1] for one in found])[back]

    @property
    def suspicions(self) -> dict[str, Any]:
        """Rankings of the training rows by name; the most suspicious row has the largest number."""
        found = self.own | {name: -score.mean(0) for name, score in self.scores.items()}
        return {name: ranking.double().numpy() for name, ranking in found.items()}

    def again(self, subsets: Mapping[str, Any], rows: list[TokenRow], *, alike: bool = True) -> dict[str, Any]:
        """The loss of each row after new trainings, with the epochs of the first or, for few rows, those of `tune`."""
        with torch.no_grad():  # they start where the first began
            for layer in frozen_core_layers(self.model, "default").values():
                layer.core("default").zero_()
        tenants = {}
        for name, own in subsets.items():
            recipe = self.recipe if alike else replace(self.recipe, epochs=epochs_for(len(own), 8))
            tenants[name] = Tenant([self.rows[i] for i in own], recipe)
        losses = {}
        for name, trained in train_many(self.model, tenants, pad_id=self.pad_id).items():
            swap_core(self.model, trained.cores)
            parts = []
            for batch in make_batches(rows, pad_id=self.pad_id, batch_size=8):
                with torch.no_grad():
                    logprobs, counted = completion_logprobs(self.model, batch)
                parts.append(-logprobs.sum(1) / counted.sum(1))
            losses[name] = torch.cat(parts).numpy()
        return losses


def bootstrap(measure: Callable[[Any], float], count: int) -> Interval:
    """A measure of all rows, and its interval over draws of the rows."""
    drawn = np.random.default_rng(0)
    found = [measure(drawn.integers(0, count, count)) for _ in range(DRAWS)]
    low, high = np.nanquantile(found, (0.025, 0.975)).tolist()
    return measure(np.arange(count)), low, high


def area(ranking: Any, is_wrong: Any) -> float:
    """The area under the curve: how often a row with a wrong label ranks above another one."""
    count, others = is_wrong.sum(), (~is_wrong).sum()
    return float((rankdata(ranking)[is_wrong].sum() - count * (count + 1) / 2) / max(1, count * others))


def flipped(runs: Sequence[tuple[Mapping[str, Any], Any]]) -> list[dict[str, Any]]:
    """The area of each ranking and its difference to that of the loss, over seeds or over the rows of one."""

    def above(name: str, other: str | None, run: tuple[Mapping[str, Any], Any], at: Any = slice(None)) -> float:
        ranked, wrong = run
        return area(ranked[name][at], wrong[at]) - (area(ranked[other][at], wrong[at]) if other else 0.0)

    def interval(name: str, other: str | None) -> Interval:
        each = [above(name, other, run) for run in runs]
        if len(runs) == 1:
            return bootstrap(partial(above, name, other, runs[0]), len(runs[0][1]))
        half = half_interval(each)
        return fmean(each), fmean(each) - half, fmean(each) + half

    return [{"by": name, "area": interval(name, None), "above_loss": interval(name, "loss")} for name in runs[0][0]]


def halves(study: Study, options: Any) -> list[dict[str, Any]]:
    count, drawn = len(study.rows), np.random.default_rng(options.seed)
    kept = {str(i): drawn.choice(count, count // 2, replace=False) for i in range(options.halves)}
    losses = np.stack(list(study.again(kept, study.asked).values()))
    found = []
    for name, scores in study.scores.items():
        sums = np.stack([scores[:, own].sum(1).numpy() for own in kept.values()])
        each = np.array([spearmanr(sums[:, row], -losses[:, row]).statistic for row in range(losses.shape[1])])
        interval = bootstrap(lambda at, each=each: float(np.nanmean(each[at])), len(each))
        found.append({"by": name, "correlation": interval})
    return found


def chosen(study: Study, options: Any) -> list[dict[str, Any]]:
    count, drawn = len(study.rows), np.random.default_rng(options.seed)
    many, asked, best = max(1, count // 20), options.asked, {}
    for number, task in enumerate(options.tasks):
        rows = slice(asked * number, asked * (number + 1))
        rankings = {name: scores[rows].mean(0).numpy() for name, scores in study.scores.items()}
        rankings["BM25"] = bm25(study.rows, study.asked[rows])
        best |= {f"{task}: {name}": np.argsort(-ranking)[:many] for name, ranking in rankings.items()}
    randoms = {str(i): drawn.choice(count, many, replace=False) for i in range(options.randoms)}
    losses = study.again(best | randoms, study.others, alike=False) | study.again({"all": range(count)}, study.others)
    found = []
    for number, task in enumerate(options.tasks):
        rows = slice(asked * number, asked * (number + 1))
        chance = np.mean([losses[name][rows] for name in randoms], axis=0)
        for name in [one for one in losses if one.startswith((f"{task}: ", "all"))]:
            away = losses[name][rows] - chance
            interval = bootstrap(lambda at, away=away: float(away[at].mean()), len(away))
            found.append({"task": task, "by": name.removeprefix(f"{task}: "), "above_random": interval})
    return found


def bm25(documents: Sequence[TokenRow], asked: Sequence[TokenRow]) -> Any:
    """The mean BM25 score of the prompts' tokens for those of the asked prompts (k₁ = 1.5, b = 0.75)."""
    held = [Counter(row.input_ids[: row.num_context]) for row in documents]
    mean, holds = fmean(sum(own.values()) for own in held), Counter(token for own in held for token in own)
    weights = {token: math.log(1 + (len(held) - n + 0.5) / (n + 0.5)) for token, n in holds.items()}
    times = Counter(token for row in asked for token in set(row.input_ids[: row.num_context]))
    return np.array([
        sum(
            times[token] * weights[token] * 2.5 * n / (n + 1.5 * (0.25 + 0.75 * sum(own.values()) / mean))
            for token, n in own.items()
        )
        for own in held
    ])  # fmt: skip


def tables(found: Mapping[str, Any]) -> str:
    def cell(value: Any) -> str:
        return value if isinstance(value, str) else "{:.3f} ({:.3f} to {:.3f})".format(*value)

    return "\n".join(
        f"{part}\n\n{table(list(rows[0]), [list(map(cell, row.values())) for row in rows])}"
        for part, rows in found.items()
    )


def main() -> None:
    parser = parser_of(__doc__, "row_scores")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--tasks", nargs="+", default=[*POCKET])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--asked", type=int, default=64, help="Rows of a task to explain, and as many others.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="Trainings with wrong labels, from --seed on.")
    parser.add_argument("--randoms", type=int, default=10, help="Random choices of rows.")
    parser.add_argument("--halves", type=int, default=50, help="Trainings on half of the rows.")
    parser.add_argument("--only", nargs="+", default=["flipped", "halves", "chosen"])
    options = parser.parse_args()
    if options.quick:
        options.rows, options.asked, options.randoms, options.halves = 24, 4, 2, 3
    with tempfile.TemporaryDirectory() as place:
        runs = []
        for seed in reversed(range(options.seed, options.seed + options.seeds)):
            study = Study(Path(place) / str(seed), options, seed, options.tasks[:1], flips=True)
            runs.append((study.suspicions, study.is_wrong))
            print(seed, {name: round(area(ranking, study.is_wrong), 3) for name, ranking in study.suspicions.items()})
        found: dict[str, Any] = {"flipped": flipped(runs)}
        print(tables(found), flush=True)
        if "halves" in options.only:
            found["halves"] = halves(study, options)
        if "chosen" in options.only:
            mixed = Study(Path(place) / "mixed", options, options.seed, options.tasks, flips=False)
            found["chosen"] = chosen(mixed, options)
    print(tables(found))
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "data_root")}
    write_found(options, settings=settings, **found)


if __name__ == "__main__":
    main()
