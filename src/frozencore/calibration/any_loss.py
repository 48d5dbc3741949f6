"""A loss of the user's own: whatever gives one number of a model and a batch, of images, sound or pairs of texts.

What counts is then known from each call of the model, not from the batch: its ``attention_mask`` where a layer sees a
row for each of its tokens, and every row in layers that see others (patches, pooled outputs).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from frozencore.calibration.batches import num_examples_of
from frozencore.calibration.counted import CountedTokens
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.taps import CalibrationPass
from frozencore.errors import CalibrationError, ConfigError

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)``: one number with a gradient, the mean over the batch's examples."""
_OF_COMPLETIONS = {"weighting": "example_mean", "fisher_labels": "empirical", "skip_first": 0}


@dataclass(frozen=True)
class OptionsWithLoss(CalibrationOptions):
    """Options of a pass that looks at the gradient of a loss of the user's own."""

    loss_fn: LossFn | None = None


def with_loss(options: CalibrationOptions | None, loss_fn: LossFn | None) -> CalibrationOptions:
    """The options of a pass, with that loss in place of the model's.

    Raises:
        ConfigError: Options that are about completion tokens.
    """
    options = options or CalibrationOptions()
    if loss_fn is None:
        return options
    odd = [name for name, default in _OF_COMPLETIONS.items() if getattr(options, name) != default]
    if odd or options.tokens == "completion":
        raise ConfigError(
            f"The calibration option {(odd or ['tokens'])[0]} is about completion tokens, of which a loss_fn says "
            "nothing. Leave it at its default."
        )
    return OptionsWithLoss(**asdict(options), loss_fn=loss_fn)


def loss_fn_of(options: CalibrationOptions) -> LossFn | None:
    """The user's own loss, if there is one."""
    return options.loss_fn if isinstance(options, OptionsWithLoss) else None


def summed_loss(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    """The loss summed over the batch's examples.

    Raises:
        CalibrationError: ``loss_fn`` gave no single number.
    """
    loss = loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CalibrationError(
            f"loss_fn(model, batch) gives one number, the mean over the batch's examples, but {came} came."
        )
    return loss.reshape(()) * num_examples_of(batch)


@contextmanager
def watching_calls(model: nn.Module, capture: CalibrationPass) -> Iterator[None]:
    """Each call of the model, or of the base model under its adapters, says with its masks which rows count."""
    only_nonzero = capture.taps.options.tokens == "nonzero_delta"

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _arguments(module, args, kwargs)
        mask = CountedTokens.of_call(given.get("attention_mask"), only_nonzero_delta=only_nonzero)
        if capture.encoder is None:
            capture.tokens = mask
            return
        capture.source_tokens = mask
        capture.tokens = CountedTokens.of_call(given.get("decoder_attention_mask"), only_nonzero_delta=only_nonzero)

    watched = {id(module): module for module in (model, _under_adapters(model))}
    with ExitStack() as undo:
        for module in watched.values():
            undo.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)
        yield


def _under_adapters(model: nn.Module) -> nn.Module:
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    return base


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """By name; a single dictionary stands for its content."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        return {**args[0], **kwargs}
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return kwargs
    return {**bound.arguments, **kwargs}
