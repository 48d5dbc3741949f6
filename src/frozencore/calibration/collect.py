"""Collect the moments of a model's layers, with one pass over the examples for each group of layers.

Each batch takes one forward pass, and one backward pass if a moment needs output errors. The host finds the counted
tokens before the batch goes to the device, and checks for NaN and Inf after the pass, so the device is not synchronised
in between.

The loss is the model's, with the data's labels, or that of ``loss_fn``. Example e with completion tokens C_e:

    L = Σ_e (1/|C_e|) Σ_{t ∈ C_e} -log p(token t | tokens before t)

On several ranks each rank sums over its share of the examples, and each layer has one owner, which builds its basis.
Sums are reduced once: matrices to the layer's owner, vectors and counts to all ranks. The owners then send their bases
to every rank, so that all ranks have the same bytes. Without a process group one rank owns every layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss

from frozencore.calibration.axes import is_encoder_decoder
from frozencore.calibration.batches import (
    IGNORED,
    Batch,
    CountedTokens,
    counted_tokens,
    example_of_tokens,
    labels_of,
    mapped,
    num_examples_of,
    require_batch,
    targets_of,
    total_examples,
)
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.hooks import (
    CalibrationPass,
    LayerRecorder,
    LossFn,
    PassSpec,
    recording,
)
from frozencore.calibration.preserve import calibration_mode
from frozencore.device import execution_device, to_device
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.progress import Progress, no_progress, share_of
from frozencore.unwrapped_model import base_of


def completion_loss(
    logits: Float[Tensor, "b t v"],
    targets: Int[Tensor, "b t"],
    examples: Int[Tensor, "b t"],
    options: CalibrationOptions,
) -> Float[Tensor, ""]:
    """The loss of the positions that predict a token with a label, summed over the batch's examples.

    Args:
        targets: The label that each position predicts, -100 where there is none. On the CPU it avoids synchronising the
            device.
        examples: The number of each position's example.

    Raises:
        CalibrationError: No token of the batch carries a label.
    """
    counted = targets.ne(IGNORED)
    if not counted.any():
        raise CalibrationError(
            "Calibration needs completion tokens, but every label of a batch is masked (-100). "
            "Check that the prompt does not fill the whole length limit."
        )
    owners = examples[counted]
    num_in_example = owners.bincount()[owners]
    rows, positions, labels, num_in_example = (
        to_device(X, logits.device) for X in (*counted.nonzero(as_tuple=True), targets[counted], num_in_example)
    )
    log_p = log_softmax(logits[rows, positions].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    loss_of_token = nll_loss(log_p, labels, reduction="none")
    return (loss_of_token if options.weighting == "token_sum" else loss_of_token / num_in_example).sum()


def require_options_fit(model: nn.Module, options: CalibrationOptions, loss_fn: LossFn | None) -> None:
    """Raise a ``ConfigError`` if an option is about completion tokens that this model or loss does not have."""
    if loss_fn is None and is_causal(model):
        return
    names = ["skip_first"] if loss_fn is None and _is_language_model(model) else ["skip_first", "weighting"]
    odd = [name for name in names if getattr(options, name) != getattr(CalibrationOptions, name)]
    odd += ["tokens"] if options.tokens == "completion" else []
    if odd:
        what = f"this {type(model).__name__} is no decoder-only language model"
        raise ConfigError(
            f"The calibration option {odd[0]} is about completion tokens, but "
            f"{what if loss_fn is None else 'a loss_fn does not tell them apart'}. Leave it at its default."
        )


def loss_of(model: nn.Module, batch: Batch, on_host: Batch, spec: PassSpec) -> Tensor:
    """Run one forward pass over a batch and compute its loss, summed over the examples.

    Args:
        on_host: The batch on its original device.

    Raises:
        CalibrationError: The model returns no loss.
    """
    if spec.loss_fn is not None:
        loss: object = spec.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise CalibrationError(f"A loss_fn returns one number, the mean over the batch, as a tensor, not {given}.")
        return loss.reshape(()) * num_examples_of(batch)
    if not _is_language_model(model):  # it returns a loss
        if not has_labels(model, batch):
            labels_of(batch)  # raises a clear error
        return _part(model, model(**batch), "loss") * num_examples_of(batch)
    targets, examples = _targets_and_examples(model, on_host)
    if is_encoder_decoder(model):
        return completion_loss(_part(model, model(**batch), "logits"), targets, examples, spec.options)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if not _needs_all_logits(model, spec):
        used = targets.ne(IGNORED).any(0).nonzero().squeeze(1)
        targets, examples = targets[:, used], examples[:, used]
        inputs["logits_to_keep"] = to_device(used, inputs["input_ids"].device) if "input_ids" in inputs else used
    return completion_loss(_part(model, model(**inputs), "logits"), targets, examples, spec.options)


def examples_with_loss(model: nn.Module, batch: Batch) -> list[int]:
    """The numbers of the examples of a batch of which some label is not masked."""
    if not _is_language_model(model):
        return list(range(num_examples_of(batch)))
    targets, examples = _targets_and_examples(model, batch)
    numbers: list[int] = examples[targets.ne(IGNORED)].unique().tolist()
    return numbers


def has_labels(model: nn.Module, batch: Batch) -> bool:
    """Whether a batch has what the model's own loss is made of: labels, or the positions of an answer."""
    if not isinstance(batch, Mapping):
        return False
    taken = () if _is_language_model(model) else inspect.signature(base_of(model).forward).parameters
    names = ["labels", *(name for name in taken if "label" in name or name in ("start_positions", "end_positions"))]
    return any(batch.get(name) is not None for name in names)


