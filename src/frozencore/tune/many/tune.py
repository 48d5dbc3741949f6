"""Train many tenants from Python, with rows in memory and a model with a basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel

from frozencore.tune.many.tenant import Tenant, Trained
from frozencore.tune.many.tenant_rows import naming_tenant
from frozencore.tune.many.train import SLOTS, train_many
from frozencore.tune.rows import Row
from frozencore.tune.rows.own_rows import render_rows
from frozencore.tune.rows.prompts import PROTOCOL_MAX_LENGTH, PromptEncoder, context_limit
from frozencore.tune.scoring.forward import base_of
from frozencore.tune.training.recipe import Recipe
from frozencore.words import Progress


def tune_many(
    model: PeftModel,
    tokenizer: Any,
    rows: Mapping[str, Sequence[Row]],
    recipe: Recipe,
    *,
    num_slots: int = SLOTS,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Trained]:
    """Train a core for each tenant, all at once, on the basis of the adapter "default", whose own core stays.

    ``swap_core(model, trained[name].cores)`` puts a core into the adapter, to use or save it; a :class:`CoreBank` holds
    all of them.

    Args:
        rows: Rows by tenant, in the forms of a file of own rows: prompt and completion, messages, or text.
        recipe: The recipe of every tenant.
        num_slots, checkpoint_dir, resume: See :func:`frozencore.tune.many.train.train_many`.

    Raises:
        DataError: A row is missing, malformed or too long; the message names the tenant.
        ConfigError, TrainingError: As in :func:`train_many`.
    """
    limit = context_limit(base_of(model), tokenizer)
    encoder = PromptEncoder(tokenizer, max_length=min(PROTOCOL_MAX_LENGTH, limit))
    tenants = {}
    for name, own in rows.items():
        with naming_tenant(repr(name)):
            tokens = encoder.training_rows(render_rows(own, "the list of rows", encoder))
        tenants[name] = Tenant(tokens, recipe)
    return train_many(
        model,
        tenants,
        pad_id=encoder.pad_id,
        num_slots=num_slots,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        progress=progress,
    )
