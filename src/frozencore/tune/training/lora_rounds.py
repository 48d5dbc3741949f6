"""LoRA in rounds (ReLoRA, Lialin et al., 2023): ``y = (W + s·Σ_j B_j A_j) x``, the factors of the last round trained.

At the end of a round its factors are added to the sum. The next round starts with a new random A, a zero B and fresh
optimizer state. At the end of the training the adapter is a LoRA of rank K·r: the factors of K rounds side by side.

During training the sum is added to a copy of each float32 weight, which replaces the weight; the unchanged weight is
restored afterwards. A 16-bit or quantised weight would lose small updates to rounding, so the earlier factors are then
computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from frozencore.adapter.bases.in_rounds import InRounds
from frozencore.adapter.layer import is_linear
from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ConfigError

PLAIN = {
    "init_lora_weights": True, "use_dora": False, "use_rslora": False, "lora_bias": False, "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": None,
}  # fmt: skip
"""Settings of a LoRA that trains in rounds, so that the sum of its rounds is a LoRA of the same scale."""


class LoRARounds(InRounds):
    """Train a PEFT LoRA in rounds.

    Args:
        model: A model with a plain LoRA on linear layers.
        rounds: At least 1.

    Raises:
        ConfigError: The model has another adapter, or a LoRA whose rounds do not add up to a LoRA.
    """

    def __init__(self, model: nn.Module, rounds: int, *, adapter_name: str = "default") -> None:
        self.rounds, self.adapter_name = rounds, adapter_name
        self.config: LoraConfig = _plain_config(model, adapter_name)
        self.layers = {
            name: LayerRounds(module, adapter_name)
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer) and adapter_name in module.lora_A
        }

    @property
    def round_now(self) -> int:
        return 1 + next(iter(self.layers.values())).num_earlier

    @property
    def earlier_values(self) -> int:
        return sum(factor.numel() for layer in self.layers.values() for factor in (layer.A, layer.B))

    def state_tensors(self) -> Iterator[Tensor]:
        """The earlier factors, and the copies of weights."""
        for layer in self.layers.values():
            yield from (layer.A, layer.B)
            if layer.is_laid_in_a_copy:
                yield layer.base.weight

    def begin(self, args: TrainingArguments, state: TrainerState) -> None:
        """Restore the earlier factors from a checkpoint."""
        self._seed = args.seed
        if self._begun_at:
            saved = self.saved_state(args, state)
            for name, layer in self.layers.items():
                layer.take_up(saved[f"{name}.A"], saved[f"{name}.B"])
        for layer in self.layers.values():
            layer.lay()

    def next_round(self, optimizer: torch.optim.Optimizer) -> None:
        with own_random_state():
            torch.manual_seed(self._seed + self.round_now)
            for layer in self.layers.values():
                layer.begin_round()
                for factor in layer.factors:
                    optimizer.state.pop(factor, None)

    def take_back_round(self) -> None:
        for layer in self.layers.values():
            layer.take_back()

    def state_to_save(self) -> dict[str, Tensor]:
        """The factors of the earlier rounds, side by side."""
        if self.round_now == 1:
            return {}
        return {f"{name}.A": layer.A for name, layer in self.layers.items()} | {
            f"{name}.B": layer.B for name, layer in self.layers.items()
        }

    def close(self) -> None:
        for layer in self.layers.values():
            layer.lift()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Turn the adapter into the LoRA of all rounds."""
        num_rounds = self.round_now
        self.close()
        for layer in self.layers.values():
            layer.become_the_sum()
        self.config.r *= num_rounds
        self.config.lora_alpha *= num_rounds


