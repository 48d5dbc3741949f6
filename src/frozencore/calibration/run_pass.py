"""One pass: the model runs once over all batches, and the tapped layers are summed.

A batch takes one forward pass and as many backward passes as its moments have kinds of labels: none, one, or two. What
the host has to know of it (which tokens count, which logits are asked for) it reads off the batch before that goes to
the device, and whether all was finite when the pass is over: in between it waits for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from frozencore.calibration.any_loss import loss_fn_of, summed_loss, watching_calls
from frozencore.calibration.batches import Batch, mapped, num_examples_of, require_batch, total_examples
from frozencore.calibration.counted import (
    CountedTokens,
    counted_source_tokens,
    counted_target_tokens,
    counted_tokens,
)
from frozencore.calibration.encoder_side import is_encoder_decoder, watching_encoder
from frozencore.calibration.loss import (
    IGNORED,
    Predictions,
    calibration_loss,
    labels_of,
    predicted,
)
from frozencore.calibration.options import CalibrationOptions, FisherLabels
from frozencore.calibration.recorder import LayerRecorder
from frozencore.calibration.taps import CalibrationPass, Taps, capturing
from frozencore.device import sent
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import seeded_generator
from frozencore.ranks import own_rank
from frozencore.words import Progress


def run_pass(
    model: nn.Module, batches: Iterable[Batch], taps: Taps, progress: Progress | None
) -> dict[str, LayerRecorder]:
    """The sums over all batches, of a model prepared by :func:`frozencore.calibration.preserve.preserved`."""
    # Each rank draws labels for its own examples; each pass draws the same, so that groups of layers agree.
    generator = seeded_generator(taps.options.seed, "fisher labels", own_rank())
    any_form = loss_fn_of(taps.options) is not None
    num_examples, total = 0, total_examples(batches, any_form=any_form)
    with watching_encoder(model) as encoder, capturing(taps, encoder) as capture, ExitStack() as watched:
        if any_form:
            watched.enter_context(watching_calls(model, capture))
        for index, batch in enumerate(batches):
            require_batch(batch, index, any_form=any_form)
            _run_batch(model, batch, capture, generator)
            capture.finish_batch(index)
            num_examples += num_examples_of(batch)
            if progress:
                progress("calibration", num_examples, total)
        capture.require_finite()
        if num_examples == 0:
            raise CalibrationError("Calibration needs examples, but the data gave none. Check the dataloader.")
        return capture.recorders


def mean_loss(model: nn.Module, batches: Iterable[Batch], options: CalibrationOptions) -> float:
    """The loss that calibration takes the gradient of, without one: the mean over the batches' examples.

    The model is as :func:`frozencore.calibration.preserve.preserved` prepares it.
    """
    taps = Taps({}, frozenset({"cross"}), options)  # of whose loss the labels are the data's
    device, generator = next(model.parameters()).device, seeded_generator(options.seed)
    total, num_examples = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            sent_batch = mapped(batch, lambda tensor: sent(tensor, device))
            total += float(next(_losses(model, sent_batch, batch, taps, generator)))
            num_examples += num_examples_of(batch)
    return total / num_examples


def mean_losses(model: nn.Module, batches: Iterable[Batch], options: CalibrationOptions, copies: int) -> list[float]:
    """The same of a language model that tells copies of the rows apart, all of them in one forward pass a batch."""
    taps = Taps({}, frozenset({"cross"}), options)
    device, generator = next(model.parameters()).device, seeded_generator(options.seed)
    totals, num_examples = [0.0] * copies, 0
    with torch.no_grad():
        for batch in batches:
            wide = mapped(batch, lambda tensor: torch.cat([tensor] * copies))
            sent_batch = mapped(wide, lambda tensor: sent(tensor, device))
            for number, own in enumerate(_predictions(model, sent_batch, labels_of(wide), taps).parts(copies)):
                totals[number] += float(_loss(own, taps.backward_passes[-1].labels, options, generator))
            num_examples += num_examples_of(batch)
    return [total / num_examples for total in totals]


def _run_batch(model: nn.Module, batch: Batch, capture: CalibrationPass, generator: torch.Generator) -> None:
    device = next(model.parameters()).device
    as_it_came, batch = batch, mapped(batch, lambda tensor: sent(tensor, device))
    taps = capture.taps
    loss_fn = loss_fn_of(taps.options)
    if loss_fn is None:
        count_tokens(as_it_came, capture, device)
    if not taps.backward_passes:
        with torch.no_grad():  # a decoder that shifts its labels cannot run without them
            if loss_fn is not None:
                loss_fn(model, batch)
            else:
                model(**{key: value for key, value in batch.items() if key != "labels" or capture.encoder is not None})
        return
    losses = _losses(model, batch, as_it_came, taps, generator)
    for number, backward in enumerate(taps.backward_passes, start=1):
        capture.backward = backward
        _run_backward(next(losses), taps, keep_graph=number < len(taps.backward_passes))


def _run_backward(loss: Tensor, taps: Taps, *, keep_graph: bool) -> None:
    if not loss.requires_grad:
        unused = list(taps.layers)
        raise CalibrationError(
            f"The loss does not depend on layer {unused[0]!r} ({len(unused)} in all): the model does not use it."
        )
    loss.backward(retain_graph=keep_graph)


def count_tokens(batch: Batch, capture: CalibrationPass, device: torch.device | None = None) -> None:
    """Tell a pass which tokens of the batch that comes count, by indices on the model's device."""
    options = capture.taps.options
    only_nonzero = options.tokens == "nonzero_delta"
    if not {"input_ids", "inputs_embeds"} & batch.keys():  # images, sound: layers see other rows than the batch has
        mask = batch.get("attention_mask")
        capture.tokens = CountedTokens.of_call(mask, only_nonzero_delta=only_nonzero, device=device)
        capture.source_tokens = capture.tokens
        return
    if capture.encoder is None:
        counted = counted_tokens(batch, options)
    else:
        counted = counted_target_tokens(batch, options)
        source = counted_source_tokens(batch, options)
        capture.source_tokens = CountedTokens.from_mask(source, only_nonzero_delta=only_nonzero, device=device)
    capture.tokens = CountedTokens.from_mask(counted, only_nonzero_delta=only_nonzero, device=device)


