"""The screens of a run: what it would read and need (``--dry-run``), and its score, cost and samples at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import mean, median, variance
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from frozencore.adapter.core import Core
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.state_dict import layers_in
from frozencore.cli.display import table_of
from frozencore.files.adapter_folder import PEFT_TYPE, read_config
from frozencore.files.atomic_write import read_lines
from frozencore.files.names import WEIGHTS_FILE
from frozencore.progress import Progress
from frozencore.text import bytes_in_words, num_of, one_line
from frozencore.tune.accuracy import percent, wilson
from frozencore.tune.adapt import limits_of_basis, on_named_basis, starting_core
from frozencore.tune.adapters import add_adapter
from frozencore.tune.config import RunConfig, as_flags
from frozencore.tune.cost import estimate_bytes, num_trainable, outline_of, training_state_bytes
from frozencore.tune.folder import SAMPLES
from frozencore.tune.load import Inputs, prepare, resolve_targets, without_weights
from frozencore.tune.many.run import tenant_of
from frozencore.tune.many.tenant_rows import read_tenants, tenants_of
from frozencore.tune.record import TunedRecord
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.run import recipe_of
from frozencore.tune.training.recipe import FEWEST_STEPS, require_reporters

SHOWN = 3  # training rows of a dry run
STILL_FALLING = 0.1  # drop of the loss, as a share, from one quarter of the steps to the next
MARKS = "⟦", "⟧"  # around the tokens that carry the loss
MOST_PLACES = 8  # names of layers, or of adapters, on one line
END_OF_PROMPT, MOST_OF_ANSWER = 200, 2_000  # characters; samples.jsonl holds all of them


def dry_run(config: RunConfig, progress: Progress, num_slots: int | None = None) -> list[Text]:
    """Read a run's model and rows, and say what it would do. What fails before scoring in a run fails here too.

    Args:
        num_slots: Tenants that would train at once; None for a run without tenants.
    """
    inputs, rows, lines = _of_run(config, progress) if num_slots is None else _of_tenants(config, num_slots, progress)
    if starting_core(config.method) is not None:
        lines.append(Text(f"The start: {config.method.start_from}."))
    lines += [Text(f"Warning: {limit}", style="yellow") for limit in limits_of_basis(config.method.basis)]
    lines.append(Text("\nThe options that differ from the defaults, as a file for --config", style="bold"))
    lines.append(Text(as_flags(config, many=num_slots is not None).rstrip()))
    return [*lines, *_training_rows(rows[:SHOWN], inputs.encoder.tokenizer.decode)]


def _of_run(config: RunConfig, progress: Progress) -> tuple[Inputs, Sequence[TokenRow], list[Text]]:
    """Read the rows of a run; say what they are and what training on them needs."""
    require_reporters(config.training.report_to or ())
    config = on_named_basis(config)
    inputs = prepare(config.model, config.rows, config.scoring, progress, outline_of(config.model))
    return inputs, inputs.rows.train, [*_sets(config, inputs), *_needed(config, inputs)]


def _of_tenants(config: RunConfig, num_slots: int, progress: Progress) -> tuple[Inputs, Sequence[TokenRow], list[Text]]:
    """Read the rows of all tenants, and say what each trains on; the rows to show are the first tenant's."""
    config, files = tenants_of(config)
    inputs, tenants = read_tenants(config, files, progress, outline_of(config.model))
    at_once = min(num_slots, len(tenants))
    basis = (
        f"the basis {config.method.basis}"
        if config.method.basis
        else f"a basis of {num_of(len(inputs.rows.calibration), 'row')}"
    )
    lines = [Text(f"{num_of(len(tenants), 'tenant')} on {basis}, {at_once} at a time.")]
    for name, one in tenants.items():
        rows, tenant = one.rows, tenant_of(one, inputs.model)
        tokens = sum(len(row.input_ids) for row in rows.train)
        line = (
            f"{name}: {num_of(len(rows.train), 'row')} to train on ({num_of(tokens, 'token')}), {len(rows.held_out):,} "
            f"to score; {num_of(tenant.num_steps, 'step')}. {rows.used.in_words}"
        )
        lines.append(Text(line.rstrip()))
    if (adapted := _adapted(config, inputs)) is not None:
        lines.append(Text(f"{config.method.name}: {num_of(num_trainable(adapted), 'trained value')} each."))
    return inputs, next(iter(tenants.values())).rows.train, lines


def _training_rows(rows: Sequence[TokenRow], decode: Callable[[list[int]], str]) -> Iterator[Text]:
    for row in rows:
        yield Text(f"\nTraining row {row.id} (the marked part carries the loss)", style="bold")
        starts = [0, *(stop for _, stop in row.loss_spans)]
        for last, (start, stop) in zip(starts, row.loss_spans, strict=False):
            completion = f"{MARKS[0]}{decode(row.input_ids[start:stop])}{MARKS[1]}"
            yield Text.assemble(decode(row.input_ids[last:start]), (completion, "reverse"))


