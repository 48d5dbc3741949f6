"""The loss whose gradient calibration looks at, and the tokens that count in it.

Example e with completion tokens C_e:  L = Σ_e (1/|C_e|) Σ_{t ∈ C_e} -log p(token t | tokens before t).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from frozencore.calibration.options import CalibrationOptions
from frozencore.errors import CalibrationError

IGNORED = -100  # the label of a token without loss, as in transformers


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """The labels of a batch.

    Raises:
        CalibrationError: It has none.
    """
    if batch.get("labels") is None:
        raise CalibrationError(
            "Calibration needs labels for its loss and its completion tokens, but a batch has the keys "
            f"{', '.join(sorted(batch))}. Add 'labels' (-100 on tokens without loss)."
        )
    return batch["labels"]


def predicted(labels: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The label that position t predicts: the next token's, and none at the end."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def calibration_loss(
    logits: Float[Tensor, "b t v"],
    labels: Int[Tensor, "b t"],
    options: CalibrationOptions,
    generator: torch.Generator,
    *,
    aligned: bool = False,
) -> Float[Tensor, ""]:
    """Sum over the batch's examples of their loss, in float32 at least.

    Args:
        aligned: Position t predicts the label at t, because inputs or labels were shifted before, not the next one.

    Raises:
        CalibrationError: No token of the batch carries a label.
    """
    targets = labels if aligned else predicted(labels)
    counted = targets.ne(IGNORED)
    if not counted.any():
        raise CalibrationError(
            "Calibration needs completion tokens, but every label of a batch is masked (-100). "
            "Check that the prompt does not fill the whole length limit."
        )
    logits_of_counted = logits[counted].to(torch.promote_types(logits.dtype, torch.float32))
    chosen = targets[counted]
    if options.fisher_labels == "mc":
        probabilities = logits_of_counted.detach().softmax(-1).cpu()
        chosen = torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(logits.device)
    loss_of_token = cross_entropy(logits_of_counted, chosen, reduction="none")
    if options.weighting == "token_sum":
        return loss_of_token.sum()
    tokens_of_example = counted.sum(1, keepdim=True).expand_as(counted)
    return (loss_of_token / tokens_of_example[counted]).sum()


def counted_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The tokens of a batch whose x and δ enter the moments."""
    counted = _text(_ids(batch), batch.get("attention_mask"), options)
    if options.tokens == "completion":
        counted = counted & predicted(labels_of(batch)).ne(IGNORED)
    return counted


def counted_source_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b s"]:
    """The encoder's tokens of a batch; none of them is completion, so all that is not padding counts."""
    return _text(_ids(batch), batch.get("attention_mask"), options)


def counted_target_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The decoder's tokens of a batch: its mask if there is one, else those that predict a label.

    Without labels per token, as in a classifier, the decoder reads what it is given, or the source once more.
    """
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if labels is None or labels.ndim < 2:
        ids = batch.get("decoder_input_ids")
        return counted_source_tokens(batch, options) if ids is None else _text(ids, mask, options)
    predicts = labels.ne(IGNORED)
    counted = _text(labels, predicts if mask is None else mask, options)
    return counted & predicts if options.tokens == "completion" else counted


def _ids(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]


def _text(ids: Tensor, mask: Tensor | None, options: CalibrationOptions) -> Tensor:
    """What is not padding, but for the first tokens."""
    text = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device) if mask is None else mask.bool()
    return text & (text.cumsum(1) > options.skip_first) if options.skip_first else text