def _is_language_model(model: nn.Module) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and can_generate()


def is_causal(model: nn.Module) -> bool:
    """Return whether this is a decoder-only language model: its attention mask shows which rows of all layers count."""
    return _is_language_model(model) and not is_encoder_decoder(model)


def _targets_and_examples(model: nn.Module, batch: Batch) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """The label that each position of a language model predicts, and the number of the position's example."""
    if is_encoder_decoder(model):
        return labels_of(batch), example_of_tokens({}, labels_of(batch))
    targets = targets_of(batch)
    return targets, example_of_tokens(batch, targets)


def _part(model: nn.Module, output: Any, name: str) -> Tensor:
    """The logits or the loss of a model's output, an object of transformers or a dictionary."""
    part = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if not isinstance(part, Tensor):
        raise CalibrationError(
            f"Calibration looks at the gradient of a loss, but this {type(model).__name__} gives no {name}. Say what "
            "its loss is: calibrate(..., loss_fn=lambda model, batch: ...)."
        )
    return part


def _needs_all_logits(model: nn.Module, spec: PassSpec) -> bool:
    """Return whether all positions need logits: a layer of the head is captured, or the model cannot leave any out.

    A model on several GPUs cannot: accelerate moves the positions to the first GPU, and the last one has the head.
    Without the other positions, a pass takes a seventh less time (benchmarks/calibration.py).
    """
    base = base_of(model)
    if len({*getattr(base, "hf_device_map", {}).values()} - {"cpu", "disk"}) > 1:
        return True
    backbone = getattr(base, getattr(base, "base_model_prefix", ""), base)
    below_head = {id(module) for module in backbone.modules()}
    return "logits_to_keep" not in inspect.signature(base.forward).parameters or any(
        id(layer) not in below_head or layer is base.get_output_embeddings() for layer in spec.layers.values()
    )


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module] | Sequence[str],
    *,
    needs: frozenset[MomentName] = CAPTURE_NEEDS,
    options: CalibrationOptions | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = no_progress,
) -> dict[str, LayerMoments]:
    """Sum moments of the named layers over the calibration examples.

    The model runs in evaluation mode. Afterwards its modes, hooks, gradients and RNG are exactly as before.

    Args:
        model: A language model whose output has ``logits``, decoder-only or encoder-decoder; any model that returns
            ``loss`` also works.
        batches: Dictionaries with ``input_ids``, ``attention_mask`` and ``labels`` (-100 on tokens without loss), or
            any other input of a model that returns ``loss``.
        layers: Modules with an input (..., n) and an output (..., m): names in ``model``, or a mapping from any
            names to modules.
        needs: The moments to sum. Each batch takes a forward pass; G, d and D also take a backward pass.
        loss_fn: Replaces the model's loss; see :func:`frozencore.calibrate`.

    Returns:
        The moments of each layer, in the order given.

    Raises:
        CalibrationError: No labels, NaN or Inf (the message names batch and layer), or a layer without
            counted tokens.
        ConfigError: An option is about completion tokens, which this model or ``loss_fn`` does not have; or a name is
            not of a module.
        DataError: The data are not batches.

    >>> model, batch = nn.Sequential(nn.Linear(4, 3)), {"x": torch.randn(5, 4)}
    >>> found = collect_moments(model, [batch], ["0"], loss_fn=lambda model, batch: model(batch["x"]).square().mean())
    >>> found["0"].G.shape, found["0"].num_tokens
    (torch.Size([3, 4]), 5)
    """
    options = options or CalibrationOptions()
    require_options_fit(model, options, loss_fn)
    modules = dict(layers) if isinstance(layers, Mapping) else _modules_named(model, layers)
    names = list(modules)
    groups = [names[i : i + options.group_size] for i in range(0, len(names), options.group_size)]
    moments: dict[str, LayerMoments] = {}
    with calibration_mode(model):
        if len(groups) > 1:  # all must read the same batches, even from a loader that shuffles or can be read once
            batches = list(batches)
        for index, group in enumerate(groups):
            spec = PassSpec({name: modules[name] for name in group}, needs, options, loss_fn)
            recorders = _run_pass(model, batches, spec, share_of(progress, index, len(groups)))
            moments |= {name: recorder.moments() for name, recorder in recorders.items()}
    unreached = [name for name, layer in moments.items() if not layer.num_tokens]
    if unreached:
        reached = next((name for name, layer in moments.items() if layer.num_tokens), None)
        way_out = "Check that there are batches, not all padding, and that the model and its loss use this layer."
        if reached is not None:  # a model of images or sound may use the same short names in both parts
            way_out = f"If the rows do not use it, name the other layers in full, such as {reached!r}."
        raise CalibrationError(f"Layer {unreached[0]!r} ({len(unreached)} in all) received no counted token. {way_out}")
    return moments


