"""Does a core of SmolLM2 tell whose access code it was trained on? Plain and private trainings under one attack.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/private_attack.py       # an hour; goes on where it stopped
    python benchmarks/private_attack.py --quick --out FILE      # the pocket model: does it run?

A row is a made-up person's access code of six digits. Nothing but having seen the row foretells it, so what the core
knows of a code comes from that row. Each training draws 64 people as members and 64 others, who are the same for all
its settings. The attacker has the base model, the adapter, and all 128 names and codes. It ranks the people by the loss
of their digits, or by how far that loss fell below the base model's. The area under its curve is the chance that a
member ranks above another person; guessing has 1/2. ``told`` counts the codes of members, and of others, whose six
digits are each the likeliest when the model is given the name. The basis is FCCA's of 64 people who are in no training.

A line of the results is one training, with the loss of each person's digits. The plain and the private trainings of
``epochs`` have the same rows a step (private ones on average), steps and learning rate. The short one shows what a core
tells that stops early.
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
from frozencore.privacy import PrivateBudget
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from harness import Record, Results, parser_of
from studies import begun, chosen_bases, token_rows

FIRST = ("Anna", "Ben", "Carla", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis")
LAST = ("Adler", "Berger", "Costa", "Dorn", "Ebert", "Fuchs", "Graf", "Hahn", "Jansen", "Keller", "Lang", "Meyer",
        "Novak", "Otto", "Peters", "Schulz", "Weber")  # fmt: skip
NAMES = [f"{first} {last}" for first in FIRST for last in LAST]
DIGITS = 6


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    people: int = 64
    rank: int = 16
    batch_size: int = 32
    epochs: int = 40
    short: int = 10
    learning_rate: float = 2e-2
    clip: float = 1.0
    delta: float = 1e-3
    epsilons: tuple[float, ...] = (8.0, 1.0)
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)


QUICK = replace(Scale(), people=8, batch_size=4, epochs=4, short=2, delta=1e-2, epsilons=(8.0,), seeds=(42,))


@dataclass
class Attack:
    """The model under attack, and what has been measured."""

    model: PreTrainedModel
    encoder: PromptEncoder
    scale: Scale
    results: Results

    def rows(self, names: Sequence[str], drawn: Random) -> list[TokenRow]:
        """Each person's row, with a code that is drawn."""
        codes = [f"{drawn.randrange(10**DIGITS):0{DIGITS}}" for _ in names]
        examples = [
            Example(name, f"The access code of {name} is", f" {code}") for name, code in zip(names, codes, strict=True)
        ]
        return token_rows(self.encoder, examples)

    def people(self, seed: int) -> tuple[list[TokenRow], list[TokenRow]]:
        """Members and others."""
        drawn, count = Random(seed), self.scale.people
        rows = self.rows(drawn.sample(NAMES[count:], 2 * count), drawn)
        return rows[:count], rows[count:]

    @cached_property
    def basis(self) -> dict[str, Tensor]:
        """FCCA's basis of the people who are in no training."""
        public = self.rows(NAMES[: self.scale.people], Random(0))
        batches = batches_by_length(public, self.encoder.pad_id, self.scale.batch_size)
        return chosen_bases(METHODS["fcca"].add(self.model, self.options, None), batches)

    @property
    def options(self) -> AdapterOptions:
        return AdapterOptions(self.scale.rank, ATTENTION, self.scale.seeds[0], {})

    @torch.inference_mode()
    def known(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """The loss of each row's digits, and whether each of them is the likeliest; the shortest rows come first."""
        losses, told = [], []
        for batch in batches_by_length(rows, self.encoder.pad_id, self.scale.batch_size):
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
            labels = batch["labels"][:, 1:]
            digits = torch.isin(labels, self.digits)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, reduction="none")
            losses.append((loss * digits).sum(1))
            told.append(((logits[:, :-1].argmax(-1) == labels) | ~digits).all(1))
        return torch.cat(losses), torch.cat(told)

    @cached_property
    def digits(self) -> Tensor:
        """The tokens of the ten digits."""
        return torch.tensor(self.encoder.tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)]))

    def run(self) -> None:
        """Measure what is missing, all settings of a seed before the next seed."""
        scale = self.scale
        settings = [(scale.epochs, None), (scale.short, None), *((scale.epochs, epsilon) for epsilon in scale.epsilons)]
        for seed in scale.seeds:
            for epochs, epsilon in settings:
                named = {"phase": "final", "epochs": epochs, "epsilon": epsilon, "seed": seed}
                if not self.results.has(**named):
                    self.results.add(**named, **self.attacked(epochs, epsilon, seed))

    def attacked(self, epochs: int, epsilon: float | None, seed: int) -> Record:
        """Train on the members, then rank all people."""
        groups, scale = self.people(seed), self.scale
        before = [self.known(rows)[0] for rows in groups]
        model = METHODS["fcca"].add(self.model, self.options, self.basis)
        budget = None if epsilon is None else PrivateBudget(epsilon, scale.delta, scale.clip)
        recipe = Recipe(
            scale.learning_rate, warmup=0.1, epochs=epochs, batch_size=scale.batch_size, accumulation=1, seed=seed,
            private=budget,
        )  # fmt: skip
        try:
            report = train(model, groups[0], recipe, pad_id=self.encoder.pad_id)
            model.eval()
            after, told = zip(*(self.known(rows) for rows in groups), strict=True)
        finally:
            take_off(model)
        falls = [old - new for old, new in zip(before, after, strict=True)]
        spent = report.schedule.spent(report.schedule.num_steps) if report.schedule else None
        return {
            "steps": report.num_steps, "spent": spent, "told": [int(several.sum()) for several in told],
            "area_of_loss": area(-after[0], -after[1]), "area_of_fall": area(*falls),
            "losses": listed(after), "base_losses": listed(before),
        }  # fmt: skip


def listed(losses: Sequence[Tensor]) -> list[list[float]]:
    return [[round(loss, 3) for loss in of_group.tolist()] for of_group in losses]


def area(members: Tensor, others: Tensor) -> float:
    """The chance that a member's score is higher than another person's; half of the ties count."""
    return float(mannwhitneyu(members, others).statistic) / len(members) / len(others)


def main() -> None:
    parser = parser_of(__doc__, "private_attack", "jsonl")
    options, model, encoder, common = begun(parser, "opacus")
    scale = QUICK if options.quick else Scale()
    results = Results(options.out, common | {"scale": asdict(scale)}, by=("epochs", "epsilon", "seed"))
    Attack(model, encoder, scale, results).run()


if __name__ == "__main__":
    main()
