"""Run a model for scoring: in evaluation mode, with or without a PEFT wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.calibration.batches import IGNORED, predicted
from frozencore.calibration.preserve import without_randomness
from frozencore.progress import Progress, no_progress
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.unwrapped_model import base_of

NOT_FINITE = (
    "are not finite. Look for NaN in the weights of the model, and for a core that is too large in its adapter: "
    "`frozencore inspect` shows the norms."
)


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one example.

    Attributes:
        prediction: The chosen choice, or the generated number in normal form; ``None`` for no answer.
        logprobs: Choice tasks: the compared log-likelihood of each choice, in nats.
        text: Generated tasks: the generated text, without the prompt.
    """

    id: str
    prediction: str | None
    gold: str
    correct: bool
    logprobs: tuple[float, ...] = ()
    text: str = ""


@contextmanager
def scoring_mode(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode without gradients inside; restore every module's mode, also after an error.

    The output layer gets contiguous inputs. Where a model takes the last n positions of each row, torch would multiply
    each row by the weights alone: on CPUs several times slower, in bfloat16 hundreds of times.
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode(), without_randomness(model), _contiguous_inputs(output_layer_of(model)):
            yield
    finally:
        for module, training in was_training.items():
            module.training = training


def output_layer_of(model: nn.Module) -> nn.Module | None:
    """The layer that makes the logits; None if the model does not name it."""
    head: nn.Module | None = getattr(base_of(model), "get_output_embeddings", lambda: None)()
    return head


def _contiguous_inputs(layer: nn.Module | None) -> AbstractContextManager[object]:
    def contiguous(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.contiguous() if isinstance(one, Tensor) else one for one in given)

    return nullcontext() if layer is None else layer.register_forward_pre_hook(contiguous)


def vocabulary_of(model: nn.Module) -> int:
    """The number of logits at one position."""
    size: int = base_of(model).config.get_text_config().vocab_size
    return size


def forward_accepts(model: nn.Module, *names: str) -> bool:
    """Return whether the transformers model's forward accepts all these arguments."""
    return set(names) <= set(inspect.signature(base_of(model).forward).parameters)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of target tokens, in float32 or wider: logits (..., vocabulary), targets (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def row_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The sum of nats over each row's completion tokens, in float64, (rows,).

    The rows of a batch have completions at different positions, so logits are computed only at completion tokens: with
    a large vocabulary the others would cost more than the layers. A causal model gets no padding mask, because padding
    is on the right, where no token of a row sees it.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``labels``, each (rows, tokens), padded on the right.
    """
    inputs = {"input_ids": batch["input_ids"]}
    if not _is_causal(model):
        inputs["attention_mask"] = batch["attention_mask"]
    targets = predicted(batch["labels"])
    wanted = targets != IGNORED
    with _logits_at(model, wanted) as narrowed:
        logits = model(**inputs).logits
    logits = logits.flatten(0, 1) if narrowed else logits[wanted]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = cross_entropy(logits, targets[wanted].to(logits.device), reduction="none").double()
    row_of = wanted.nonzero()[:, 0].to(nats.device)
    return nats.new_zeros(len(targets)).index_add(0, row_of, nats)


def _is_causal(model: nn.Module) -> bool:
    """Return whether every attention layer is marked as causal."""
    marks = [module.__dict__["is_causal"] for module in model.modules() if "is_causal" in module.__dict__]
    return bool(marks) and all(marks)


@contextmanager
def _logits_at(model: nn.Module, wanted: Tensor) -> Iterator[list[bool]]:
    """Let the output layer see only the wanted positions, as one row; the list stays empty if that is impossible."""
    head, narrowed = output_layer_of(model), list[bool]()
    if head is None or isinstance(head, FrozenCoreLinear) or not forward_accepts(model, "logits_to_keep"):
        yield narrowed  # the output layer has row cores, or the model reads logits in another way
        return

    def narrow(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not given or given[0].shape[:-1] != wanted.shape:
            return None
        narrowed.append(True)
        return given[0][wanted.to(given[0].device)].unsqueeze(0), *given[1:]

    handle = head.register_forward_pre_hook(narrow)
    try:
        yield narrowed
    finally:
        handle.remove()


def nats_of_rows(
    model: nn.Module,
    rows: Sequence[TokenRow],
    *,
    pad_id: int,
    with_cores: Callable[[list[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
    progress: Progress = no_progress,
) -> list[float]:
    """The sum of nats over the completion tokens of each row, in the rows' order.

    Args:
        with_cores: Called with the numbers of the rows of a batch. The batch runs inside the context that it returns.
    """
    device, collate, nats = next(model.parameters()).device, PaddingCollator(pad_id), dict[int, float]()

    def score(group: list[int]) -> None:
        batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
        with with_cores(group):
            nats.update(zip(group, row_losses(model, batch).tolist(), strict=True))

    with scoring_mode(model):
        score_in_groups(score, row_sizes(model, rows), device, progress=progress)
    return [nats[i] for i in range(len(rows))]


def row_sizes(model: nn.Module, rows: Sequence[TokenRow]) -> list[tuple[int, int]]:
    """Tokens and logits of each row, for :func:`frozencore.tune.rows.token_batches.row_costs`."""
    vocabulary = vocabulary_of(model)
    return [(len(row.input_ids), row.num_targets * vocabulary) for row in rows]


def unload_adapter(model: PeftModel) -> nn.Module:
    """Remove the adapter and return the original transformers model."""
    base: Any = base_of(model)
    copied = {name: m.original_module for name, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    bare: nn.Module = model.unload()  # leaves trained copies of whole modules in place
    for name, module in copied.items():
        bare.set_submodule(name, module)
    return bare
