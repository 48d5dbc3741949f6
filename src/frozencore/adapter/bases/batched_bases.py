"""Build the bases of layers of one shape in one batched SVD, because single SVDs on a GPU wait for launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from frozencore.constructors import BasisOptions, LayerEvidence, build_basis, find_constructor
from frozencore.constructors.fcca import whitened_cross_moment
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.batched_svd import truncated_svds
from frozencore.maths.linalg import TruncatedSVD
from frozencore.maths.moments import LayerMoments

BATCH_BYTES = 128 * 2**20  # whitened cross moments held at a time


def batches_of_one_shape(
    names: Iterable[str],
    moments: Mapping[str, LayerMoments],
    constructor: str,
    options: Mapping[str, BasisOptions],
) -> list[tuple[str, ...]]:
    """Group layers whose bases come from one batched SVD; other layers are groups of one.

    On a CPU every layer is a group of one: this is as fast, and a layer's bytes do not depend on other layers.
    """
    row = find_constructor(constructor)
    groups: dict[object, list[tuple[str, ...]]] = defaultdict(list)
    for name in names:
        own, mine = moments.get(name), options[name]
        if row.metric(mine) is None or mine.svd_method != "auto" or not _is_on_gpu(own):
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


def build_batch(constructor: str, layers: Sequence[LayerEvidence], options: Sequence[BasisOptions]) -> list[Basis]:
    """Build a group of :func:`batches_of_one_shape`; equals ``build_basis`` except for rounding."""
    if len(layers) < 2:
        return [build_basis(constructor, layer, own) for layer, own in zip(layers, options, strict=True)]
    row, whitened = find_constructor(constructor), []
    for layer, own in zip(layers, options, strict=True):
        try:
            metric = row.metric(own)
            assert metric is not None
            whitened.append(whitened_cross_moment(layer.data, metric))
        except CalibrationError as error:
            raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
    T = torch.stack(whitened)
    whitened.clear()
    seeds = [layer.seed(own.seed) for layer, own in zip(layers, options, strict=True)]
    svds = truncated_svds(T, options[0].rank, seeds=seeds)
    has_signal = T.flatten(1).any(1).tolist()
    nothing = [TruncatedSVD(svd.U[:, :0], svd.S[:0], svd.V[:, :0]) for svd in svds]  # given to layers without gradient
    svds = [svd if some else none for svd, none, some in zip(svds, nothing, has_signal, strict=True)]
    return [row.build_of_svd(layer, svd, own) for layer, svd, own in zip(layers, svds, options, strict=True)]


def _is_on_gpu(moments: LayerMoments | None) -> bool:
    return moments is not None and moments.cross is not None and moments.cross.is_cuda