class LayerRounds:
    """The rounds of a LoRA on one layer with n inputs and m outputs.

    Attributes:
        r: The rank of one round.
        A, B: The factors of the earlier rounds side by side: (j·r x n) and (m x j·r).
    """

    def __init__(self, module: LoraLayer, adapter_name: str) -> None:
        self.module, self.adapter_name = module, adapter_name
        self.base: Any = module.get_base_layer()
        if not is_linear(self.base):
            raise ConfigError(
                f"LoRA trains in rounds on linear layers, but one of its layers is a {type(self.base).__name__}. Name "
                "other targets, or leave refresh out."
            )
        self.r = len(self._linear_A.weight)
        self.A, self.B = self._linear_A.weight.detach()[:0], self._linear_B.weight.detach()[:, :0]
        self._own_weight: nn.Parameter | None = None
        self._beside: RemovableHandle | None = None

    @property
    def _linear_A(self) -> Any:
        return self.module.lora_A[self.adapter_name]

    @property
    def _linear_B(self) -> Any:
        return self.module.lora_B[self.adapter_name]

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A (r x n) and B (m x r) of the current round."""
        return self._linear_A.weight, self._linear_B.weight

    @property
    def num_earlier(self) -> int:
        return len(self.A) // self.r

    @property
    def is_laid_in_a_copy(self) -> bool:
        return self._own_weight is not None

    def take_up(self, A: Tensor, B: Tensor) -> None:
        """Restore the factors of the earlier rounds."""
        like = self._linear_A.weight
        self.A, self.B = A.to(like.device, like.dtype), B.to(like.device, like.dtype)

    def begin_round(self) -> None:
        """Add the factors to the sum, and start new factors whose product is zero."""
        self.lift()
        A, B = self.factors
        self.A, self.B = torch.cat([self.A, A.detach()]), torch.cat([self.B, B.detach()], dim=1)
        self.module.reset_lora_parameters(self.adapter_name, True)
        self.lay()

    def take_back(self) -> None:
        """Undo :meth:`begin_round`."""
        self.lift()
        A, B = self.factors
        earlier = len(self.A) - self.r
        with torch.no_grad():
            A.copy_(self.A[earlier:])
            B.copy_(self.B[:, earlier:])
        self.A, self.B = self.A[:earlier], self.B[:, :earlier]
        self.lay()

    def lay(self) -> None:
        """Include the earlier rounds in the computation: in a copy of a plain float32 weight, beside other weights."""
        self.lift()
        if not len(self.A):
            return
        scale, weight = self.module.scaling[self.adapter_name], self.base.weight
        if type(self.base) is nn.Linear and type(weight) is nn.Parameter and weight.dtype == torch.float32:
            self._own_weight = weight
            merged = torch.addmm(weight.detach(), self.B, self.A, alpha=scale)
            self.base.weight = nn.Parameter(merged, requires_grad=False)
            return

        def add(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
            return result + (scale * linear(linear(given[0].to(self.A.dtype), self.A), self.B)).to(result.dtype)

        self._beside = self.module.register_forward_hook(add)

    def lift(self) -> None:
        """Remove the earlier rounds from the computation; the base layer gets its own weight back."""
        if self._own_weight is not None:
            self.base.weight, self._own_weight = self._own_weight, None
        if self._beside is not None:
            self._beside.remove()
            self._beside = None

    def become_the_sum(self) -> None:
        """Turn the layer into the LoRA of all rounds: their factors side by side, at the same scale."""
        A, B = self.factors
        rank = len(self.A) + self.r
        self.module.lora_alpha[self.adapter_name] *= rank // self.r
        self.module.r[self.adapter_name] = rank
        self._linear_A.weight = nn.Parameter(torch.cat([self.A, A.detach()]))
        self._linear_B.weight = nn.Parameter(torch.cat([self.B, B.detach()], dim=1))
        self._linear_A.out_features = self._linear_B.in_features = rank


def _plain_config(model: nn.Module, adapter_name: str) -> LoraConfig:
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(config, LoraConfig) or config.modules_to_save:
        raise ConfigError("Only a frozen core or a LoRA trains in rounds. Leave refresh out.")
    for option, plain in PLAIN.items():
        if (value := getattr(config, option)) != plain:
            raise ConfigError(
                f"The rounds of a LoRA add up to a LoRA, but not with {option}={value!r:.50}. Leave it or refresh out."
            )
    return config
