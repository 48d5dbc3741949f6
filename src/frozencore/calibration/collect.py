"""From a model and batches to the moments of its layers, in one forward and backward pass over the examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from frozencore.calibration.capture import Capture, CountedTokens, LayerRecorder, Projection, capturing
from frozencore.calibration.encoder_side import is_encoder_decoder, watching_encoder
from frozencore.calibration.loss import (
    IGNORED,
    calibration_loss,
    counted_source_tokens,
    counted_target_tokens,
    counted_tokens,
    labels_of,
    predicted,
)
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.errors import CalibrationError, ConfigError, DataError
from frozencore.maths.linalg import seeded_generator
from frozencore.maths.moments import LayerMoments, MomentName

Batch = Mapping[str, Any]
Progress = Callable[[int, int | None], None]
"""Called with the examples done so far and their total, which is None while it is unknown."""

FCCA_NEEDS: frozenset[MomentName] = frozenset({"cross", "input_square", "error_square"})


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module] | Sequence[str],
    *,
    needs: frozenset[MomentName] = FCCA_NEEDS,
    options: CalibrationOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerMoments]:
    """Sum moments of the named layers over the calibration examples.

    The model runs in evaluation mode and is left exactly as it was: modes, hooks, gradients, RNG.

    Args:
        model: A language model whose output has ``logits``, decoder-only or encoder-decoder; any model that returns
            ``loss`` also works.
        batches: Dictionaries with ``input_ids``, ``attention_mask`` and ``labels`` (-100 on tokens without loss).
        layers: Modules with an input (..., n) and an output (..., m): names in ``model``, or a mapping from names
            of your own to modules.
        needs: The moments to sum; without a backward one (G, d, D) no backward pass is made.

    Returns:
        The moments of each layer, in the order given.

    Raises:
        CalibrationError: No examples, no labels, NaN or Inf (batch and layer are named), or a layer that no counted
            token reached.
    """
    options = options or CalibrationOptions()
    modules = dict(layers) if isinstance(layers, Mapping) else {name: model.get_submodule(name) for name in layers}
    if not modules:
        raise CalibrationError("Calibration needs at least one layer, but none was named.")
    names = list(modules)
    groups = [names[i : i + options.group_size] for i in range(0, len(names), options.group_size)]
    if len(groups) > 1:  # every group reads the same batches: a shuffling or one-shot loader must not see to it
        batches = list(batches)
    moments: dict[str, LayerMoments] = {}
    with preserved(model):
        for index, group in enumerate(groups):
            report = share_of(progress, index, len(groups))
            taps = Taps({name: modules[name] for name in group}, needs)
            recorders = run_pass(model, batches, taps, options, report)
            moments |= {name: recorder.moments() for name, recorder in recorders.items()}
    refuse_unreached({name: layer.num_tokens for name, layer in moments.items()})
    return moments


@dataclass(frozen=True)
class Taps:
    """What one pass looks at: layers, the sums to make, and how cross products are projected before they are summed."""

    layers: Mapping[str, nn.Module]
    needs: frozenset[MomentName]
    projections: Mapping[str, Projection] | None = None


def run_pass(
    model: nn.Module, batches: Iterable[Batch], taps: Taps, options: CalibrationOptions, progress: Progress | None
) -> dict[str, LayerRecorder]:
    """One run over all batches, with the model prepared by :func:`frozencore.calibration.preserve.preserved`."""
    generator = seeded_generator(options.seed, "fisher labels")
    device = torch.device(options.stats_device) if options.stats_device else None
    num_examples, total = 0, _total_examples(batches)
    with (
        watching_encoder(model) as encoder,
        capturing(taps.layers, taps.needs, device, encoder, taps.projections) as capture,
    ):
        for index, batch in enumerate(batches):
            _run_batch(model, batch, capture, options, generator, index)
            num_examples += num_examples_of(batch)
            if progress:
                progress(num_examples, total)
        if num_examples == 0:
            raise CalibrationError("Calibration needs examples, but the data gave none. Check the dataloader.")
        return capture.recorders


def refuse_unreached(num_tokens: Mapping[str, int]) -> None:
    """A layer without a token has no moments."""
    unreached = [name for name, count in num_tokens.items() if count == 0]
    if unreached:
        raise CalibrationError(
            f"Layer {unreached[0]!r} ({len(unreached)} in all) received no counted token. "
            "Check that the model uses it and that the batches are not all padding."
        )


def take_examples(batches: Iterable[Batch], num_examples: int) -> Iterable[Batch]:
    """Batches up to that many examples; the last one is cut."""
    if num_examples < 1:
        raise ConfigError(f"The number of calibration examples must be at least 1, but {num_examples} came.")
    left = num_examples
    for index, batch in enumerate(batches):
        _require_batch(batch, index)
        yield {key: value[:left] if isinstance(value, Tensor) and value.ndim else value for key, value in batch.items()}
        left -= num_examples_of(batch)
        if left <= 0:  # before the loader is asked for a batch that nobody needs
            return


def is_batch(data: Any) -> bool:
    """Whether this is a dictionary that holds rows of tensors."""
    return isinstance(data, Mapping) and num_examples_of(data) > 0 and getattr(data.get("input_ids"), "ndim", 2) > 1


def num_examples_of(batch: Batch) -> int:
    """Rows of a batch."""
    return next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)


def _require_batch(batch: Any, index: int) -> None:
    if not is_batch(batch):
        what = type(batch).__name__
        if isinstance(batch, Mapping):
            what = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
        raise DataError(
            f"Calibration takes batches, dictionaries of tensors with one row per example, but number {index} is "
            f"{what}. Give a DataLoader, or rows with a collator."
        )


def _run_batch(
    model: nn.Module,
    batch: Batch,
    capture: Capture,
    options: CalibrationOptions,
    generator: torch.Generator,
    index: int,
) -> None:
    _require_batch(batch, index)
    device = next(model.parameters()).device
    batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    only_nonzero = options.tokens == "nonzero_delta"
    if capture.encoder is not None:
        capture.source_tokens = CountedTokens.from_mask(
            counted_source_tokens(batch, options), only_nonzero_delta=only_nonzero
        )
        counted = counted_target_tokens(batch, options)
    else:
        counted = counted_tokens(batch, options)
    capture.tokens = CountedTokens.from_mask(counted, only_nonzero_delta=only_nonzero)
    if not capture.needs_backward:
        with torch.no_grad():  # a decoder that shifts its labels cannot run without them
            model(**{key: value for key, value in batch.items() if key != "labels" or capture.encoder is not None})
    else:
        loss = _loss(model, batch, options, generator, whole_logits=_reads_logits(model, capture.layers))
        if not loss.requires_grad:
            unused = list(capture.recorders)
            raise CalibrationError(
                f"The loss does not depend on layer {unused[0]!r} ({len(unused)} in all): the model does not use it."
            )
        loss.backward()
    capture.finish_batch(index)


def _loss(
    model: nn.Module, batch: Batch, options: CalibrationOptions, generator: torch.Generator, *, whole_logits: bool
) -> Tensor:
    labels = labels_of(batch)
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        if (options.tokens, options.weighting, options.fisher_labels) != ("nonpad", "example_mean", "empirical"):
            raise ConfigError(
                "The calibration options tokens, weighting and fisher_labels are about completion tokens, and this "
                f"{type(model).__name__} is no language model: its own loss is used. Leave them at their defaults."
            )
        return model(**batch).loss * num_examples_of(batch)
    if is_encoder_decoder(model):
        return calibration_loss(model(**batch).logits, labels, options, generator, aligned=True)
    targets = predicted(labels)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if not whole_logits:
        kept = targets.ne(IGNORED).any(0).nonzero().squeeze(1)
        inputs["logits_to_keep"], targets = kept, targets[:, kept]
    return calibration_loss(model(**inputs).logits, targets, options, generator, aligned=True)


def _reads_logits(model: nn.Module, layers: Iterable[nn.Module]) -> bool:
    """Whether all positions need logits: a captured output layer sees them, or the model cannot leave any out.

    Logits of completion columns alone save a seventh of the pass in benchmarks/calibration.py.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    output_layer = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return "logits_to_keep" not in inspect.signature(base.forward).parameters or any(
        layer is output_layer for layer in layers
    )


def _total_examples(batches: Iterable[Batch]) -> int | None:
    if isinstance(batches, Sequence):
        for index, batch in enumerate(batches):  # all of them before the first one runs
            _require_batch(batch, index)
        return sum(num_examples_of(batch) for batch in batches)
    dataset = getattr(batches, "dataset", None)
    try:
        return len(dataset) if dataset is not None else None
    except TypeError:
        return None


def share_of(progress: Progress | None, index: int, num_passes: int) -> Progress | None:
    """Progress of one pass among several, as if all were one."""
    if progress is None or num_passes == 1:
        return progress
    return lambda done, total: progress(done + index * (total or 0), total * num_passes if total is not None else None)
