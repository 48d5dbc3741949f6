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
from frozencore.ranks import num_ranks, sum_over_ranks
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
    """Compute logits only at tokens with loss, because the prompt's logits over a large vocabulary are expensive.

    The loss is the mean over the tokens of a step, however it is split into batches.
    """

    _tokens_of_step = 1.0

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
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is not None:
            return found
        # the model averages over the batch, and the Trainer then over the batches: weigh each by its tokens
        share = _num_targets(inputs) * self.current_gradient_accumulation_steps / self._tokens_of_step
        return (found[0] * share, found[1]) if return_outputs else found * share

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """Count the tokens with loss of a step; None for a model that does not take their number."""
        counted = super()._get_num_items_in_batch(batch_samples, device)
        if counted is None and all("labels" in batch for batch in batch_samples):
            own = torch.tensor(sum(map(_num_targets, batch_samples)), device=device)
            self._tokens_of_step = max(1.0, float(sum_over_ranks(own)) / num_ranks())
        return counted

    @cached_property
    def _can_skip_logits(self) -> bool:
        return bool(self.model_accepts_loss_kwargs) and forward_accepts(self.model, "logits_to_keep")


class GroupingTrainer(CompletionTrainer):
    """Run the batches of a step in sequence and add up their gradients."""

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        groups: list[dict[str, Tensor]] = inputs[GROUPS]
        counted = self._get_num_items_in_batch(groups, self.args.device)
        losses = [super(GroupingTrainer, self).training_step(model, group, counted) for group in groups]
        return torch.stack(losses).sum()


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
