"""transformers' ``Trainer`` for completions: no logits on prompts, rows grouped by length in a step, our scores.

A step is the same for any grouping except for rounding: the same rows, and the mean loss over all their completion
tokens.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from frozencore.adapter.card import begin_model_card
from frozencore.attributes import with_attributes
from frozencore.calibration.batches import IGNORED, predicted
from frozencore.calibration.preserve import own_random_state
from frozencore.distributed import all_gather, num_ranks
from frozencore.errors import DivergenceError, ModelError
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.scoring.forward import forward_accepts
from frozencore.tune.training.callbacks import LossMonitor, Selection, best_score, scores_in
from frozencore.tune.training.recipe import LEADS, Recipe
from frozencore.unwrapped_model import base_of

RowCollator = Callable[[Sequence[TokenRow]], dict[str, Any]]


class RowOrder(Sampler[int]):
    """The rows in the order of the recipe.

    accelerate distributes batches over processes in turn, so all processes together train on the rows of one step. It
    would fill the last batches of an epoch with rows that were trained on already, so the index behind the rows, that
    of a row without loss (:func:`row_without_loss`), fills them here.

    A training that resumes inside an epoch wraps the sampler so deeply that neither accelerate nor the Trainer finds it
    to set the epoch, so it asks for the epoch when it begins.

    Args:
        at_once: Rows of one pass of all processes.
        epoch: The epoch that begins, or goes on, when the rows are asked for.
    """

    def __init__(self, num_rows: int, recipe: Recipe, at_once: int, epoch: Callable[[], int]) -> None:
        self._num_rows, self._recipe, self._epoch = num_rows, recipe, epoch
        self._missing = -num_rows % at_once if num_ranks() > 1 else 0

    def __len__(self) -> int:
        return self._num_rows + self._missing

    def __iter__(self) -> Iterator[int]:
        yield from self._recipe.row_order(self._num_rows, self._epoch())
        yield from [self._num_rows] * self._missing


def row_without_loss(pad_id: int) -> TokenRow:
    """A row that adds nothing to a step."""
    return TokenRow("", [pad_id, pad_id], num_context=2)


GROUPS = "groups"
PASS_WORK = {"cpu": 1.5e8}  # fixed cost of a pass, in tokens times parameters
PASS_WORK_ELSEWHERE = 1e13  # an estimate for devices on which kernel launches dominate
WEIGHTS_READ = 75  # tokens that a pass costs however large the model is: it reads all weights, for one row or for many


def group_by_length(lengths: Sequence[int], most_tokens: int, overhead_tokens: int) -> list[list[int]]:
    """Group row indices, longest rows first, so that padded tokens and passes cost least.

    The groups are consecutive in the sorted lengths, and dynamic programming finds the best split. Filling groups
    greedily costs 2 to 25 % more on 8 rows of the paper's tasks (``tiny1m``, a CPU), or 3 to 8 % if a group also ends
    where its padding exceeds the fixed cost.

    Args:
        lengths: The lengths of the rows.
        most_tokens: The most tokens of a group, padding included; a longer row is a group of its own.
        overhead_tokens: The fixed cost of a group, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs, begins = [0], [0]  # of the best split of the first rows, and the start of its last group
    for end in range(1, len(order) + 1):
        most_rows = max(1, most_tokens // max(1, lengths[order[end - 1]]))  # of the shortest row of the group
        starts = [
            start
            for start in range(max(0, end - most_rows), end)
            if end - start == 1 or (end - start) * lengths[order[start]] <= most_tokens
        ]
        totals = [costs[start] + (end - start) * lengths[order[start]] + overhead_tokens for start in starts]
        best = min(range(len(starts)), key=totals.__getitem__)
        costs.append(totals[best])
        begins.append(starts[best])
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    return [order[start:end] for start, end in pairwise(reversed(cuts))]


def overhead_tokens_of(model: Any) -> int:
    """The fixed cost of a forward and backward pass on the model's device, in tokens.

    On a CPU core a pass of 16 to 1,024 tokens took 17 ms and 0.13 ms a token (the pocket model, 1.3 million
    parameters), 14 ms and 0.10 ms (``tiny1m``). With 135 million parameters in bfloat16 (SmolLM2) a pass of 64 to
    1,024 tokens took 110 ms and 1.4 ms a token: calls cost the same for any model, reading the weights does not.
    """
    work = PASS_WORK.get(next(model.parameters()).device.type, PASS_WORK_ELSEWHERE)
    return WEIGHTS_READ + round(work / sum(parameter.numel() for parameter in model.parameters()))


@dataclass(frozen=True)
class GroupingCollator:
    """Collate the rows of a step into batches under one key, each made by :class:`PaddingCollator`."""

    pad_id: int
    most_tokens: int
    overhead_tokens: int

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        lengths = [len(row.input_ids) for row in rows]
        groups = group_by_length(lengths, self.most_tokens, self.overhead_tokens)
        return {GROUPS: [PaddingCollator(self.pad_id)([rows[i] for i in group]) for group in groups]}


ADAPTERS_LOADED = "_hf_peft_config_loaded"  # transformers' own name


class CompletionTrainer(Trainer):
    """Train by the recipe's order of rows and learning rates, with logits only at tokens with loss.

    The last row of the data set is one without loss, which fills the last batches of several processes.

    The prompt's logits over a large vocabulary are expensive. The loss is the mean over the tokens of a step, however
    it is split into batches; a batch of groups (:class:`GroupingCollator`) is run group by group.
    """

    def __init__(self, recipe: Recipe, selection: Selection | None, monitor: LossMonitor, **trainer: Any) -> None:
        self.recipe, self.selection, self.monitor = recipe, selection, monitor
        super().__init__(compute_loss_func=loss_of_targets, **trainer)
        self._loss_shifts_labels = True  # the first label is not counted

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        at_once = self.args.train_batch_size * num_ranks()
        own = weakref.proxy(self)  # a cycle of references would keep the model

        def epoch() -> int:
            return int(own.state.global_step // (own.state.max_steps // own.recipe.epochs))

        return RowOrder(len(self.train_dataset) - 1, self.recipe, at_once, epoch)

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

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        targets = predicted(inputs["labels"])
        if self._can_skip_logits:
            kept = (targets != IGNORED).any(0).nonzero().squeeze(-1)
            inputs, targets = inputs | {"logits_to_keep": kept}, targets[:, kept]
        return super().compute_loss(model, inputs | {"labels": targets}, return_outputs, num_items_in_batch)

    @cached_property
    def _can_skip_logits(self) -> bool:
        return forward_accepts(self.model, "logits_to_keep")

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if GROUPS not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        groups: list[dict[str, Tensor]] = inputs[GROUPS]
        counted = self._get_num_items_in_batch(groups, self.args.device)
        losses = [super(CompletionTrainer, self).training_step(model, group, counted) for group in groups]
        return torch.stack(losses).sum()

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the model on validation rows, and report the scores.

        The Trainer keeps the step with the largest :data:`LEADS`: the number of the step if it is better than all
        before, else 0. So accuracy decides, then the loss, and of equal steps the first.
        """
        assert self.selection is not None
        started, step = time.perf_counter(), self.state.global_step
        try:
            with own_random_state():
                loss, accuracy = all_gather(self.selection.score(self.model))[0]  # one score decides for all processes
        except ModelError as error:
            raise DivergenceError(f"Training diverged at step {step} of {self.state.max_steps}: {error}") from error
        self.log({"eval_loss": loss} | ({} if accuracy is None else {"eval_accuracy": accuracy}))
        metrics = {LEADS: float(step if best_score(scores_in(self.state.log_history)).step == step else 0)}
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # changes its control
        self.monitor.paused_s += time.perf_counter() - started
        return metrics

    def _load_best_model(self) -> None:
        """Load the step to keep as a resumed step is loaded; the Trainer's way misses adapters with a name."""
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def loss_of_targets(output: Any, targets: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    """The loss of the token that each position predicts, for models too whose own loss does not shift the labels."""
    logits = output.logits
    return ForCausalLMLoss(logits, None, logits.shape[-1], num_items_in_batch, shift_labels=targets)


def adapters_known(model: nn.Module) -> AbstractContextManager[None]:
    """Let the Trainer accept a quantised model with adapters, for any quantiser.

    transformers refuses a quantiser that it does not know to pass gradients, such as torchao's 4 bits, unless the base
    model is marked as having adapters. PEFT does not set this mark. The mark is restored afterwards.
    """
    base: Any = base_of(model)
    refused = isinstance(model, PeftModel) and getattr(base, "is_quantized", False)
    return with_attributes(base, **{ADAPTERS_LOADED: True}) if refused else nullcontext()
