"""The loss whose gradient calibration looks at, of the data's labels or of labels that the model draws itself.

Example e with completion tokens C_e:  L = Σ_e (1/|C_e|) Σ_{t ∈ C_e} -log p(token t | tokens before t).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax, nll_loss, pad

from frozencore.calibration.options import Weighting
from frozencore.device import sent
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


@dataclass(frozen=True)
class Predictions:
    """What a model says of the completion tokens of a batch.

    Attributes:
        log_p: Log-probabilities (N x v), in float32 at least. Two losses share them: autograd keeps them in any case,
            and with a large vocabulary they are the largest tensor of a pass.
        labels: The N tokens of the data.
        num_in_example: For each, how many there are in its example (N).
    """

    log_p: Float[Tensor, "N v"]
    labels: Int[Tensor, " N"]
    num_in_example: Int[Tensor, " N"]

    @classmethod
    def of(cls, logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"]) -> Predictions:
        """Those at the positions that predict a token with a label.

        Args:
            targets: The label that each position predicts, -100 where there is none; best on the CPU, for which nobody
                waits.

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
        return cls(log_p=log_p, labels=labels, num_in_example=num_in_example)

    def parts(self, count: int) -> list[Predictions]:
        """Those of equal parts of a batch, whose labels are the same."""
        columns = (self.log_p.chunk(count), self.labels.chunk(count), self.num_in_example.chunk(count))
        return [Predictions(*part) for part in zip(*columns, strict=True)]

    def sampled_labels(self, generator: torch.Generator) -> Int[Tensor, " N"]:
        """A label for each prediction, drawn from the model's own distribution.

        One number a token comes from the generator, on the CPU, so that a seed gives the same labels on every device.
        """
        cumulated = self.log_p.detach().exp().cumsum_(-1)
        chance = torch.rand(len(cumulated), 1, generator=generator, dtype=torch.float64)
        thresholds = chance.to(cumulated.device, cumulated.dtype) * cumulated[:, -1:]
        found = torch.searchsorted(cumulated, thresholds, right=True).squeeze(1)
        return found.clamp_max_(cumulated.shape[1] - 1)


def calibration_loss(predictions: Predictions, labels: Int[Tensor, " N"], weighting: Weighting) -> Float[Tensor, ""]:
    """Sum over the batch's examples of their loss against these labels."""
    loss_of_token = nll_loss(predictions.log_p, labels, reduction="none")
    if weighting == "token_sum":
        return loss_of_token.sum()
    return (loss_of_token / predictions.num_in_example).sum()
