"""DPO by TRL's own trainer, on our rows, in the order and at the rates of the recipe.

TRL would copy the adapter as its reference. The copy is deleted before the first step; TRL then turns the adapter off
to compute the reference, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from peft import PeftModel
from torch import nn
from trl import DPOConfig, DPOTrainer

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.attributes import with_attributes
from frozencore.calibration.counted_tokens import IGNORED
from frozencore.tune.rows import TokenRow
from frozencore.tune.scoring.forward import base_of
from frozencore.tune.training.batching import RowCollator
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.reporting import ReportedArguments
from frozencore.tune.training.trainer import RecipeTrainer

REFERENCE = "ref"  # TRL's name


@dataclass
class PreferenceArguments(DPOConfig, ReportedArguments):
    """The arguments of TRL's trainer: its own defaults for DPO, ours for everything else."""

    activation_checkpointing: bool | None = False
    gradient_checkpointing: bool = False  # the older name
    bf16: bool | None = False


class PreferenceTrainer(RecipeTrainer, DPOTrainer):
    """TRL's ``DPOTrainer`` on rows of preferences; the adapter keeps its initial values, whatever they are."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: PeftModel,
        train_dataset: Sequence[TokenRow],
        data_collator: RowCollator,
        **trl: Any,
    ) -> None:
        trained = [(parameter, parameter.data) for parameter in model.parameters() if parameter.requires_grad]
        rows = Dataset.from_dict({"row": range(len(train_dataset))})
        config = model.peft_config["default"]
        # TRL's reference gets no bases, because it is deleted at once
        unbuilt = with_attributes(config, load_bases=True) if isinstance(config, FrozenCoreConfig) else nullcontext()
        with unbuilt:
            super().__init__(
                recipe,
                model=model,
                train_dataset=rows,
                data_collator=_in_words_of_trl(train_dataset, data_collator),
                **trl,
            )
        model.delete_adapter(REFERENCE)
        for parameter, values in trained:  # TRL rounds them on a quantised model
            parameter.data = values

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        """Return the data set unchanged, because our rows are tokens already."""
        return dataset

    def _send_telemetry(self) -> None:
        """Send nothing, because a run on local files opens no connection."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no card, because nobody reads that of a checkpoint."""


def _in_words_of_trl(
    rows: Sequence[TokenRow], collate: RowCollator
) -> Callable[[list[dict[str, int]]], dict[str, Any]]:
    def batch(numbers: list[dict[str, int]]) -> dict[str, Any]:
        found = collate([rows[one["row"]] for one in numbers])
        completions = found.pop("labels").ne(IGNORED)
        return {**found, "completion_mask": completions.long()}

    return batch


@contextmanager
def as_before(model: nn.Module, tokenizer: Any) -> Iterator[None]:
    """Restore the model's forward pass, padding tokens and tags afterwards, which TRL changes."""
    base = base_of(model)
    held = [
        (tokenizer, "pad_token", tokenizer.pad_token),
        (base.config.get_text_config(), "pad_token_id", base.config.get_text_config().pad_token_id),
        (base.generation_config, "pad_token_id", base.generation_config.pad_token_id),
    ]
    own = {name: vars(base)[name] for name in ("forward", "model_tags") if name in vars(base)}
    try:
        yield
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)
        for name in ("forward", "model_tags"):
            vars(base).pop(name, None)
        vars(base).update(own)
