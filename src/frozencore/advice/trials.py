"""Measure the gain of a setting on unseen examples: a step from one half, the loss on the other half.

The step is the first step of a training (:mod:`frozencore.maths.objective`), with the same length for every setting.
The length is the shortest power of √10 at which the default setting has at least half of its best gain. With longer
steps every setting gains, and they would differ less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import nn

from frozencore.advice.evidence import Evidence, copies_at_once, larger_batches
from frozencore.advice.settings import Setting
from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.update_loss import (
    NotSideBySideError,
    Update,
    mean_loss,
    mean_losses,
    tried,
    tried_side_by_side,
)
from frozencore.constructors import CONSTRUCTORS, build_basis
from frozencore.maths.allocation import num_values
from frozencore.maths.objective import first_step, of_length

FIRST_POWER, LAST_POWER = -5, 5  # of √10: the length of an update
SHARE_OF_BEST = 0.5


@dataclass(frozen=True)
class Worth:
    """The result of trying a setting.

    Attributes:
        gain: Fall of the loss on unseen rows in nats; negative if it rises.
        num_values: Its trained values.
        ranks: Ranks by layer; 0 for a layer that is not adapted.
    """

    setting: Setting
    gain: float
    num_values: int
    ranks: Mapping[str, int]


@dataclass
class Trials:
    """Try settings on a model that :func:`frozencore.calibration.preserve.preserved` has prepared.

    Attributes:
        rows: Batches for the losses; small batches are joined.
        length: The length of a layer's update, as root mean square over layers.
    """

    model: nn.Module
    evidence: Evidence
    options: CalibrationOptions
    rows: Sequence[Batch]
    seed: int
    length: float = 1.0
    base_loss: float = field(init=False)

    def __post_init__(self) -> None:
        self._side_by_side = True
        self._counts = 0, 0
        self._tried: tuple[Setting, dict[str, Update]] | None = None
        self._few = larger_batches(self.model, self.rows[::2], self.options)
        self.rows = larger_batches(self.model, self.rows, self.options)
        self.base_loss = self._loss(self.rows)

    def find_length(self, setting: Setting) -> None:
        """Set the length of all updates, by the gains of one setting on some of the rows."""
        lengths = [10 ** (power / 2) for power in range(FIRST_POWER, LAST_POWER + 1)]
        ranks, few = self.evidence.ranks_of(setting, self.seed), self._few
        self._counts = 0, len(ranks) + len(lengths)
        updates = self._updates(setting, ranks, "length")
        self._tried = setting, updates  # worths() tries this setting first
        before = self._loss(few)
        gains: dict[float, float] = {}
        losses = self._losses(few, (_times(updates, length) for length in lengths))
        for length, loss in zip(lengths, losses, strict=False):
            gains[length] = before - loss
            self._count("length")
            best = max(gains.values())
            if best > 0 and gains[length] < SHARE_OF_BEST * best:
                break
        near = (length for length, gain in gains.items() if gain >= SHARE_OF_BEST * best)
        self.length = next(near, lengths[0])  # if every step raises the loss, the smallest rise is best
        self.evidence.tell("length", self._counts[1], self._counts[1])

    def worths(self, settings: Sequence[Setting], stage: str) -> Iterator[Worth]:
        """Try settings in sequence, or several at a time if rows are short."""
        ranks = [self.evidence.ranks_of(setting, self.seed) for setting in settings]
        self._counts = 0, sum(map(len, ranks)) + len(settings)
        losses = self._losses(self.rows, (self._of_length(*each, stage) for each in zip(settings, ranks, strict=True)))
        for setting, own, loss in zip(settings, ranks, losses, strict=True):
            self._count(stage)
            yield Worth(setting, self.base_loss - loss, num_values(own), own)

    def _count(self, stage: str, more: int = 1) -> None:
        done, total = self._counts
        self._counts = done + more, total
        self.evidence.tell(stage, *self._counts)

    def _of_length(self, setting: Setting, ranks: Mapping[str, int], stage: str) -> dict[str, Update]:
        known, self._tried = self._tried, None
        if known and known[0] == setting:
            self._count(stage, len(ranks))
            return _times(known[1], self.length)
        return _times(self._updates(setting, ranks, stage), self.length)

    def _updates(self, setting: Setting, ranks: Mapping[str, int], stage: str) -> dict[str, Update]:
        """The updates of a setting, of length one."""
        cores, bases = {}, {}
        for name, rank in ranks.items():
            self._count(stage)
            if rank:
                moments = self.evidence.seen[name]
                options = setting.basis_options(rank, self.seed)
                layer, svd = self.evidence.of_layer(name), self.evidence.known_svd(setting, name, rank)
                if svd is not None:
                    bases[name] = CONSTRUCTORS[setting.method].build_streamed(layer, svd, options)
                else:
                    bases[name] = build_basis(setting.method, layer, options)
                G, A, D = moments.total("cross"), moments.total("input_outer"), moments.total("error_outer")
                cores[name] = first_step(G, A, D, bases[name])  # sums will do, because the number of tokens cancels
        return {
            name: Update((bases[name].P.double() @ R).float(), bases[name].Q)
            for name, R in of_length(cores, 1.0).items()
        }

    def _losses(self, rows: Sequence[Batch], updates: Iterable[Mapping[str, Update]]) -> Iterator[float]:
        """The loss with each of the updates; several share a pass if they fit."""
        waiting = iter(updates)
        num_copies = copies_at_once(self.model, rows, self.options)
        while group := list(islice(waiting, num_copies if self._side_by_side else 1)):
            if len(group) > 1:
                try:
                    with tried_side_by_side(self.evidence.modules, group):
                        losses = mean_losses(self.model, rows, self.options, len(group))
                    yield from losses
                    continue
                except NotSideBySideError:
                    self._side_by_side = False
            for one in group:
                yield self._loss(rows, one)

    def _loss(self, rows: Sequence[Batch], updates: Mapping[str, Update] | None = None) -> float:
        with tried(self.evidence.modules, updates or {}):
            return mean_loss(self.model, rows, self.options)


def _times(updates: Mapping[str, Update], length: float) -> dict[str, Update]:
    return {name: update.times(length) for name, update in updates.items()}
