"""Checks of private training: options that reveal rows outside the privacy budget, and steps that learn nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import EarlyStoppingCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SaveStrategy

from frozencore.adapter.model import find_adapter
from frozencore.adapter.per_example import cores_in_use
from frozencore.adapter.trainable import require_own_parameters
from frozencore.errors import ConfigError, TrainingError
from frozencore.privacy import require_opacus
from frozencore.ranks import num_ranks

if TYPE_CHECKING:
    from transformers import Trainer

BY_SCORES = ("reduce_lr_on_plateau", "greedy")  # schedulers of transformers by option
CLASSES_BY_SCORES = {"ReduceLROnPlateau", "GreedyLR"}  # and by the name of their class
LOOK_AT_ROWS = (EarlyStoppingCallback, *INTEGRATION_TO_CALLBACK.values())
FAR = 100.0  # a clipping length this many times a row's typical gradient hides that gradient in noise


def private_cores(model: Any) -> dict[str, nn.Parameter]:
    """The cores that train, by layer, in the order of per-example gradients; other trained parameters are refused."""
    require_own_parameters(model)
    adapter_name, layers = cores_in_use(model)
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ConfigError(
                f"Private training trains cores alone, but {name!r} trains as well. Leave modules_to_save and "
                "trainable_token_indices out of the adapter's configuration."
            )
    cores: dict[str, Any] = {layer.name: layer.core(adapter_name) for layer in layers}
    return cores


def refuse_what_leaks(trainer: Trainer, *, basis_is_public: bool) -> None:
    """Refuse a ``Trainer`` that would reveal rows beside the noised steps, or spend the budget twice."""
    require_opacus()
    args: Any = trainer.args
    told = [name for name in args.report_to or () if name != "none"]
    rules = {
        "keeps the last step, but load_best_model_at_end chooses by scores": not args.load_best_model_at_end,
        "keeps the last step, but save_strategy='best' chooses by scores": args.save_strategy != SaveStrategy.BEST,
        f"has losses that are not noised, but report_to={told} publishes them": not told,
        "has checkpoints with the secret of its noise, but push_to_hub publishes them": not args.push_to_hub,
        "makes each step once, but auto_find_batch_size begins again": not args.auto_find_batch_size,
        "makes each step once, but ignore_data_skip repeats rows": not args.ignore_data_skip,
        "restores its own state, but restore_callback_states_from_checkpoint is set": (
            not args.restore_callback_states_from_checkpoint
        ),
        "scales no losses, but fp16 does; use bf16": not args.fp16,
        "bounds what one row reveals, but packing joins rows and splits them": not getattr(args, "packing", False),
        "has learning rates that follow from no score, but this lr_scheduler_type reads scores": (
            args.lr_scheduler_type not in BY_SCORES
        ),
        "runs in one process on one device (CUDA_VISIBLE_DEVICES=0)": num_ranks() == 1 and args.n_gpu <= 1,
        "draws from rows whose number is known, but train_dataset has none": hasattr(trainer.train_dataset, "__len__"),
    }
    for rule, kept in rules.items():
        if not kept:
            raise ConfigError(f"Private training {rule}. Leave it out of the Trainer's arguments.")
    if CLASSES_BY_SCORES & {base.__name__ for base in type(trainer.lr_scheduler).__mro__}:
        raise ConfigError(
            "Private training has learning rates that follow from no score, but this Trainer's scheduler "
            f"({type(trainer.lr_scheduler).__name__}) reads scores. Give it another one."
        )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LOOK_AT_ROWS):
            raise ConfigError(
                f"The privacy budget covers the noised steps only, but {type(callback).__name__} reads rows or "
                "publishes losses besides. Leave that callback out."
            )
    adapter_name, _ = cores_in_use(trainer.model)
    refuse_private_basis(trainer.model, adapter_name, basis_is_public=basis_is_public)


def refuse_private_basis(model: Any, adapter_name: str, *, basis_is_public: bool) -> None:
    """Refuse bases that were calibrated on rows, unless the caller says that these rows may be known."""
    _, config = find_adapter(model, adapter_name)
    if config.needs and not basis_is_public:
        raise ConfigError(
            f"The bases of {config.constructor!r} are calibrated on rows, and the privacy budget does not cover what "
            "they reveal. Use a constructor that reads no data (random, lora_xs), or calibrate on public rows and say "
            "basis_is_public=True."
        )


class Guard:
    """Stop a training in which a core gets no gradient or does not move, or in which noise drowns the gradients.

    Without these checks the noise would hide the fault.

    Args:
        sizes: The number of values of each core, by layer, in the order of per-example gradients.
        clip: C, the longest gradient that a row may add to a step.
        resumed: The first step with rows was checked before; later gradients may be as short as they like.

    Attributes:
        clipped_share: The share of rows of the last step that were clipped; 0 for a step without rows.
    """

    def __init__(self, sizes: Mapping[str, int], clip: float, *, resumed: bool = False) -> None:
        self._sizes, self._clip = sizes, clip
        self._norms: list[Tensor] = []
        self._has_gradient = torch.zeros(len(sizes), dtype=torch.bool)
        self._gradients_checked, self._moved = resumed, False
        self._before: dict[str, Tensor] = {}
        self.clipped_share = 0.0

    def before_step(self, cores: Mapping[str, Tensor], rate: float) -> None:
        """Copy the cores before the first step with a learning rate above 0."""
        if not self._moved and rate > 0:
            self._before = {name: core.detach().clone() for name, core in cores.items()}

    def record(self, gradients: Tensor, norms: Tensor) -> None:
        """Record the gradients (rows x Σr²) of the rows of a pass, and their lengths."""
        self._norms.append(norms)
        if not self._gradients_checked:
            found = torch.stack([part.any() for part in gradients.split([*self._sizes.values()], dim=1)])
            self._has_gradient |= found.cpu()

    def drop_step(self) -> None:
        """Drop the records of the current step, because it is repeated."""
        self._norms.clear()

    def after_step(self, cores: Mapping[str, Tensor]) -> None:
        """Check the first step with rows, and the first with a learning rate above 0."""
        norms = torch.cat(self._norms) if self._norms else torch.empty(0)
        self._norms.clear()
        self.clipped_share = float((norms > self._clip).float().mean()) if len(norms) else 0.0
        if len(norms) and not self._gradients_checked:
            self._require_gradients(norms)
        if self._before and not self._moved:
            self._require_moved(cores)

    def _require_gradients(self, norms: Tensor) -> None:
        names = list(self._sizes)
        without = [name for name, found in zip(names, self._has_gradient.tolist(), strict=True) if not found]
        if without:
            raise TrainingError(
                f"Private training needs a gradient for every core, but {without[0]!r} ({len(without)} of {len(names)})"
                " has none in any row of the first step: only noise would train it. Check the labels and the targets."
            )
        finite = norms[norms.isfinite()]
        if not len(finite) or float(finite.median()) * FAR < self._clip:
            typical = f"{float(finite.median()):.2g}" if len(finite) else "not finite"
            raise TrainingError(
                f"The gradient of a row is typically {typical} long, but private training clips at {self._clip:g} and "
                "adds noise in proportion: the noise would hide it. Clip near the typical length."
            )
        self._gradients_checked = True

    def _require_moved(self, cores: Mapping[str, Tensor]) -> None:
        still = [name for name, core in cores.items() if torch.equal(core, self._before[name])]
        if still:
            raise TrainingError(
                f"Every core moves in a step of private training, but {still[0]!r} ({len(still)} of "
                f"{len(cores)}) did not. Let the optimiser have all trainable parameters."
            )
        self._moved, self._before = True, {}
