"""The privacy budget of a training, its noise, and the epsilon spent after a number of steps.

Opacus computes epsilon by Rényi differential privacy of the subsampled Gaussian mechanism (Mironov et al. 2019). Each
step takes each row with probability q. It adds noise of standard deviation σ·C to the sum of the rows' gradients, each
of norm at most C. Two sets of training rows are neighbours if one has one row more.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from frozencore.errors import ConfigError

CLIP = 1.0


@dataclass(frozen=True)
class PrivateBudget:
    """The budget of private training.

    Attributes:
        epsilon: The largest epsilon to spend; smaller is more private.
        delta: The probability that the bound fails; less than one over the number of rows.
        clip: C, the largest norm of a row's gradient in a step.
    """

    epsilon: float
    delta: float
    clip: float = CLIP

    def __post_init__(self) -> None:
        for name, least, most in (("epsilon", 0.0, 100.0), ("delta", 0.0, 1.0), ("clip", 0.0, math.inf)):
            value = getattr(self, name)
            if not least < value < most:
                raise ConfigError(
                    f"The {name} of private training lies between {least:g} and {most:g}, both left out, but {value} "
                    "came. Usual values: epsilon 1 to 8, delta 1e-5, clip 1."
                )


@dataclass(frozen=True)
class Schedule:
    """The steps of a private training and their noise.

    Attributes:
        num_rows: The number of training rows.
        rows_a_step: Rows of a step on average.
        num_steps: Steps of the whole training.
        noise_multiplier: σ, the noise of a step in units of the clipping length.
    """

    budget: PrivateBudget
    num_rows: int
    rows_a_step: int
    num_steps: int
    noise_multiplier: float

    @classmethod
    def of(cls, budget: PrivateBudget, num_rows: int, rows_a_step: int, num_steps: int) -> Schedule:
        """The schedule with the least noise that keeps the budget.

        Raises:
            ConfigError: delta is not below one over the number of rows, the budget is too small, or Opacus is missing.
        """
        require_opacus()
        if budget.delta >= 1 / num_rows:
            raise ConfigError(
                f"The delta of private training must be below one in the number of rows, 1/{num_rows:,}, but "
                f"{budget.delta:g} came: with it a row might be published as it is. Use {0.1 / num_rows:.0e}."
            )
        rows_a_step = min(rows_a_step, num_rows)
        noise = _noise_multiplier(budget.epsilon, budget.delta, rows_a_step / num_rows, num_steps)
        return cls(budget, num_rows, rows_a_step, num_steps, noise)

    @property
    def sample_rate(self) -> float:
        """q, the probability of each row in each step."""
        return self.rows_a_step / self.num_rows

    def spent(self, num_steps: int) -> float:
        """The epsilon spent after a number of steps; 0 before the first."""
        if num_steps == 0:
            return 0.0
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import get_privacy_spent

        orders = RDPAccountant.DEFAULT_ALPHAS
        of_a_step = _rdp_of_a_step(self.sample_rate, self.noise_multiplier)
        epsilon, _ = get_privacy_spent(orders=orders, rdp=of_a_step * num_steps, delta=self.budget.delta)
        return float(epsilon)

    def content(self) -> dict[str, Any]:
        """JSON values by name."""
        own = {name: value for name, value in asdict(self).items() if name != "budget"}
        return {**asdict(self.budget), **own}


def require_opacus() -> None:
    """Check that Opacus, the privacy accountant, is installed.

    Raises:
        ConfigError: Opacus is not installed.
    """
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Private training counts what it spends with Opacus, which is not installed: pip install "
            "'frozencore[private]'."
        ) from error


@cache
def _noise_multiplier(epsilon: float, delta: float, rate: float, num_steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    try:
        found: float = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=num_steps,
            accountant="rdp",
            epsilon_tolerance=min(0.01, epsilon / 1000),
        )
    except ValueError as error:
        raise ConfigError(
            f"No noise keeps an epsilon of {epsilon:g} over {num_steps:,} steps. Give a larger epsilon or delta."
        ) from error
    return found


@cache
def _rdp_of_a_step(rate: float, noise_multiplier: float) -> Any:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)
