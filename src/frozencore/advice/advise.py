"""``advise(model, dataloader)``: estimate the gain of bases, ranks and targets before training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from frozencore.adapter.bases.calibrate import reporting
from frozencore.advice.evidence import Spreads, gather, plain_pass_s
from frozencore.advice.settings import bases_to_try, shapes_to_try
from frozencore.advice.trials import Trials, Worth
from frozencore.calibration.batches import num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.examples import Collator, batches_from
from frozencore.calibration.loss import LossFn, with_loss
from frozencore.calibration.preserve import preserved
from frozencore.constructors.basis_options import BasisOptions, trained_values
from frozencore.errors import ConfigError
from frozencore.maths.allocation import num_values
from frozencore.words import Progress

LEVEL = 0.02  # share of the largest gain: settings this close are equal
SCORED = 4  # every fourth batch of the unseen half is scored
BUDGETS = (1, 4, 16, 64)  # in sixteenths of the requested trained values


@dataclass(frozen=True)
class Advice:
    """The gain of each setting, and facts about the model and the data.

    Attributes:
        bases: Each constructor and its variants, best first, on the requested layers and ranks.
        kept: The default constructor, which is recommended unless another one is clearly better.
        shapes: The best bases with equally many values in other layers or ranks.
        bought: What a rank budget buys: the share that its bases hold of the whitened gradient on which both halves
            agree, by budget, over the largest set of layers that was tried. Empty if only bases were compared.
        base_loss: Nats on the scored rows.
        length: The length of the tried updates.
        num_agreed, num_looked_at: The number of leading whitened directions of the median layer on which the halves
            agree, and the number of compared directions; the others are noise.
        num_rows: The number of rows.
        passes: The measured processor time of the advice, divided by that of a calibration pass over the same rows.
    """

    bases: tuple[Worth, ...]
    kept: Worth
    shapes: tuple[Worth, ...]
    bought: dict[int, float]
    base_loss: float
    length: float
    spreads: Spreads
    num_agreed: float
    num_looked_at: int
    num_rows: int
    passes: float
    time_s: float

    @property
    def best_bases(self) -> Worth:
        """The first whose gain is close to the best: the default, the best with default options, the best of all."""
        return _best_bases(self.bases, self.kept)

    @property
    def recommended(self) -> Worth:
        """The recommended setting with the requested number of values."""
        best = self.best_bases
        elsewhere = max(self.shapes, key=lambda worth: worth.gain, default=best)
        return elsewhere if elsewhere.gain > best.gain + LEVEL * abs(best.gain) else best


def advise(
    model: nn.Module,
    data: Iterable[Any] | Dataset[Any],
    *,
    target_modules: list[str] | str | None = None,
    r: int | None = None,
    rank_budget: int | str | None = None,
    seed: int = BasisOptions.seed,
    collator: Collator | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    options: CalibrationOptions | None = None,
    loss_fn: LossFn | None = None,
    only_bases: bool = False,
    progress: bool | Progress = True,
) -> Advice:
    """Estimate the gain of frozen cores on unseen examples, before any core is trained.

    The examples are split in two halves. One half gives moments, bases and the first step of each core; the gain is the
    fall of the loss on the other half. docs/advise.md measures how well this predicts training.

    Args:
        model: The plain base model.
        data, collator, batch_size, num_examples, options, loss_fn, progress: See :func:`frozencore.calibrate`.
        target_modules: The layers to adapt, as in ``FrozenCoreConfig``; by default the attention projections.
        r: The rank; 16 by default.
        rank_budget: A number of trained values, or their size, in place of the rank.
        seed: The seed of all random numbers.
        only_bases: Compare only bases, on these layers and at this rank.

    Returns:
        The advice. The model is as before.

    Raises:
        CalibrationError: There are fewer than two examples, no labels, or NaN or Inf.
        ConfigError: The model has adapters, or both a rank and a budget were given.
        DataError: The data are not batches.
    """
    if getattr(model, "peft_config", None):
        raise ConfigError("Advice is of a plain base model, but this one has adapters. Pass the base model itself.")
    if r is not None and rank_budget is not None:
        raise ConfigError(f"rank_budget chooses the ranks, but r={r} came too. Leave one of them out.")
    started, started_cpu = time.perf_counter(), time.process_time()
    budget = None if rank_budget is None else trained_values(rank_budget)
    rank = None if budget is not None else BasisOptions(rank=BasisOptions.rank if r is None else r).rank
    options = with_loss(options, loss_fn)
    with reporting(progress) as tell, preserved(model):
        batches = list(
            batches_from(
                data, collator=collator, batch_size=batch_size, num_examples=num_examples,
                any_form=loss_fn is not None,
            )
        )  # fmt: skip
        settings = list(bases_to_try(rank, budget))
        evidence = gather(model, batches, target_modules, options, tell, settings=settings, elsewhere=not only_bases)
        trials = Trials(model, evidence, options, evidence.held_back[::SCORED], seed)
        looked_at, asked = 2 * (rank or BasisOptions.rank), num_values(evidence.ranks_of(settings[0], seed))
        budgets = [max(1, asked * part // 16) for part in BUDGETS]
        bought = {} if only_bases else evidence.bought(budgets, seed)
        num_agreed = evidence.num_agreed(looked_at, seed)
        trials.find_length(settings[0])
        bases = list(trials.worths(settings, "try bases"))
        kept = bases[0]
        best = _best_bases(bases, kept)
        elsewhere = "all-linear" in evidence.names
        others = [] if only_bases else list(shapes_to_try(best.setting, best.num_values, elsewhere=elsewhere))
        shapes = list(trials.worths(others, "try places"))
        asked_layers = {name: evidence.modules[name] for name in evidence.names["asked"]}
        plain_s = plain_pass_s(model, batches, asked_layers, options)
        return Advice(
            bases=tuple(sorted(bases, key=lambda worth: -worth.gain)),
            kept=kept,
            shapes=tuple(shapes),
            bought=bought,
            base_loss=trials.base_loss,
            length=trials.length,
            spreads=evidence.spreads(),
            num_agreed=num_agreed,
            num_looked_at=looked_at,
            num_rows=sum(map(num_examples_of, batches)),
            passes=(time.process_time() - started_cpu) / plain_s,
            time_s=time.perf_counter() - started,
        )


def _best_bases(among: Sequence[Worth], kept: Worth) -> Worth:
    best = max(among, key=lambda worth: worth.gain)
    plain = (worth for worth in among if worth.setting.options == kept.setting.options)
    best_plain = max(plain, key=lambda worth: worth.gain)  # gains order constructors better than variants of one
    return next(worth for worth in (kept, best_plain, best) if worth.gain >= best.gain - LEVEL * abs(best.gain))