def _sets(config: RunConfig, inputs: Inputs) -> Iterator[Text]:
    rows = inputs.rows
    yield from map(Text, rows.used.lines)
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


def _needed(config: RunConfig, inputs: Inputs) -> Iterator[Text]:
    recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
    yield Text(recipe_in_words(recipe.num_steps(len(inputs.rows.train)), recipe.content(), recipe.epochs))
    targets = resolve_targets(config.method, inputs.model)
    passes = ((recipe.batch_size, inputs.rows.train), (inputs.calibration_batch, inputs.rows.calibration))
    step, calibration = ((min(most, len(rows)), max(row.num_tokens for row in rows)) for most, rows in passes)
    memory = estimate_bytes(config.method, inputs.model, targets, step, calibration)
    values = ""
    if (adapted := _adapted(config, inputs)) is not None:
        at_once = num_trainable(adapted)
        places = places_in_words(targets)
        state = f"{training_state_bytes(at_once):,} bytes of state held while training"
        values = f"{at_once:,} trained values{places} ({state}), "
    yield Text(
        f"{config.method.name}: {values}about {bytes_in_words(memory)} of memory with the model, beside Python's own."
    )


def _adapted(config: RunConfig, inputs: Inputs) -> nn.Module | None:
    """Build the adapted model without its weights' values; None if the method's adapter depends on them."""
    if config.method.entry.changes_base:
        return None
    with torch.device("meta"), suppress(NotImplementedError):
        options = replace(config.method, target_modules=resolve_targets(config.method, inputs.model))
        return add_adapter(options.entry, without_weights(inputs.model.config), options)
    return None


def run_summary(record: TunedRecord) -> Group:
    """Show the gain and the cost of a run."""
    lines: list[tuple[str, str, str]] = []
    before, after, score, rows = record.accuracy_before, record.accuracy, record.score, record.rows
    if before is not None and after is not None and score is not None:
        low, high = map(percent, wilson(after, rows.scored))
        label = f"accuracy, % of {num_of(rows.scored, 'row')} (95 % interval)"
        lines.append((label, percent(before), f"{percent(after)} ({low} to {high})"))
        if score.majority_class is not None:
            lines.append(("always the most frequent answer, %", "", percent(score.majority_class)))
    unit = ", nats/token"
    losses = {f"held-out loss{unit}": (record.held_out_loss_before, record.held_out_loss)}
    losses |= {
        f"loss on texts of {name}{unit}": (one.loss_before, one.loss) for name, one in (record.forgetting or {}).items()
    }
    for name, pair in losses.items():
        first, last = ("" if loss is None else f"{loss:.3f}" for loss in pair)
        lines.append((name, first, last))
    table = table_of(f"{record.method} on {record.task or record.config.sources}", ("", "before", "after"), lines)
    parts = (_of_matches, _of_rows, of_start, _of_training, _kept_step, _cost)
    return Group(table, *(Text(line) for part in parts for line in part(record)))


def _of_matches(record: TunedRecord) -> Iterator[str]:
    """Say why no completion of the user's rows was right before training, or none after it."""
    if record.task is not None or not record.has("accuracy") or 0 not in (record.accuracy_before, record.accuracy):
        return
    rule = "an answer counts if it is the row's completion to the letter"
    if record.accuracy == 0:
        yield f"0.0 after: {rule}. {SAMPLES} shows the answers; compare the losses (docs/odd.md)."
    else:
        yield f"0.0 before: {rule}, and the base model answers in its own words. Compare the losses (docs/odd.md)."


def _of_rows(record: TunedRecord) -> Iterator[str]:
    """Say which rows were read, cut and left out, and warn of few."""
    rows = record.rows
    yield from rows.lines
    if rows.trained < FEWEST_STEPS:
        yield (
            f"Few training rows ({rows.trained}): the adapter may only repeat them, and answer other prompts with "
            "nonsense. Give more rows, 128 or more if you can."
        )


def of_start(record: TunedRecord) -> Iterator[str]:
    """Name the adapter whose core training started from."""
    if record.resolved.started_from is not None:
        yield f"The start: {record.resolved.started_from}."


def recipe_in_words(num_steps: int, recipe: Mapping[str, Any], num_epochs: int | None = None) -> str:
    """Describe a training in one line; the recipe has the form of a record."""
    epochs = "" if num_epochs is None else f" in {num_of(num_epochs, 'epoch')}"
    at_once, rows = recipe["batch_size"], recipe["batch_size"] * recipe["accumulation"]
    rate = "measured on the rows" if recipe["learning_rate"] is None else f"{recipe['learning_rate']:.3g}"
    batches = "" if at_once == rows else f", {at_once} at a time"
    return (
        f"{num_of(num_steps, 'step')} of {num_of(rows, 'row')}{batches}{epochs}; learning rate {rate}, "
        f"warm-up {recipe['warmup']:g} of them."
    )