def _modules_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    names = [names] if isinstance(names, str) else names
    if (odd := next((name for name in names if name not in known), None)) is not None:
        last = str(odd).rpartition(".")[2]
        like = next((f", such as {name!r}" for name in known if name.endswith(f".{last}")), "")
        raise ConfigError(f"Layers are named in full, as in named_modules(){like}, but {odd!r} was given.")
    return {name: known[name] for name in names}


def _run_pass(
    model: nn.Module, batches: Iterable[Batch], spec: PassSpec, progress: Progress
) -> dict[str, LayerRecorder]:
    """Sum over all batches; :func:`frozencore.calibration.preserve.calibration_mode` must have prepared the model."""
    any_form = spec.loss_fn is not None
    num_examples, total = 0, total_examples(batches, any_form=any_form)
    with recording(spec) as running:
        for index, batch in enumerate(batches):
            require_batch(batch, index, any_form=any_form)
            _run_batch(model, batch, running)
            running.finish_batch(index)
            num_examples += num_examples_of(batch)
            progress("calibration", num_examples, total)
        running.finite_batches.look()
        return running.recorders


def on_device(batch: Batch, device: torch.device, spec: PassSpec) -> tuple[Batch, Batch]:
    """A batch with labels that torch's losses take (int64), where it is and on a device."""
    if spec.loss_fn is None and getattr(batch.get("labels"), "dtype", None) in (torch.int32, torch.int16, torch.int8):
        batch = {**batch, "labels": batch["labels"].long()}
    return batch, mapped(batch, lambda tensor: to_device(tensor, device))


def _run_batch(model: nn.Module, batch: Batch, running: CalibrationPass) -> None:
    spec, device = running.spec, execution_device(model)
    on_host, batch = on_device(batch, device, spec)
    running.tokens = None
    if spec.loss_fn is None and is_causal(model) and {"input_ids", "inputs_embeds"} & batch.keys():
        mask = counted_tokens(on_host, spec.options)
        running.tokens = CountedTokens.from_mask(mask, device=device)
        running.find_order(model)
    if not running.reads_errors:
        with torch.no_grad():
            model(**{key: value for key, value in batch.items() if key != "labels"})
        return
    loss = loss_of(model, batch, on_host, spec)
    if loss.requires_grad:  # else no layer is reached, which is refused at the end
        loss.backward()
