"""Whose labels an output error δ is of, and so how many backward passes a batch takes.

``G = E[δxᵀ]`` is the gradient of the loss on the data: its labels are the data's, always. The gradient over labels
that the model draws itself has expectation zero: a G of them is noise. ``d = E[δ⊙δ]`` and ``D = E[δδᵀ]`` are the output
side of the Fisher metric, for whitening as for FiLoRA: the data's labels give the empirical Fisher (the paper), drawn
ones (``mc``) an estimate of the true one. x, and with it a and A, depends on no label.
"""

from __future__ import annotations

from dataclasses import dataclass

from frozencore.calibration.options import CalibrationOptions, FisherLabels
from frozencore.maths.moments import BACKWARD_MOMENTS, MomentName

OF_THE_FISHER: frozenset[MomentName] = frozenset({"error_square", "error_outer"})


@dataclass(frozen=True)
class Backward:
    """One backward pass over a batch.

    Attributes:
        labels: Those of the loss.
        needs: What is summed in it.
        counts: Tokens are counted, and inputs and outputs read; one backward pass of a batch does.
    """

    labels: FisherLabels
    needs: frozenset[MomentName]
    counts: bool = True


def backward_passes(needs: frozenset[MomentName], options: CalibrationOptions) -> tuple[Backward, ...]:
    """The backward passes after the forward pass of each batch: none, one, or two in the order in which they are made.

    The one over drawn labels comes first. It leaves the graph for the other, which frees it as it goes while the
    large sums grow.
    """
    only_nonzero = options.tokens == "nonzero_delta"
    if needs.isdisjoint(BACKWARD_MOMENTS) and not only_nonzero:
        return ()
    drawn = needs & OF_THE_FISHER if options.fisher_labels == "mc" else frozenset[MomentName]()
    if not drawn:
        return (Backward("empirical", needs),)
    if "cross" not in needs and not only_nonzero:
        return (Backward("mc", needs),)
    return Backward("mc", drawn, counts=False), Backward("empirical", needs - drawn)
