"""GaLore (Zhao et al., 2024) and APOLLO (Zhu et al., 2025): the weights of the targets themselves train.

Their optimisers keep Adam's moments in r directions of each weight's gradient, which are chosen anew in every round of
``refresh``. What is small is thereby the state and not the adapter: it holds whole weights, through PEFT's
``modules_to_save``. Both optimisers are their authors' (extra ``frozencore[peers]``), as transformers calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from frozencore.errors import ConfigError
from frozencore.lab.methods.from_peft import FromPEFT
from frozencore.lab.methods.method import AdapterOptions
from frozencore.lab.methods.targeted import targeted_layers

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class LowRankGradients(FromPEFT):
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

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig
        from peft.utils.constants import DUMMY_TARGET_MODULES

        names = targeted_layers(model, options.targets)
        if not names:
            raise ValueError("no linear layer is called so")
        return LoraConfig(target_modules=DUMMY_TARGET_MODULES, modules_to_save=names, task_type="CAUSAL_LM")