def _losses(
    model: nn.Module, batch: Batch, as_it_came: Batch, taps: Taps, generator: torch.Generator
) -> Iterator[Tensor]:
    """One forward pass over a batch, and the loss of each backward pass; nothing is kept beside the last."""
    loss_fn = loss_fn_of(taps.options)
    if loss_fn is not None:
        yield summed_loss(loss_fn, model, batch)
        return
    if not is_language_model(model):
        yield _own_loss(model, batch, taps.options)
        return
    predictions = _predictions(model, batch, labels_of(as_it_came), taps)
    for backward in taps.backward_passes[:-1]:
        yield _loss(predictions, backward.labels, taps.options, generator)
    last = _loss(predictions, taps.backward_passes[-1].labels, taps.options, generator)
    del predictions
    yield last


def _loss(
    predictions: Predictions, whose: FisherLabels, options: CalibrationOptions, generator: torch.Generator
) -> Tensor:
    labels = predictions.sampled_labels(generator) if whose == "mc" else predictions.labels
    return calibration_loss(predictions, labels, options.weighting)


def _predictions(model: nn.Module, batch: Batch, labels: Tensor, taps: Taps) -> Predictions:
    if is_encoder_decoder(model):
        return Predictions.of(_part(model, model(**batch), "logits"), labels)
    targets = predicted(labels)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if not _reads_logits(model, taps):
        kept = targets.ne(IGNORED).any(0).nonzero().squeeze(1)
        targets = targets[:, kept]
        inputs["logits_to_keep"] = sent(kept, inputs["input_ids"].device) if "input_ids" in inputs else kept
    return Predictions.of(_part(model, model(**inputs), "logits"), targets)


def is_language_model(model: Any) -> bool:
    """Whether the loss is that of completion tokens, row by row; another model's is its own."""
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and can_generate()


def _own_loss(model: nn.Module, batch: Batch, options: CalibrationOptions) -> Tensor:
    if (options.tokens, options.weighting, options.fisher_labels) != ("nonpad", "example_mean", "empirical"):
        raise ConfigError(
            "The calibration options tokens, weighting and fisher_labels are about completion tokens, and this "
            f"{type(model).__name__} is no language model: its own loss is used. Leave them at their defaults."
        )
    labels_of(batch)  # refused in our words where there are none
    return _part(model, model(**batch), "loss") * num_examples_of(batch)


def _part(model: nn.Module, output: Any, name: str) -> Tensor:
    """The logits or the loss among what a model gives: an output of transformers, or a plain dictionary."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if not isinstance(found, Tensor):
        raise CalibrationError(
            f"Calibration looks at the gradient of a loss, but this {type(model).__name__} gives no {name}. Say what "
            "its loss is: calibrate(..., loss_fn=lambda model, batch: ...)."
        )
    return found


def _reads_logits(model: nn.Module, taps: Taps) -> bool:
    """Whether all positions need logits: a captured output layer sees them, or the model cannot leave any out.

    Logits of completion columns alone save a seventh of the pass in benchmarks/calibration.py.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    output_layer = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return "logits_to_keep" not in inspect.signature(base.forward).parameters or any(
        layer is output_layer for layer in taps.layers.values()
    )
