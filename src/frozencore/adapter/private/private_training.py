"""Private training of cores by a ``Trainer``: drawn rows, clipped gradients, noise, and the budget that is spent.

A step takes each row with probability q, clips the gradient of each row to the length C, adds noise of standard
deviation σ·C to every entry of the sum, and divides by the expected number of rows. Optimiser, learning rate and weight
decay see no row. So the budget bounds what the final cores reveal about one row; ``docs/private.md`` has the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from frozencore.adapter.packed_rows import keeps_rows_apart, packed_rows
from frozencore.adapter.per_example import RowLossFn, losses_and_gradients
from frozencore.adapter.private.checks import Guard, private_cores, refuse_what_leaks
from frozencore.adapter.private.sampling import drawn_loader, drawn_rows, new_secret, noise_of
from frozencore.calibration.batches import num_examples_of
from frozencore.errors import ConfigError, DataError, TrainingError
from frozencore.privacy import CLIP, PrivateBudget, Schedule

if TYPE_CHECKING:
    from transformers import Trainer

_MARGIN = 1 + 1e-5  # so that rounding makes no row longer than C


def clipped_sum(gradients: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """``Σ_i g_i · min(1, C / ‖g_i‖)`` over gradients of rows (rows x k), and the length ‖g_i‖ of each row.

    A row whose gradient is not finite adds nothing, so the bound holds for it too.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1)
    finite = norms.isfinite()
    factors = (clip / (norms * _MARGIN)).clamp(max=1.0).where(finite, 0.0)
    return factors @ gradients.masked_fill(~finite.unsqueeze(1), 0.0), norms


def add_noise(total: Tensor, secret: str, step: int, schedule: Schedule) -> None:
    """Replace the sum of a step's clipped gradients (k) by their noised mean: ``(total + σ C z) / rows a step``."""
    noise = noise_of(secret, step, total).to(total.device)
    total.add_(noise, alpha=schedule.noise_multiplier * schedule.budget.clip).div_(schedule.rows_a_step)


