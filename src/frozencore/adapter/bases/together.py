"""Bases of layers of one shape, whose SVDs are one call on a GPU: one by one it waits for launching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from frozencore.constructors import BasisOptions, LayerEvidence, find_constructor
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.batched_svd import truncated_svds
from frozencore.maths.linalg import TruncatedSVD
from frozencore.maths.moments import LayerMoments

BATCH_BYTES = 128 * 2**20  # of whitened cross moments at a time, beside all that wait


def pays_together(moments: LayerMoments | None) -> bool:
    """A CPU does one after the other as fast, and has the same bytes whatever stands beside a layer."""
    return moments is not None and moments.cross is not None and moments.cross.is_cuda


def in_batches(
    names: Iterable[str],
    moments: Mapping[str, LayerMoments],
    constructor: str,
    options: Mapping[str, BasisOptions],
) -> list[tuple[str, ...]]:
    """Layers whose bases are built together, in order; alone where the constructor's is no SVD of a whitened G.

    Args:
        options: Of each layer.
    """
    row = find_constructor(constructor)
    groups: dict[object, list[tuple[str, ...]]] = defaultdict(list)
    for name in names:
        own, mine = moments.get(name), options[name]
        if row.metric(mine) is None or mine.svd_method != "auto" or not pays_together(own):
            groups[name].append((name,))
            continue
        assert own is not None
        assert own.cross is not None
        kind = own.cross.shape, own.cross.device, mine.rank
        most = max(1, BATCH_BYTES // (own.cross.numel() * own.cross.element_size()))
        if not groups[kind] or len(groups[kind][-1]) == most:
            groups[kind].append(())
        groups[kind][-1] += (name,)
    return [batch for batches in groups.values() for batch in batches]


def build_together(
    constructor: str, layers: Sequence[LayerEvidence], options: Sequence[BasisOptions]
) -> dict[str, Basis]:
    """The bases that ``build_basis`` would give, to rounding, of layers of one shape and rank.

    Raises:
        CalibrationError: A moment is missing or not finite; the layer is named.
    """
    row, whitened = find_constructor(constructor), []
    for layer, own in zip(layers, options, strict=True):
        try:
            whitened.append(row.matrix(layer.data, own))
        except CalibrationError as error:
            raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
    T = torch.stack(whitened)
    whitened.clear()
    seeds = [layer.seed(own.seed) for layer, own in zip(layers, options, strict=True)]
    svds = truncated_svds(T, options[0].rank, seeds=seeds)
    has_signal = T.flatten(1).any(1).tolist()
    return {
        layer.name: row.build_streamed(layer, svd if some else _nothing(svd), own)
        for layer, own, svd, some in zip(layers, options, svds, has_signal, strict=True)
    }


def _nothing(svd: TruncatedSVD) -> TruncatedSVD:
    """Of a layer without gradient."""
    return TruncatedSVD(svd.U[:, :0], svd.S[:0], svd.V[:, :0])
