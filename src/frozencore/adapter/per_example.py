"""The gradient of each row of a batch with respect to the cores, from one forward and one backward pass.

With L_i the loss of row i, each layer has the gradient g_i = ∂L_i/∂R, r x r numbers. Each row uses its own copy of R,
so the backward pass over Σ_i L_i gives g_i as the gradient of the i-th copy. Copies cost no memory: all are views of R.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_layers import GradientCheckpointingLayer

from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.adapter.mixed_batch import rows_through
from frozencore.adapter.packed_rows import PackedRows, packed_rows
from frozencore.adapter.saved.tensors import by_layer
from frozencore.calibration.batches import mapped, num_examples_of
from frozencore.calibration.counted_tokens import IGNORED, is_encoder_decoder, predicted
from frozencore.calibration.loss import is_language_model
from frozencore.calibration.preserve import let_input_require_gradient, use_training_kernels
from frozencore.errors import ConfigError, DataError

RowLossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(outputs, batch)``: the loss of each row (rows), from the model's outputs for the batch."""


def per_example_gradients(
    model: nn.Module, batch: Mapping[str, Any], loss_fn: RowLossFn | None = None
) -> Float[Tensor, "rows k"]:
    """Compute the gradient of each row's own loss with respect to the active adapter's cores, in float32.

    It takes one forward and one backward pass. The model's mode and gradients stay as they were.

    Args:
        model: With one active frozen-core adapter.
        batch: The model's inputs by name, on its device. Rows may be padded; or they may be end to end in a sequence,
            with ``position_ids`` that restart at each row and no ``attention_mask``.
        loss_fn: Returns the loss of each row from the model's outputs and the batch. By default the loss of a row is
            the mean negative log-likelihood of its completion tokens (``labels`` other than -100), or 0 without such
            tokens. The model is called without ``labels``, unless its decoder needs them.

    Returns:
        Rows x Σr², layer by layer in the order of ``model.named_modules()``; R of a layer row by row.

    Raises:
        ConfigError: The model does not have exactly one active frozen-core adapter, the adapter is merged, or
            ``loss_fn`` does not return a loss for each row.
        CalibrationError: The adapter has no basis yet.
        DataError: The batch has no labels, or has rows end to end without marking their beginnings.
    """
    return losses_and_gradients(model, batch, loss_fn)[1]


