"""``--dry-run`` of ``tune`` and ``tune-many``: show what a run would read and need, and its first rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from rich.text import Text
from torch import nn

from frozencore.cli.console import console
from frozencore.cli.display import StageDisplay
from frozencore.cli.flags import as_flags
from frozencore.cli.run_summary import places_in_words, recipe_in_words
from frozencore.cli.tasks import marked
from frozencore.tune.adapt import on_named_basis
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import memory_bytes, size_of, training_state_bytes, values_at_once
from frozencore.tune.load import Inputs, prepare, resolve_targets, without_weights
from frozencore.tune.many.run import tenant_of
from frozencore.tune.many.tenant_rows import read_tenants, tenants_of
from frozencore.tune.rows import TokenRow
from frozencore.tune.run import recipe_of
from frozencore.tune.training.reporting import require_reporters
from frozencore.words import Progress, bytes_in_words, num_of

SHOWN = 3  # training rows


def print_dry_run(config: RunConfig, defaults: Mapping[str, Any], num_slots: int | None = None) -> None:
    """Read a run's model and rows, and print what it would do.

    Args:
        defaults: The verb's own defaults.
        num_slots: Tenants that would train at once; None for a run without tenants.

    Raises:
        FrozenCoreError: The run itself would fail before scoring and training.
    """
    with StageDisplay(console) as progress:
        progress.started()
        inputs, rows, lines = _run(config, progress) if num_slots is None else _tenants(config, num_slots, progress)
    lines.append(Text("\nThe options that differ from the defaults, as a file for --config", style="bold"))
    lines.append(Text(as_flags(config, defaults, many=num_slots is not None).rstrip()))
    lines += _training_rows(rows[:SHOWN], inputs.encoder.tokenizer.decode)
    for line in lines:
        console.print(line, soft_wrap=True)


def _run(config: RunConfig, progress: Progress) -> tuple[Inputs, Sequence[TokenRow], list[Text]]:
    """Read the rows of a run; say what they are and what training on them needs."""
    require_reporters(config.training.report_to or ())
    config = on_named_basis(config)
    inputs = prepare(config.model, config.rows, config.scoring, progress)
    return inputs, inputs.rows.train, [*_rows(config, inputs), *_cost(config, inputs)]


def _tenants(config: RunConfig, num_slots: int, progress: Progress) -> tuple[Inputs, Sequence[TokenRow], list[Text]]:
    """Read the rows of all tenants, and say what each trains on; the rows to show are the first tenant's."""
    config, files = tenants_of(config)
    inputs, own = read_tenants(config, files, progress)
    at_once = min(num_slots, len(own))
    basis = (
        f"the basis {config.method.basis}"
        if config.method.basis
        else f"a basis of {num_of(len(inputs.rows.calibration), 'row')}"
    )
    lines = [Text(f"{num_of(len(own), 'tenant')} on {basis}, {at_once} at a time.")]
    for name, one in own.items():
        rows, tenant = one.rows, tenant_of(one, inputs.model)
        tokens = sum(len(row.input_ids) for row in rows.train)
        said = (
            f"{name}: {num_of(len(rows.train), 'row')} to train on ({num_of(tokens, 'token')}), {len(rows.held_out):,} "
            f"to score; {num_of(tenant.num_steps, 'step')}. {rows.reading.in_words if rows.reading else ''}"
        )
        lines.append(Text(said.rstrip()))
    if (adapted := _adapted(config, inputs)) is not None:
        lines.append(Text(f"{config.method.name}: {num_of(values_at_once(adapted), 'trained value')} each."))
    return inputs, next(iter(own.values())).rows.train, lines


def _training_rows(rows: Sequence[TokenRow], decode: Callable[[list[int]], str]) -> Iterator[Text]:
    for row in rows:
        yield Text(f"\nTraining row {row.id} (the marked part carries the loss)", style="bold")
        starts = [0, *(stop for _, stop in row.loss_spans)]
        for last, (start, stop) in zip(starts, row.loss_spans, strict=False):
            yield marked(decode(row.input_ids[last:start]), decode(row.input_ids[start:stop]))


def _rows(config: RunConfig, inputs: Inputs) -> Iterator[Text]:
    rows = inputs.rows
    if rows.reading is not None:
        yield Text(rows.reading.in_words)
    sets = {
        "train on": rows.train,
        "score": rows.held_out,
        **({"calibrate on": rows.calibration} if config.method.moments_needed else {}),
        **({} if rows.validation is None else {"choose a step by": rows.validation.tokens}),
    }
    for use, tokens in sets.items():
        lengths = [len(row.input_ids) for row in tokens]
        with_loss = sum(stop - start for row in tokens for start, stop in row.loss_spans)
        yield Text(
            f"{num_of(len(tokens), 'row')} to {use}: {num_of(sum(lengths), 'token')}, {with_loss:,} of them with loss; "
            f"a row has {median(lengths):.0f} in the middle, {max(lengths):,} at most (limit "
            f"{inputs.encoder.max_length})."
        )
    skipped = rows.num_skipped if rows.task else 0  # otherwise rows.reading has printed it
    for count, said in ((rows.num_cut, "cut at the beginning of the prompt"), (skipped, "left out")):
        if count:
            yield Text(f"{num_of(count, 'row')} too long: {said}.")


def _cost(config: RunConfig, inputs: Inputs) -> Iterator[Text]:
    recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
    yield Text(recipe_in_words(recipe.num_steps(len(inputs.rows.train)), recipe.content(), recipe.epochs))
    memory = memory_bytes(config, size_of(inputs.model.config))
    values = ""
    if (adapted := _adapted(config, inputs)) is not None:
        at_once = values_at_once(adapted)
        places = places_in_words(resolve_targets(config.method, inputs.model))
        state = f"{training_state_bytes(at_once):,} bytes of state held while training"
        values = f"{at_once:,} trained values{places} ({state}), "
    yield Text(f"{config.method.name}: {values}about {bytes_in_words(memory)} of memory with the model.")


def _adapted(config: RunConfig, inputs: Inputs) -> nn.Module | None:
    """Build the adapted model without its weights' values; None if the method's adapter depends on them."""
    if config.method.entry.changes_base:
        return None
    with torch.device("meta"), suppress(NotImplementedError):
        model = without_weights(inputs.model.config)
        return config.method.entry.add(
            model, config.method.adapter_options(resolve_targets(config.method, inputs.model))
        )
    return None
