"""GaLore (Zhao et al., 2024) and APOLLO (Zhu et al., 2025): the weights of the targets themselves train.

Their optimisers keep Adam's moments in r directions of each weight's gradient, which are chosen anew in every round of
``refresh``. What is small is thereby the state and not the adapter: it holds whole weights. Both optimisers are their
authors' (extra ``frozencore[peers]``), as transformers calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from frozencore.errors import ConfigError
from frozencore.tune.methods.whole_weights import WholeWeights


@dataclass(frozen=True, kw_only=True)
class LowRankGradients(WholeWeights):
    """Whole weights, by an optimiser whose state has the run's rank.

    Attributes:
        package: What the optimiser is in.
    """

    package: str

    def require(self) -> None:
        if find_spec(self.package) is None:
            raise ConfigError(
                f"The optimiser of {self.label} is in {self.package}, which is not installed: "
                "pip install 'frozencore[peers]'."
            )
