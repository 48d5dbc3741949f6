"""From a model and batches to the moments of its layers, in as many passes over the examples as there are groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from frozencore.calibration.any_loss import LossFn, with_loss
from frozencore.calibration.batches import Batch
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.calibration.run_pass import run_pass
from frozencore.calibration.taps import Taps
from frozencore.errors import CalibrationError
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.words import Progress

FCCA_NEEDS: frozenset[MomentName] = frozenset({"cross", "input_square", "error_square"})


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module] | Sequence[str],
    *,
    needs: frozenset[MomentName] = FCCA_NEEDS,
    options: CalibrationOptions | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerMoments]:
    """Sum moments of the named layers over the calibration examples.

    The model runs in evaluation mode and is left exactly as it was: modes, hooks, gradients, RNG.

    Args:
        model: A language model whose output has ``logits``, decoder-only or encoder-decoder; any model that returns
            ``loss`` also works.
        batches: Dictionaries with ``input_ids``, ``attention_mask`` and ``labels`` (-100 on tokens without loss); of
            whatever the model takes where it gives a loss itself.
        layers: Modules with an input (..., n) and an output (..., m): names in ``model``, or a mapping from names
            of your own to modules.
        needs: The moments to sum. Each batch takes a forward pass; G, d and D take a backward pass as well, and G
            with d or D takes two under ``fisher_labels="mc"``: G is always of the data's labels.

        loss_fn: The loss instead of the model's own; as for :func:`frozencore.calibrate`.

    Returns:
        The moments of each layer, in the order given.

    Raises:
        CalibrationError: No examples, no labels, NaN or Inf (batch and layer are named), or a layer that no counted
            token reached.
    """
    options = options if loss_fn is None and options is not None else with_loss(options, loss_fn)
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
            taps = Taps({name: modules[name] for name in group}, needs, options)
            recorders = run_pass(model, batches, taps, share_of(progress, index, len(groups)))
            moments |= {name: recorder.moments() for name, recorder in recorders.items()}
    refuse_unreached({name: layer.num_tokens for name, layer in moments.items()})
    return moments


def refuse_unreached(num_tokens: Mapping[str, int]) -> None:
    """A layer without a token has no moments.

    Raises:
        CalibrationError: There is one; it is named.
    """
    unreached = [name for name, count in num_tokens.items() if count == 0]
    if unreached:
        raise CalibrationError(
            f"Layer {unreached[0]!r} ({len(unreached)} in all) received no counted token. "
            "Check that the model uses it and that the batches are not all padding."
        )


def share_of(progress: Progress | None, index: int, num_passes: int) -> Progress | None:
    """Progress of one pass among several, as if all were one."""
    if progress is None or num_passes == 1:
        return progress

    def tell(stage: str, done: int, total: int | None, _: str = "") -> None:
        progress(stage, done + index * (total or 0), total * num_passes if total is not None else None)

    return tell
