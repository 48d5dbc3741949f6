"""The loaded inputs of a run: a model, its tokenizer, and the rows of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from frozencore.calibration.batches import Batch
from frozencore.errors import ConfigError, ModelError
from frozencore.tune.config import RunConfig
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.prompts import PROTOCOL_MAX_LENGTH, PromptEncoder, context_limit
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.run.models import load_model
from frozencore.tune.run.read_rows import TOO_LONG, prepare_rows
from frozencore.tune.run.row_sets import RowCache, RunRows
from frozencore.tune.scoring import Prediction, RowLosses, TaskScore
from frozencore.words import Progress, num_of

CALIBRATION_BATCH = 8


@dataclass(frozen=True)
class Score:
    """The scores of a model on the evaluation rows: nats per completion token, the task's accuracy if it has one,
    sample completions if requested, the loss on the texts of other tasks by name, and the held-out loss by row."""

    held_out_loss: float
    task: TaskScore | None = None
    samples: tuple[Prediction, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    row_losses: RowLosses | None = None


@dataclass(frozen=True)
class Base:
    """A loaded base model and its tokenizer, for any number of successive runs."""

    model: PreTrainedModel
    tokenizer: Any


@dataclass
class PreparedRun:
    """A loaded model with one run's rows, and the base model's score for runs that share them."""

    model: PreTrainedModel
    encoder: PromptEncoder
    rows: RunRows
    before: Score | None = None


def prepare(
    config: RunConfig, progress: Progress, base: Base | None = None, *, row_cache: RowCache | None = None
) -> PreparedRun:
    """Load the inputs of a run. Errors in the input are raised here, before anything is written.

    Args:
        base: The configured model, loaded before.
        row_cache: Holds rows that earlier runs have read and tokenised.
    """
    progress("load", 0, None, config.model.name)
    base = base or Base(*load_model(config.model.name, dtype=config.model.dtype, device=config.model.device))
    limit = context_limit(base.model, base.tokenizer)
    encoder = PromptEncoder(
        base.tokenizer,
        style=config.rows.prompt_style,
        today=config.rows.prompt_date,
        max_length=config.rows.max_length or min(PROTOCOL_MAX_LENGTH, limit),
        too_long="truncate" if config.rows.truncate else "refuse",
        loss_on=config.rows.loss_on,
    )
    if encoder.max_length > limit:
        raise ConfigError(f"--max-length {encoder.max_length} is beyond the model's context of {limit} tokens.")
    rows = prepare_rows(config, encoder, row_cache)
    require_embedded(base.model, base.tokenizer, (*rows.train, *rows.held_out, *rows.calibration))
    progress("load", 1, 1, told_of_rows(rows))
    return PreparedRun(base.model, encoder, rows)


def require_embedded(model: Any, tokenizer: Any, rows: Iterable[TokenRow]) -> None:
    """Raise a ``ModelError`` for a token that the model has no embedding of."""
    size = model.get_input_embeddings().weight.shape[0]
    largest = max((max(row.input_ids) for row in rows), default=0)
    if largest >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"Rows hold the token {token!r} ({largest}), but the model has embeddings of {size} tokens only. Use the "
            "model's own tokenizer, or add the embeddings first (resize_token_embeddings)."
        )


def told_of_rows(rows: RunRows) -> str:
    """What was read, and what of it was left out, cut, changed or not used, on one line."""
    said = [f"{num_of(len(rows.train), 'row')} to train on, {len(rows.held_out):,} to score"]
    if rows.num_cut:
        said.append(f"{num_of(rows.num_cut, 'prompt')} cut")
    if rows.num_skipped:
        said.append(f"{num_of(rows.num_skipped, 'row')} skipped as too long")
    if rows.reading:
        said += [f"{count:,} left out: {why}" for why, count in rows.reading.left_out.items() if why != TOO_LONG]
        said += rows.reading.not_as_given
    return ", ".join(said)


def calibration_batches(rows: Iterable[TokenRow], pad_id: int) -> list[Batch]:
    """Group the calibration rows into batches of similar length, to save padding."""
    by_length = sorted(rows, key=lambda row: len(row.input_ids))
    return list(make_batches(by_length, pad_id=pad_id, batch_size=CALIBRATION_BATCH))
