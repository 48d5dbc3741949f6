"""What private training refuses: all that would tell about rows without being counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import EarlyStoppingCallback

from frozencore.adapter.bases.refresh import Refresh
from frozencore.adapter.per_example import cores_in_use
from frozencore.adapter.trainable import require_own_parameters
from frozencore.errors import ConfigError
from frozencore.privacy import require_opacus
from frozencore.ranks import num_ranks

if TYPE_CHECKING:
    from transformers import Trainer


def private_cores(model: Any) -> dict[str, nn.Parameter]:
    """The cores that train, by layer, in the order of gradients of each row."""
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
    """Refuse a ``Trainer`` that would tell about its rows beside the noised steps, or spend the budget twice."""
    require_opacus()
    args: Any = trainer.args
    told = [name for name in args.report_to or () if name != "none"]
    rules = {
        "keeps the last step, but load_best_model_at_end chooses by scores": not args.load_best_model_at_end,
        f"has losses that are not noised, but report_to={told} publishes them": not told,
        "has checkpoints with the secret of its noise, but push_to_hub publishes them": not args.push_to_hub,
        "makes each step once, but auto_find_batch_size begins again": not args.auto_find_batch_size,
        "makes each step once, but ignore_data_skip repeats rows": not args.ignore_data_skip,
        "restores its own state, but restore_callback_states_from_checkpoint is set": (
            not args.restore_callback_states_from_checkpoint
        ),
        "scales no losses, but fp16 does; use bf16": not args.fp16,
        "runs in one process on one device": num_ranks() == 1 and args.n_gpu <= 1,
        "draws from rows whose number is known, but train_dataset has none": hasattr(trainer.train_dataset, "__len__"),
    }
    for rule, kept in rules.items():
        if not kept:
            raise ConfigError(f"Private training {rule}. Leave it out of the Trainer's arguments.")
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback | Refresh):
            raise ConfigError(
                f"Private training counts noised steps alone, but {type(callback).__name__} looks at rows beside them. "
                "Leave that callback out."
            )
    _refuse_private_basis(trainer.model, basis_is_public=basis_is_public)


def _refuse_private_basis(model: Any, *, basis_is_public: bool) -> None:
    adapter_name, _ = cores_in_use(model)
    config = model.peft_config[adapter_name]
    reads_data = bool(config.constructor_entry.needs(config.basis_options()))
    if reads_data and not basis_is_public:
        raise ConfigError(
            f"The bases of {config.constructor!r} are calibrated on rows, and tell about them without being counted. "
            "Use a constructor that reads no data (random, lora_xs), or calibrate on public rows and say "
            "basis_is_public=True."
        )
