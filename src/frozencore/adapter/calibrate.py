"""``calibrate(model, dataloader)``: collect the moments of the adapted layers, build their bases, set them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.adapter.learning_rate import proposed_learning_rate
from frozencore.adapter.loaded_adapter import only_adapter
from frozencore.adapter.loaded_basis import adapter_for_new_bases, put_layers
from frozencore.adapter.state_dict import HEADS
from frozencore.attributes import with_attributes
from frozencore.calibration.batches import Batch, Collator, batches_from, require_examples_apart, stated_ids
from frozencore.calibration.calibrate import Calibration, Target, calibrate_layers
from frozencore.calibration.calibration_options import BATCH_SIZE, CalibrationOptions
from frozencore.calibration.collect import has_labels, require_options_fit
from frozencore.calibration.hooks import LossFn
from frozencore.constructors import LayerData
from frozencore.distributed import all_gather, check_same_call, raise_on_any_rank
from frozencore.errors import CalibrationError, ModelError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.moments import LayerMoments
from frozencore.progress import Progress, no_progress


@torch.inference_mode(False)  # P and Q are kept, and a backward pass reads them
def calibrate(
    model: nn.Module,
    data: Iterable[Any] | Dataset[Any] | None = None,
    *,
    adapter_name: str | None = None,
    collator: Collator | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    options: CalibrationOptions | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    loss_fn: LossFn | None = None,
    reset: bool = False,
    learning_rate: bool = True,
    progress: bool | Progress = True,
) -> Calibration:
    """Choose the bases of a frozen-core adapter from calibration examples and reset its cores to zero.

    Args:
        model: A model with a frozen-core adapter, from ``peft.get_peft_model``.
        data: Batches with ``input_ids``, ``attention_mask`` and ``labels``, from a DataLoader or any finite iterable;
            or batches of images or sound for a model that returns a loss. With ``collator``, tokenised rows: a
            ``datasets.Dataset``, a PyTorch dataset, or a list. Read once. Rows may be packed, if ``position_ids``,
            ``seq_idx`` or ``cu_seq_lens_q`` mark where examples begin.
        adapter_name: The adapter to calibrate; the active one by default.
        collator: Makes a batch from a list of rows, as in ``Trainer``.
        batch_size: Rows in a batch that the collator makes; 8 by default.
        num_examples: Stop after this number of examples, also of packed rows; required for endless data and streams.
            With a ``loss_fn``, which may compare rows, the last batch stays whole; a pair of DPO is two examples.
        options: Options of the pass, see :class:`frozencore.calibration.calibration_options.CalibrationOptions`.
        moments: Moments collected before, by layer name, in place of those of ``data``.
        loss_fn: ``loss_fn(model, batch) -> loss`` instead of the model's loss: one number, the mean over the
            batch's examples, weighed by their number (the length of the batch's first tensor, or the examples packed in
            it). A batch is then any dictionary, list or tuple with tensors in it.
        reset: Allow a new basis under a core that has been trained (the core is lost).
        learning_rate: Propose a learning rate too, from the gradients of some examples with labels, one by one
            (:mod:`frozencore.adapter.learning_rate`). Under a new head it is too large.
        progress: True shows a bar, False nothing; a function is called with ``(stage, done, total, note="")``.

    In a decoder-only language model every token counts that is not padding. In all other models, and with a
    ``loss_fn``, a row of a layer's input counts if its output has a gradient. Padding has none, and tokens
    that the loss does not reach have none. So each batch takes a backward pass too, and needs labels.

    In a process group (``torchrun``, ``accelerate launch``) every rank calls this with its share of the examples,
    before the model is wrapped; all ranks then have the same bases.

    Returns:
        The result in each layer. The model's weights, modes, hooks, gradients and RNG are as before.

    Raises:
        CalibrationError: Nothing to calibrate, a trained core without ``reset``, merged adapters, bad moments, no
            memory for a single layer, or a rank that failed or is gone. No basis is changed then.
        ConfigError: There is no such adapter, an option does not fit the model or ``loss_fn``, ``batch_size`` or
            ``collator`` does not fit the data, or endless data come without ``num_examples``.
        DataError: The data are not batches.
        ModelError: A core is pruned, parametrised or offloaded.
    """
    check_same_call("frozencore.calibrate")
    adapter = adapter_for_new_bases(model, adapter_name, reset=reset)
    config, layers = adapter.config, adapter.layers
    options = options or CalibrationOptions()
    require_options_fit(model, options, loss_fn)
    reads_data = bool(config.needs) and moments is None
    if reads_data and data is None:
        raise CalibrationError(f"{config.constructor} reads data: call calibrate(model, dataloader).")
    batches: list[Batch] = []
    if reads_data or (learning_rate and data is not None):
        with raise_on_any_rank():
            batches = batches_from(
                data, collator=collator, batch_size=batch_size, num_examples=num_examples, any_form=loss_fn is not None
            )
            are_weighed = num_examples != 1 and (options.weighting, options.skip_first) != ("token_sum", 0)
            if loss_fn is None and are_weighed:
                rows_at_once = batch_size or BATCH_SIZE if collator is not None else None
                require_examples_apart(data, batches, rows_at_once, _end_ids(model))
    targets = {
        name: Target(
            layer.get_base_layer(),
            LayerData(name, layer.shape, layer.dense_weight),
            config.basis_options(len(layer.core(adapter.name))),
        )
        for name, layer in layers.items()
    }
    modules_alone = only_adapter(model, adapter.name, with_cores=False)
    with modules_alone, _metrics_kept(loss_fn), _reporting(progress) as report:
        bases, calibration = calibrate_layers(
            model, targets, config.constructor, batches=batches, moments=moments, options=options, loss_fn=loss_fn,
            progress=report,
        )  # fmt: skip
    rate = None
    has_loss = bool(batches) and (loss_fn is not None or all(has_labels(model, batch) for batch in batches))
    if learning_rate and all(all_gather(has_loss)):  # constructors that read no errors need no labels
        # a layer may pass no gradient: this basis needed none, and training will refuse it
        with suppress(ModelError), _metrics_kept(loss_fn), _reporting(progress) as report:
            rate = proposed_learning_rate(
                model, layers, adapter.name, batches, bases=bases, loss_fn=loss_fn, progress=report
            )
    put_layers(adapter, bases)  # last, so that an error before it changes nothing
    config.calibration_tokens = max(layer.num_tokens for layer in calibration.layers.values()) or None
    config.learning_rate = rate
    _warn_of_weak_layers(bases, layers)
    if rate is not None and {*chain(*HEADS.values())} & {*(config.modules_to_save or ())}:
        warnings.warn(
            f"The learning rate ({rate:.2g}) was measured under a head; until a new head has learned, it is too large. "
            "Give a rate, such as 5e-3.",
            stacklevel=2,
        )
    return replace(calibration, learning_rate=rate)


def _end_ids(model: Any) -> set[int]:
    """The end tokens of a language model, as its configurations name them."""
    configs = (getattr(model, name, None) for name in ("config", "generation_config"))
    return {token for config in configs for token in stated_ids(getattr(config, "eos_token_id", None))}


def _warn_of_weak_layers(bases: Mapping[str, LayerBasis], layers: Mapping[str, FrozenCoreLinear]) -> None:
    empty = [name for name, basis in bases.items() if basis.effective_rank == 0]
    partial = [name for name, basis in bases.items() if 0 < basis.effective_rank < basis.rank]
    for names, what in (
        (empty, "received no signal; their bases are seeded random directions"),
        (partial, "have fewer independent directions than the rank; the rest are seeded random ones"),
    ):
        if names:
            is_half = any(layers[name].weight.dtype == torch.float16 for name in names)
            way_out = " Small gradients are zero in float16: load the model in bfloat16 or float32 (dtype=, --dtype)."
            warnings.warn(
                f"{len(names)} of {len(bases)} layers {what} (first: {names[0]}).{way_out if is_half else ''}",
                stacklevel=3,
            )


def _metrics_kept(loss_fn: LossFn | None) -> AbstractContextManager[None]:
    """Keep the metrics that a trainer of TRL has gathered for its next log, if this is its loss, which adds to them."""
    trainer: Any = getattr(loss_fn, "__self__", None)
    gathered = [name for name in ("_metrics", "_stored_metrics") if hasattr(trainer, name)]
    return with_attributes(trainer, **{name: copy.deepcopy(getattr(trainer, name)) for name in gathered})


@contextmanager
def _reporting(progress: bool | Progress) -> Iterator[Progress]:
    progress = progress or no_progress
    if callable(progress):
        yield progress
        return
    bars: dict[str, tqdm] = {}

    def show(stage: str, done: int, total: int | None, note: str = "") -> None:
        if stage not in bars:
            bars[stage] = tqdm(desc=stage)
        bars[stage].total = total  # the total grows when memory runs out
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
