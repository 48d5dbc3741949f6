"""Does a core of SmolLM2 tell whose access code it was trained on? Plain and private trainings under one attack.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/private_attack.py       # an hour; goes on where it stopped
    python benchmarks/private_attack.py --quick --out FILE      # the pocket model: does it run?

A row is a made-up person's access code of six digits. Nothing but having seen the row foretells it, so what the core
knows of a code comes from that row. Each training draws 64 people as members and 64 others. The attack knows all 128
codes, and ranks the people by how far the loss of their code fell below the base model's. Its area under the curve is
the chance that a member ranks above another person: 1/2 is guessing. ``told`` is the share of the members' codes that
the model writes, digit by digit the likeliest, when it is given the name. The basis is FCCA's of another draw of 64.

A line of the results is one training. Plain and private ones have the same rows a step, steps and learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from random import Random

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor
from transformers import PreTrainedModel

from contestants import ATTENTION, batches_by_length
from frozencore import calibrate
from frozencore.adapter.bases.access import get_bases
from frozencore.privacy import PrivateBudget
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from harness import Record, Results, parser_of
from studies import begun

FIRST = ("Anna", "Ben", "Carla", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis")
LAST = ("Adler", "Berger", "Costa", "Dorn", "Ebert", "Fuchs", "Graf", "Hahn", "Jansen", "Keller", "Lang", "Meyer",
        "Novak", "Otto", "Peters", "Schulz", "Weber")  # fmt: skip
CODES = 10**6


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    people: int = 64
    rank: int = 16
    batch_size: int = 32
    epochs: int = 40
    learning_rate: float = 2e-2
    clip: float = 1.0
    delta: float = 1e-3
    epsilons: tuple[float | None, ...] = (None, 8.0, 1.0)
    seeds: tuple[int, ...] = tuple(range(42, 50))


QUICK = replace(Scale(), people=8, batch_size=4, epochs=4, delta=1e-2, epsilons=(None, 8.0), seeds=(42,))


@dataclass
class Attack:
    """The model under attack, and what has been measured."""

    model: PreTrainedModel
    encoder: PromptEncoder
    scale: Scale
    results: Results

    def people(self, seed: int) -> tuple[list[TokenRow], list[TokenRow]]:
        """Members and others."""
        drawn, count = Random(seed), self.scale.people
        names = drawn.sample([f"{first} {last}" for first in FIRST for last in LAST], 2 * count)
        examples = [Example(name, f"The access code of {name} is", f" {drawn.randrange(CODES):06}") for name in names]
        rows = self.encoder.training_rows([self.encoder.render(example) for example in examples])
        return rows[:count], rows[count:]

    @cached_property
    def basis(self) -> dict[str, Tensor]:
        """FCCA's basis of other draws, with codes of their own."""
        public, _ = self.people(self.scale.seeds[0] - 1)
        model = METHODS["fcca"].add(self.model, self.options, None)
        calibrate(model, batches_by_length(public, self.encoder.pad_id, self.scale.batch_size), progress=False)
        found = get_bases(model)
        take_off(model)
        return found

    @property
    def options(self) -> AdapterOptions:
        return AdapterOptions(self.scale.rank, ATTENTION, self.scale.seeds[0], {})

    @torch.inference_mode()
    def known(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """The loss of each row's code, and whether each of its tokens is the likeliest."""
        losses, told = [], []
        for batch in batches_by_length(rows, self.encoder.pad_id, self.scale.batch_size):
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
            labels = batch["labels"][:, 1:]
            losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, reduction="none").sum(1))
            told.append(((logits[:, :-1].argmax(-1) == labels) | (labels == -100)).all(1))
        return torch.cat(losses), torch.cat(told)

    def run(self) -> None:
        for seed in self.scale.seeds:
            for epsilon in self.scale.epsilons:
                if not self.results.has(phase="final", epsilon=epsilon, seed=seed):
                    self.results.add(phase="final", epsilon=epsilon, seed=seed, **self.attacked(epsilon, seed))

    def attacked(self, epsilon: float | None, seed: int) -> Record:
        """Train on the members, then rank all people by how far their loss fell."""
        members, others = self.people(seed)
        before = [self.known(rows)[0] for rows in (members, others)]
        model = METHODS["fcca"].add(self.model, self.options, self.basis)
        scale = self.scale
        budget = None if epsilon is None else PrivateBudget(epsilon, scale.delta, scale.clip)
        recipe = Recipe(
            scale.learning_rate, warmup=0.1, epochs=scale.epochs, batch_size=scale.batch_size, accumulation=1,
            seed=seed, private=budget,
        )  # fmt: skip
        try:
            report = train(model, members, recipe, pad_id=self.encoder.pad_id)
            model.eval()
            after, told = zip(*(self.known(rows) for rows in (members, others)), strict=True)
        finally:
            take_off(model)
        falls = [old - new for old, new in zip(before, after, strict=True)]
        area = mannwhitneyu(*falls).statistic / len(members) / len(others)
        spent = report.schedule.spent(report.schedule.num_steps) if report.schedule else None
        return {
            "area": float(area), "told": [float(several.float().mean()) for several in told],
            "loss": [float(several.mean()) for several in after],
            "base_loss": [float(several.mean()) for several in before], "spent": spent,
        }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, "private_attack", "jsonl")
    options, model, encoder, common = begun(parser, "opacus")
    scale = QUICK if options.quick else Scale()
    results = Results(options.out, common | {"scale": asdict(scale)}, by=("epsilon", "seed"))
    Attack(model, encoder, scale, results).run()


if __name__ == "__main__":
    main()
