"""What a setting would gain on examples that it has not seen: one step from one half, the true loss on the other.

The step of every setting is as training would take it (:mod:`frozencore.maths.first_step`) and equally long, so that a
basis gains nothing by directions whose end no learning rate would reach. How long, the default setting's loss says: the
first of the powers of √10 that gets it half of what the best one does, before all of them have got what is easy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from frozencore.adapter.advice.evidence import Evidence
from frozencore.adapter.advice.settings import Setting
from frozencore.calibration.batches import Batch, num_examples_of
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.run_pass import mean_loss
from frozencore.calibration.trial import Update, tried
from frozencore.constructors import build_basis
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
        rows: Batches that losses are of.
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
        self.base_loss = self._loss(self.rows)

    def find_length(self, setting: Setting) -> None:
        """Set the length of all updates to come, by the gains of one setting on some of the rows."""
        updates, few = self._updates(setting, self.evidence.ranks_of(setting, self.seed)), self.rows[::2]
        before = self._loss(few)
        gains: dict[float, float] = {}
        for power in range(FIRST_POWER, LAST_POWER + 1):
            length = 10 ** (power / 2)
            gains[length] = before - self._loss(few, _times(updates, length))
            best = max(gains.values())
            if best > 0 and gains[length] < SHARE_OF_BEST * best:
                break
        self.length = next(length for length, gain in gains.items() if gain >= SHARE_OF_BEST * best)

    def worth(self, setting: Setting) -> Worth:
        """Try one."""
        ranks = self.evidence.ranks_of(setting, self.seed)
        updates = _times(self._updates(setting, ranks), self.length)
        return Worth(setting, self.base_loss - self._loss(self.rows, updates), num_values(ranks), ranks)

    def _updates(self, setting: Setting, ranks: Mapping[str, int]) -> dict[str, Update]:
        """Of length one."""
        cores, bases = {}, {}
        for name, rank in ranks.items():
            if rank:
                moments = self.evidence.seen[name]
                options = setting.basis_options(rank, self.seed)
                bases[name] = build_basis(setting.method, self.evidence.of_layer(name), options)
                cores[name] = first_step(moments.G, moments.A, moments.D, bases[name])
        return {
            name: Update((bases[name].P.double() @ R).float(), bases[name].Q)
            for name, R in of_length(cores, 1.0).items()
        }

    def _loss(self, rows: Sequence[Batch], updates: Mapping[str, Update] | None = None) -> float:
        self.num_forward += sum(map(num_examples_of, rows))
        with tried(self.evidence.modules, updates or {}):
            return mean_loss(self.model, rows, self.options)


def _times(updates: Mapping[str, Update], length: float) -> dict[str, Update]:
    return {name: update.times(length) for name, update in updates.items()}
