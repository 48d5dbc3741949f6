"""The loss of calibration, with the data's labels, or the user's own.

Example e with completion tokens C_e:  L = Σ_e (1/|C_e|) Σ_{t ∈ C_e} -log p(token t | tokens before t).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss

from frozencore.calibration.batches import Batch, num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.counted_tokens import IGNORED, is_encoder_decoder, labels_of, predicted
from frozencore.calibration.taps import LossFn, Taps
from frozencore.device import sent
from frozencore.errors import CalibrationError, ConfigError

_OF_COMPLETIONS = {"weighting": "example_mean", "skip_first": 0}


def completion_loss(
    logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"], options: CalibrationOptions
) -> Float[Tensor, ""]:
    """The loss of the positions that predict a token with a label, summed over the batch's examples.

    Args:
        targets: The label that each position predicts, -100 where there is none. On the CPU it avoids synchronising the
            device.

    Raises:
        CalibrationError: No token of the batch carries a label.
    """
    counted = targets.ne(IGNORED)
    if not counted.any():
        raise CalibrationError(
            "Calibration needs completion tokens, but every label of a batch is masked (-100). "
            "Check that the prompt does not fill the whole length limit."
        )
    num_in_example = counted.sum(1, keepdim=True).expand_as(counted)[counted]
    rows, positions, labels, num_in_example = (
        sent(found, logits.device) for found in (*counted.nonzero(as_tuple=True), targets[counted], num_in_example)
    )
    log_p = log_softmax(logits[rows, positions].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    loss_of_token = nll_loss(log_p, labels, reduction="none")
    return (loss_of_token if options.weighting == "token_sum" else loss_of_token / num_in_example).sum()


def require_options_fit(options: CalibrationOptions, loss_fn: LossFn | None) -> None:
    """Refuse options about completion tokens beside a loss of the user's own.

    Raises:
        ConfigError: Such an option is not at its default.
    """
    odd = [name for name, default in _OF_COMPLETIONS.items() if getattr(options, name) != default]
    if loss_fn is not None and (odd or options.tokens == "completion"):
        raise ConfigError(
            f"The calibration option {(odd or ['tokens'])[0]} is about completion tokens, but a loss_fn does not "
            "tell them apart. Leave it at its default."
        )


def loss_of(model: nn.Module, batch: Batch, as_it_came: Batch, taps: Taps) -> Tensor:
    """Run one forward pass over a batch and compute its loss, summed over the examples.

    Args:
        as_it_came: The batch on its original device.

    Raises:
        CalibrationError: The loss is not a single number, or the model returns none.
    """
    if taps.loss_fn is not None:
        loss = taps.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise CalibrationError(
                f"loss_fn(model, batch) gives one number, the mean over the batch's examples, but {came} came."
            )
        return loss.reshape(()) * num_examples_of(batch)
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():  # no language model: it returns its own loss
        return _own_loss(model, batch, taps.options)
    labels = labels_of(as_it_came)
    if is_encoder_decoder(model):
        return completion_loss(_part(model, model(**batch), "logits"), labels, taps.options)
    targets = predicted(labels)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if not _needs_all_logits(model, taps):
        kept = targets.ne(IGNORED).any(0).nonzero().squeeze(1)
        targets = targets[:, kept]
        inputs["logits_to_keep"] = sent(kept, inputs["input_ids"].device) if "input_ids" in inputs else kept
    return completion_loss(_part(model, model(**inputs), "logits"), targets, taps.options)


def _own_loss(model: nn.Module, batch: Batch, options: CalibrationOptions) -> Tensor:
    if (options.tokens, options.weighting) != ("nonpad", "example_mean"):
        raise ConfigError(
            "The calibration options tokens and weighting are about completion tokens, and this "
            f"{type(model).__name__} is no language model: its own loss is used. Leave them at their defaults."
        )
    labels_of(batch)  # raises a clear error if there are none
    return _part(model, model(**batch), "loss") * num_examples_of(batch)


def _part(model: nn.Module, output: Any, name: str) -> Tensor:
    """Read the logits or the loss from a model's output, an object of transformers or a dictionary."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if not isinstance(found, Tensor):
        raise CalibrationError(
            f"Calibration looks at the gradient of a loss, but this {type(model).__name__} gives no {name}. Say what "
            "its loss is: calibrate(..., loss_fn=lambda model, batch: ...)."
        )
    return found


def _needs_all_logits(model: nn.Module, taps: Taps) -> bool:
    """Return whether all positions need logits: a layer of the head is captured, or the model cannot leave any out.

    Without the other positions, a pass takes a seventh less time (benchmarks/calibration.py).
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone = getattr(base, getattr(base, "base_model_prefix", ""), base)
    below_head = {id(module) for module in backbone.modules()}
    return "logits_to_keep" not in inspect.signature(base.forward).parameters or any(
        id(layer) not in below_head or layer is base.get_output_embeddings() for layer in taps.layers.values()
    )