def losses_and_gradients(
    model: nn.Module, batch: Mapping[str, Any], loss_fn: RowLossFn | None = None
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows k"]]:
    """Compute the loss of each row, and its gradient as in :func:`per_example_gradients`."""
    name, layers = cores_in_use(model)
    batch = mapped(batch, lambda tensor: tensor.detach())
    packed = packed_rows(batch)
    num_rows = num_examples_of(batch) if packed is None else packed.num_rows
    if num_rows == 0:
        raise DataError("Gradients of each row need a batch with rows, but this batch holds no tensor with a row.")
    ranks = {str(number): len(layer.core(name)) for number, layer in enumerate(layers)}
    found = torch.zeros(num_rows, sum(r * r for r in ranks.values()), device=layers[0].core(name).device)
    parts = by_layer(found, ranks).values()
    with ExitStack() as undo:
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        _prepare(model, undo)
        for layer, part in zip(layers, parts, strict=True):
            copies = layer.core(name).detach().expand(num_rows, -1, -1).requires_grad_()
            undo.callback(copies.register_post_accumulate_grad_hook(partial(_take, part)).remove)
            undo.enter_context(rows_through(layer, layer.row_cores_of(name, copies, packed)))
        losses = _row_losses(model, batch, loss_fn, packed, num_rows)
        losses.sum().backward()
    return losses.detach(), found


def cores_in_use(model: nn.Module) -> tuple[str, list[FrozenCoreLayer]]:
    """The one active frozen-core adapter and its layers; refuses several or merged adapters."""
    all_layers = [module for module in model.modules() if isinstance(module, FrozenCoreLayer)]
    names = {name for layer in all_layers for name in layer.active_adapters if name in layer.frozencore_R}
    if len(names) != 1 or any(layer.disable_adapters for layer in all_layers):
        what = f"{len(names)} ({', '.join(sorted(names))})" if len(names) > 1 else "none"
        raise ConfigError(
            f"Gradients of each row need one active frozen-core adapter, but this {type(model).__name__} has {what}. "
            "Add one with get_peft_model, or choose it with set_adapter(name)."
        )
    name = names.pop()
    layers = [layer for layer in all_layers if name in layer.frozencore_R]
    for layer in layers:
        if layer.merged:
            raise ConfigError(
                f"Gradients of each row need unmerged adapters, but layer {layer.name!r} has merged ones. Call "
                "unmerge_adapter() first."
            )
        layer.require_basis(name)
    return name, layers


def _prepare(model: nn.Module, undo: ExitStack) -> None:
    """Freeze all parameters, keep quantised weights unchanged, and let checkpointed blocks build a graph."""
    for module in model.modules():
        undo.callback(setattr, module, "training", module.training)
    use_training_kernels(model, undo)
    for parameter in model.parameters():
        if parameter.requires_grad:
            undo.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            let_input_require_gradient(module, undo)


def _take(part: Tensor, copies: Tensor) -> None:
    """Move the gradient of the copies to its place."""
    assert copies.grad is not None
    part.add_(copies.grad.to(part.device, part.dtype))
    copies.grad = None


def _row_losses(
    model: Any, batch: Mapping[str, Any], loss_fn: RowLossFn | None, packed: PackedRows | None, num_rows: int
) -> Tensor:
    if loss_fn is None:
        losses = _completion_losses(model, batch, packed, num_rows)
    else:
        losses = loss_fn(model(**_inputs(model, batch)), batch)
        if not isinstance(losses, Tensor) or losses.shape != (num_rows,):
            came = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ConfigError(
                f"loss_fn(outputs, batch) gives the loss of each row, a tensor of shape ({num_rows},), but {came} "
                "came. Average over a row's tokens, not over the rows."
            )
    if not losses.requires_grad:
        raise ConfigError(
            "The loss of a row must depend on the cores, but the one that came does not. Compute it from the model's "
            "outputs, without detach() or no_grad."
        )
    return losses


def _completion_losses(model: Any, batch: Mapping[str, Any], packed: PackedRows | None, num_rows: int) -> Tensor:
    """The mean loss over each row's completion tokens; other logits are left out if the model supports it."""
    labels = batch.get("labels")
    if not is_language_model(model) or not isinstance(labels, Tensor) or labels.ndim != 2:
        raise DataError(
            f"The loss of a row is that of its completion tokens, but this {type(model).__name__} is no language "
            "model or the batch has no labels for tokens. Pass loss_fn(outputs, batch), which gives each row's loss."
        )
    inputs = _inputs(model, batch)
    targets = labels if is_encoder_decoder(model) else predicted(labels)
    if packed is None:
        rows = torch.arange(num_rows, device=labels.device).unsqueeze(1).expand_as(labels)
    else:
        rows = packed.row.to(labels.device).view(labels.shape)
        targets = targets.masked_fill(pad(rows.diff(dim=1) != 0, (0, 1)), IGNORED)  # the next row's first token
    if not is_encoder_decoder(model) and _narrows_logits(model, packed):
        kept = targets.ne(IGNORED).any(0).nonzero().squeeze(1)
        if kept.numel():
            inputs, targets, rows = {**inputs, "logits_to_keep": kept}, targets[:, kept], rows[:, kept]
    logits = model(**inputs).logits
    targets, rows = targets.to(logits.device), rows.to(logits.device)
    wanted = targets.ne(IGNORED)
    logits = logits[wanted].to(torch.promote_types(logits.dtype, torch.float32))
    nats = cross_entropy(logits, targets[wanted], reduction="none")
    counts = wanted.new_zeros(num_rows, dtype=nats.dtype).index_add(0, rows[wanted], torch.ones_like(nats))
    return nats.new_zeros(num_rows).index_add(0, rows[wanted], nats) / counts.clamp(min=1)


def _inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs without labels, from which it would compute its own loss."""
    needs_labels = is_encoder_decoder(model) and batch.get("decoder_input_ids") is None
    inputs = {key: value for key, value in batch.items() if key != "labels" or needs_labels}
    return {**inputs, "use_cache": False} if is_language_model(model) else inputs


def _narrows_logits(model: Any, packed: PackedRows | None) -> bool:
    """Return whether the model can leave logits out; a core on its output layer needs all packed positions."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if packed is not None and isinstance(base.get_output_embeddings(), FrozenCoreLayer):
        return False
    return "logits_to_keep" in inspect.signature(base.forward).parameters
