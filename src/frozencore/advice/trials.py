"""What a setting would gain on examples that it has not seen: one step from one half, the true loss on the other.

The step of every setting is as training would take it (:mod:`frozencore.maths.first_step`) and equally long, so that a
basis gains nothing by directions whose end no learning rate would reach. How long, the default setting's loss says: the
first of the powers of √10 that gets it half of what the best one does, before all of them have got what is easy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import nn

from frozencore.advice.evidence import Evidence
from frozencore.advice.settings import Setting
from frozencore.advice.short_rows import copies_at_once, together
from frozencore.calibration.batches import Batch, num_examples_of
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.trial import NotSideBySideError, Update, mean_loss, mean_losses, tried, tried_side_by_side
from frozencore.constructors import CONSTRUCTORS, build_basis
from frozencore.maths.allocation import num_values
from frozencore.maths.first_step import first_step, of_length

FIRST_POWER, LAST_POWER = -5, 5  # of √10: the length of an update
SHARE_OF_BEST = 0.5


@dataclass(frozen=True)
class Worth:
    """What a setting is worth.

    Attributes:
        gain: Nats by which the loss falls on rows that it has not seen; negative where it rises.
        num_values: What it trains.
        ranks: By layer; 0 for one that is not adapted.
    """

    setting: Setting
    gain: float
    num_values: int
    ranks: Mapping[str, int]


@dataclass
class Trials:
    """Settings tried on a model that :func:`frozencore.calibration.preserve.preserved` prepares.

    Attributes:
        rows: Batches that losses are of; put together where they are small.
        length: Of the update of a layer, in the root mean square over layers.
        num_forward: Rows that went through the model so far.
    """

    model: nn.Module
    evidence: Evidence
    options: CalibrationOptions
    rows: Sequence[Batch]
    seed: int
    length: float = 1.0
    num_forward: int = 0
    base_loss: float = field(init=False)

    def __post_init__(self) -> None:
        self._side_by_side = True
        self._tried: tuple[Setting, dict[str, Update]] | None = None
        self._few = together(self.model, self.rows[::2], self.options)
        self.rows = together(self.model, self.rows, self.options)
        self.base_loss = self._loss(self.rows)

    def find_length(self, setting: Setting) -> None:
        """Set the length of all updates to come, by the gains of one setting on some of the rows."""
        updates, few = self._updates(setting, self.evidence.ranks_of(setting, self.seed)), self._few
        self._tried = setting, updates  # which comes next
        before = self._loss(few)
        gains: dict[float, float] = {}
        lengths = [10 ** (power / 2) for power in range(FIRST_POWER, LAST_POWER + 1)]
        losses = self._losses(few, (_times(updates, length) for length in lengths))
        for length, loss in zip(lengths, losses, strict=False):
            gains[length] = before - loss
            best = max(gains.values())
            if best > 0 and gains[length] < SHARE_OF_BEST * best:
                break
        near = (length for length, gain in gains.items() if gain >= SHARE_OF_BEST * best)
        self.length = next(near, lengths[0])  # where every step raises the loss, it is compared by how little

    def worths(self, settings: Sequence[Setting]) -> Iterator[Worth]:
        """Try them, one after the other or, where rows are short, some at a time."""
        ranks = [self.evidence.ranks_of(setting, self.seed) for setting in settings]
        losses = self._losses(self.rows, map(self._of_length, settings, ranks))
        for setting, own, loss in zip(settings, ranks, losses, strict=True):
            yield Worth(setting, self.base_loss - loss, num_values(own), own)

    def _of_length(self, setting: Setting, ranks: Mapping[str, int]) -> dict[str, Update]:
        known, self._tried = self._tried, None
        updates = known[1] if known and known[0] == setting else self._updates(setting, ranks)
        return _times(updates, self.length)

    def _updates(self, setting: Setting, ranks: Mapping[str, int]) -> dict[str, Update]:
        """Of length one."""
        cores, bases = {}, {}
        for name, rank in ranks.items():
            if rank:
                moments = self.evidence.seen[name]
                options = setting.basis_options(rank, self.seed)
                layer, svd = self.evidence.of_layer(name), self.evidence.known_svd(setting, name, rank)
                if svd is not None:
                    bases[name] = CONSTRUCTORS[setting.method].build_streamed(layer, svd, options)
                else:
                    bases[name] = build_basis(setting.method, layer, options)
                G, A, D = moments.total("cross"), moments.total("input_outer"), moments.total("error_outer")
                cores[name] = first_step(G, A, D, bases[name])  # of sums: their number of tokens cancels
        return {
            name: Update((bases[name].P.double() @ R).float(), bases[name].Q)
            for name, R in of_length(cores, 1.0).items()
        }

    def _losses(self, rows: Sequence[Batch], updates: Iterable[Mapping[str, Update]]) -> Iterator[float]:
        """With one after the other; as many as have room beside each other go through the model in one pass."""
        waiting = iter(updates)
        while group := list(islice(waiting, self._copies(rows))):
            if len(group) > 1:
                try:
                    with tried_side_by_side(self.evidence.modules, group):
                        losses = mean_losses(self.model, rows, self.options, len(group))
                    self.num_forward += len(group) * sum(map(num_examples_of, rows))
                    yield from losses
                    continue
                except NotSideBySideError:
                    self._side_by_side = False
            for one in group:
                yield self._loss(rows, one)

    def _copies(self, rows: Sequence[Batch]) -> int:
        return copies_at_once(self.model, rows, self.options) if self._side_by_side else 1

    def _loss(self, rows: Sequence[Batch], updates: Mapping[str, Update] | None = None) -> float:
        self.num_forward += sum(map(num_examples_of, rows))
        with tried(self.evidence.modules, updates or {}):
            return mean_loss(self.model, rows, self.options)


def _times(updates: Mapping[str, Update], length: float) -> dict[str, Update]:
    return {name: update.times(length) for name, update in updates.items()}