def _of_training(record: TunedRecord) -> Iterator[str]:
    """Say the recipe; if the training loss was still falling at the end, warn and say what to try."""
    yield recipe_in_words(record.training.num_steps, record.resolved.recipe)
    losses = [loss for loss in record.training.losses if loss is not None]
    quarter = len(losses) // 4
    if quarter < 2:
        return
    before, last = losses[-2 * quarter : -quarter], losses[-quarter:]
    drop, error = mean(before) - mean(last), sqrt((variance(before) + variance(last)) / quarter)
    is_perfect = record.has("accuracy") and record.accuracy == 1
    if drop > max(STILL_FALLING * mean(before), 2 * error) and not is_perfect:
        yield (
            f"The training loss was still falling: {mean(last):.3f} in the last quarter of the steps, "
            f"{mean(before):.3f} in the one before. Try --epochs {2 * record.resolved.recipe['epochs']} or a larger "
            "--lr."
        )


def _kept_step(record: TunedRecord) -> Iterator[str]:
    """Say which step was kept, and why."""
    chosen, last = record.selection, record.training.num_steps
    if chosen is None:
        return
    if chosen.by is None:
        yield f"There are no validation rows beside the training rows: the last of {last} steps is kept."
        return
    best = next(score for score in chosen.scores if score.step == chosen.kept_step)
    value = f"loss {best.held_out_loss:.3f}" if best.accuracy is None else f"accuracy {percent(best.accuracy)} %"
    yield (
        f"Kept step {chosen.kept_step} of {last}: {value} on {chosen.rows} validation rows, the best of "
        f"{len(chosen.scores)} scores, which took {chosen.time_s:.1f} s."
        + (" Then they were no better (--patience)." if chosen.stopped_early else "")
    )


def places_in_words(targets: Sequence[str] | str | None) -> str:
    """Name the adapted layers, as ``" in q_proj, v_proj"``; empty if every weight is trained."""
    names = targets.split() if isinstance(targets, str) else targets or ()
    rest = f" and {len(names) - MOST_PLACES} more" if len(names) > MOST_PLACES else ""
    return f" in {', '.join(names[:MOST_PLACES])}{rest}" if names else ""


def _cost(record: TunedRecord) -> Iterator[str]:
    places = places_in_words(record.resolved.targets)
    yield (
        f"{num_of(record.num_trainable, 'trained value')}{places}; "
        f"{bytes_in_words(record.state_held_bytes)} of state held while training; "
        f"saved in {bytes_in_words(record.saved_bytes)}, the base model has {bytes_in_words(record.model_bytes)}"
    )
    yield (
        f"{of_setup(record)}, training {record.training_s:.1f} s, "
        f"peak memory {bytes_in_words(record.peak_memory_bytes)}"
    )


def of_setup(record: TunedRecord) -> str:
    """The time before training: a basis that was read, and LoRA, need no calibration."""
    return f"{'calibration' if record.calibration else 'layers added in'} {record.calibration_s:.1f} s"


def sample_lines(file: Path) -> Iterator[RenderableType]:
    """Show for each sample its last question, the expected answer, and the answers before and after training."""
    for line in read_lines(file):
        sample = json.loads(line)
        prompt = one_line(sample.get("turn", sample["prompt"]), 10_000)
        cut = "…" if len(prompt) > END_OF_PROMPT else ""
        yield Text(f"\n{sample['id']}: {cut}{prompt[-END_OF_PROMPT:]}", style="bold")
        answers = Table.grid(padding=(0, 2))
        answers.add_column(no_wrap=True)
        answers.add_column()
        for name in ("wanted", "before", "after"):
            answers.add_row(f"  {name}", Text(one_line(sample[name], MOST_OF_ANSWER)))
        yield answers


def size_lines(adapter: Path) -> Iterator[str]:
    """Show the size of an adapter's weights; with its basis also the sizes as cores and as LoRA."""
    tensors = read_tensors(adapter)
    config, stored = read_config(adapter), bytes_in_words((adapter / WEIGHTS_FILE).stat().st_size)
    factors = layers_in(tensors, lambda _: 1.0).values()
    core = Core.read(str(adapter), tensors) if config.get("peft_type") == PEFT_TYPE else None
    as_lora = bytes_in_words(torch.float32.itemsize * sum(one.P.numel() + one.Q.numel() for one in factors))
    few = "" if core is None or core.bits == 32 else f" of {core.bits} bits"
    if core is None:
        yield f"Size: {stored}."
    elif not factors:
        yield f"Size: {stored}, a core alone on its basis{few and f', values{few}'}."
    elif config.get("initial_step"):  # its bases cannot be shared
        yield f"Size: {stored} with its bases, {as_lora} as a LoRA in float32."
    else:
        yield (
            f"Size of {len(core.values):,} trained values{few}: {stored} with their basis, "
            f"{bytes_in_words(core.num_bytes)} on a basis that adapters share, {as_lora} as a LoRA in float32."
        )
