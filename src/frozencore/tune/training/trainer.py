"""transformers' ``Trainer`` for completions: no logits on prompts, no silent NaN, and the model is restored."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from frozencore.adapter.saved.card import begin_model_card
from frozencore.attributes import with_attributes
from frozencore.calibration.counted_tokens import IGNORED
from frozencore.tune.scoring.forward import base_of, forward_accepts
from frozencore.tune.training.batching import GROUPS, RowOrder
from frozencore.tune.training.recipe import Recipe

ADAPTERS_LOADED = "_hf_peft_config_loaded"  # transformers' own name


class RecipeTrainer(Trainer):
    """Takes rows and learning rates in the order of the recipe, and writes checkpoints without a model card."""

    def __init__(self, recipe: Recipe, **trainer: Any) -> None:
        self.recipe = recipe
        super().__init__(**trainer)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return RowOrder(self.train_dataset, self.recipe)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        share = partial(self.recipe.share_of_rate, num_steps=num_training_steps)
        self.lr_scheduler: LambdaLR = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write a checkpoint without a model card."""
        if output_dir is not None and isinstance(self.model, PeftModel):
            begin_model_card(Path(output_dir))
        super()._save(output_dir, state_dict)

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Return 0, because counting would take a tenth of a small model's step."""
        return 0


class CompletionTrainer(RecipeTrainer):
    """Compute logits only at tokens with loss, because the prompt's logits over a large vocabulary are expensive."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self._can_skip_logits:
            targets = inputs["labels"][:, 1:]
            kept = (targets != IGNORED).any(0).nonzero().squeeze(-1)
            inputs = inputs | {
                "logits_to_keep": kept,
                "shift_labels": targets[:, kept],
            }
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @cached_property
    def _can_skip_logits(self) -> bool:
        return bool(self.model_accepts_loss_kwargs) and forward_accepts(self.model, "logits_to_keep")


class GroupingTrainer(CompletionTrainer):
    """Run the batches of a step in sequence and add up their gradients."""

    _own = 1

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        groups: list[dict[str, Tensor]] = inputs[GROUPS]
        counted = self._get_num_items_in_batch(groups, self.args.device)
        if counted is None:
            self._own = sum(map(_num_targets, groups))
        losses = [super(GroupingTrainer, self).training_step(model, group, counted) for group in groups]
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute a batch's loss; for a model that averages over the batch, weighted by its share of the tokens."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if num_items_in_batch is not None else loss * (_num_targets(inputs) / self._own)


def _num_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def own_use_cache(model: nn.Module) -> AbstractContextManager[None]:
    """Restore ``config.use_cache`` afterwards, which the Trainer turns off."""
    config = base_of(model).config
    return with_attributes(config, use_cache=getattr(config, "use_cache", True))


def adapters_known(model: nn.Module) -> AbstractContextManager[None]:
    """Let the Trainer accept a quantised model with adapters, for any quantiser.

    transformers refuses a quantiser that it does not know to pass gradients, such as torchao's 4 bits, unless the base
    model is marked as having adapters. PEFT does not set this mark. The mark is restored afterwards.
    """
    base: Any = base_of(model)
    refused = isinstance(model, PeftModel) and getattr(base, "is_quantized", False)
    return with_attributes(base, **{ADAPTERS_LOADED: True}) if refused else nullcontext()