class PrivateTraining(TrainerCallback, ExportableState):
    """Make a ``Trainer`` train the cores of its model privately; call its ``train`` afterwards, once.

    A step has ``per_device_train_batch_size * gradient_accumulation_steps`` rows on average. The Trainer's own loss is
    not used. Logs get ``epsilon``, the budget spent so far, and ``clipped``, the share of the step's rows whose
    gradients were clipped. Do not publish logs and checkpoints: losses are exact, and checkpoints hold the secret of
    the noise.

    Args:
        trainer: A Trainer whose model has one active frozen-core adapter that trains cores alone.
        epsilon, delta, clip: See :class:`~frozencore.privacy.PrivateBudget`.
        loss_fn: The loss of each row; as for :func:`frozencore.per_example_gradients`.
        basis_is_public: The bases were calibrated on rows that may be known. Not needed if the constructor reads no
        data.

    Raises:
        ConfigError: The privacy budget does not cover an option, more than the cores train, or Opacus is missing.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        epsilon: float,
        delta: float,
        clip: float = CLIP,
        loss_fn: RowLossFn | None = None,
        basis_is_public: bool = False,
    ) -> None:
        budget = PrivateBudget(epsilon, delta, clip)
        if any(isinstance(callback, PrivateTraining) for callback in trainer.callback_handler.callbacks):
            raise ConfigError("A Trainer trains privately once, but has a PrivateTraining already. Make a new Trainer.")
        refuse_what_leaks(trainer, basis_is_public=basis_is_public)
        self._cores, self._basis_is_public = private_cores(trainer.model), basis_is_public
        self._trainer, self._budget, self._loss_fn = trainer, budget, loss_fn
        self._secret = new_secret()
        self._schedule: Schedule | None = None
        self._num_steps = 0
        self._rows_apart = False
        self._sizes = {name: core.numel() for name, core in self._cores.items()}
        self._sum = torch.zeros(sum(self._sizes.values()))
        self._plain_loader = trainer.get_train_dataloader
        replaced: Any = trainer
        replaced.get_train_dataloader, replaced.training_step = self._loader, self._training_step
        trainer.callback_handler.callbacks.insert(0, self)  # the others see what it adds to logs and checkpoints

    @property
    def schedule(self) -> Schedule:
        """The steps and the noise; known once the training has begun."""
        if self._schedule is None:
            raise TrainingError("The noise of a private training is known once it trains. Call trainer.train() first.")
        return self._schedule

    @property
    def num_steps(self) -> int:
        """The number of noised steps, including those before a resumed checkpoint."""
        return self._num_steps

    @property
    def spent(self) -> float:
        """The epsilon that the steps so far have spent."""
        return 0.0 if self._schedule is None else self._schedule.spent(self._num_steps)

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint: the options, and the secret of the rows and the noise."""
        return {"args": {}, "attributes": {"secret": self._secret, **self._settings()}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check the options once more, read the secret from a checkpoint, derive the noise from the number of steps."""
        refuse_what_leaks(self._trainer, basis_is_public=self._basis_is_public)
        if state.global_step:
            self._restore(state)
        elif self._schedule is not None:
            raise TrainingError(
                "A private training spends its budget once, but train() was called a second time. Resume from a "
                "checkpoint, or make a new Trainer and a new PrivateTraining, whose budgets add up."
            )
        num_rows = len(self._trainer.train_dataset)
        self._schedule = Schedule.of(self._budget, num_rows, self._rows_a_step(), state.max_steps)
        self._num_steps = state.global_step
        self._guard = Guard(self._sizes, self._budget.clip, resumed=state.global_step > 0)
        self._sum = torch.zeros_like(self._sum, device=next(iter(self._cores.values())).device)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Copy the cores before the first step that moves them."""
        optimizer: Any = self._trainer.optimizer
        self._guard.before_step(self._cores, optimizer.param_groups[0]["lr"])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check, before the cores move, that the step is a noised one."""
        self._require_noised(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check the step once more, in case the Trainer's loop is another one, and what it did to the cores."""
        self._require_noised(state.global_step)
        self._guard.after_step(self._cores)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        """Add the budget spent so far to the logs."""
        if "loss" in logs:
            logs["epsilon"] = self.spent
            logs["clipped"] = self._guard.clipped_share

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget the secret, so that a state saved after the training does not hold it."""
        state.stateful_callbacks.pop(type(self).__name__, None)

    def _require_noised(self, steps: int) -> None:
        if self._num_steps != steps:
            raise TrainingError(
                f"Every step of a private training is noised, but of {steps} only {self._num_steps} were. Leave the "
                "Trainer's own loop and its training_step as they are."
            )

    def _loader(self) -> Any:
        """Replaces ``get_train_dataloader``."""
        plain, passes = self._plain_loader(), self._trainer.args.gradient_accumulation_steps
        num_rows, counted = len(plain.dataset), len(self._trainer.train_dataset)
        if num_rows != counted:
            raise ConfigError(
                f"The noise of a private training follows from the rows of train_dataset ({counted}), but this "
                f"Trainer's loader has {num_rows}. Give the Trainer the rows that it shall train on."
            )
        rate = min(1.0, self._rows_a_step() / num_rows)
        batches = math.ceil(num_rows / self._trainer.args.per_device_train_batch_size)
        loader = drawn_loader(
            plain,
            lambda step: drawn_rows(self._secret, step, num_rows, rate),
            math.ceil(batches / passes),
            passes,
        )
        return self._trainer.accelerator.prepare(loader)

    def _training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Replaces ``training_step``: adds the clipped gradients of a pass, and after the last pass the noise."""
        step, schedule = inputs["step"], self.schedule
        if step != self._trainer.state.global_step or step >= schedule.num_steps:
            raise TrainingError(
                f"A private training makes its {schedule.num_steps} steps in their order, each once, but step {step} "
                f"came where {self._trainer.state.global_step} was due. Leave the Trainer's data loading as it is."
            )
        model.train()
        loss = torch.zeros((), device=self._sum.device)
        for batch in inputs["batches"]:
            packed = packed_rows(batch)
            if packed is not None:
                self._require_rows_apart(model, batch)
            losses, gradients = losses_and_gradients(model, batch, self._loss_fn)
            if packed is not None and len(losses) > 1 and not gradients.isfinite().all():
                raise TrainingError(
                    "In private training no row changes another's gradient, but a gradient of packed rows is not "
                    "finite, which can spread to the rows beside it. Use a collator that pads."
                )
            if len(losses) != inputs["num_rows"]:
                raise DataError(
                    f"Private training cuts the gradient of each row, but the collator made {len(losses)} rows of "
                    f"{inputs['num_rows']}. Use a collator that keeps rows apart."
                )
            total, norms = clipped_sum(gradients, self._budget.clip)
            self._guard.record(gradients, norms)
            self._sum.add_(total)
            loss += losses.sum().to(loss) / inputs["num_drawn"]
        if self._trainer.accelerator.sync_gradients:
            self._write_gradient(step)
        return loss

    def _write_gradient(self, step: int) -> None:
        """Set the noised mean as the gradient of the cores."""
        add_noise(self._sum, self._secret, step, self.schedule)
        sizes = [core.numel() for core in self._cores.values()]
        for core, part in zip(self._cores.values(), self._sum.split(sizes), strict=True):
            core.grad = part.view_as(core).to(core.device, core.dtype, copy=True)
        self._sum.zero_()
        self._num_steps += 1

    def _require_rows_apart(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Check a batch of packed rows: a row that others see would change their gradients too."""
        if num_examples_of(batch) > 1:  # some kernels look at the positions of a single sequence only
            raise ConfigError(
                f"Private training takes packed rows in one sequence, but a batch has {num_examples_of(batch)}. Use "
                "DataCollatorWithFlattening, or a collator that pads."
            )
        if not self._rows_apart and not keeps_rows_apart(model):
            raise ConfigError(
                "Private training of packed rows needs a model that keeps rows apart by their position_ids, but "
                "in this one rows see one another. Use a collator that pads."
            )
        self._rows_apart = True

    def _rows_a_step(self) -> int:
        args = self._trainer.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps

    def _settings(self) -> dict[str, Any]:
        """The values that a training and its checkpoint must share."""
        return {
            **asdict(self._budget), "num_rows": len(self._trainer.train_dataset),
            "rows_a_step": self._rows_a_step(), "max_steps": self._trainer.state.max_steps,
        }  # fmt: skip

    def _restore(self, state: TrainerState) -> None:
        """Read the secret from a checkpoint of the same training."""
        saved: Any = state.stateful_callbacks.get(type(self).__name__)
        kept = dict(saved["attributes"]) if isinstance(saved, Mapping) else {}
        secret, settings = kept.pop("secret", None), self._settings()
        if secret is None or kept != settings:
            odd = [name for name in settings if kept.get(name) != settings[name]] or ["its secret"]
            raise TrainingError(
                f"A private training resumes from its own checkpoint, but {odd[0]} is {kept.get(odd[0])} in the "
                f"checkpoint and {settings.get(odd[0])} now. Resume with the same rows and options."
            )
        self._secret = secret
