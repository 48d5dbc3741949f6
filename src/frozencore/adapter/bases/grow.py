"""Widening bases: new directions for new groups of rows beside the ones that are there.

    P' = [P, P₁],   Q' = [Q, Q₁],   R' = [[R, 0], [0, 0]],   P' R' Q'ᵀ = P R Qᵀ

P and Q keep their bits and the scale s stays, so cores of the narrower basis mean on the wider one what they meant.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from frozencore.adapter.bases.access import adapter_for_new_bases
from frozencore.adapter.bases.bases_of_groups import GroupWork, require_groups
from frozencore.adapter.bases.calibrate import Calibration, describe, reporting, warn_of_weak_layers
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.examples import batches_from
from frozencore.calibration.layer_owners import assign_owners, require_same_bases, share_bases
from frozencore.errors import ConfigError
from frozencore.maths.basis import GROWING_COORDINATES, known_basis
from frozencore.ranks import all_ranks_or_none
from frozencore.words import Progress


def grow_basis(
    model: nn.Module,
    groups: Mapping[str, Any],
    *,
    by: int,
    weights: Mapping[str, float] | None = None,
    adapter_name: str | None = None,
    options: CalibrationOptions | None = None,
    progress: bool | Progress = True,
) -> Calibration:
    """Widen the bases of an adapter for new groups of rows; its core is kept, and its outputs are what they were.

    The new directions are those outside of the old ones that hold most of what the new groups want (docs/maths.md).
    :func:`frozencore.save_basis` then writes the widened basis, which cores of the old one can be loaded on. Make the
    optimiser afterwards: the core is another parameter.

    Args:
        model: A model with a frozen-core adapter that has bases, on a saved basis for instance.
        groups: The batches of each new group (a tenant, a task) by name, as ``calibrate`` takes them; one will do.
        by: The number of new directions on each side, in every layer.
        weights: The weight of each group, as ``calibrate`` takes them.
        adapter_name: The active one by default.

    Returns:
        The result in each layer, and what the wider bases hold of each new group.

    Raises:
        ConfigError: No new direction, more than a layer has room for, a method or coordinates that cannot be widened,
            ranks that differ between layers, no group, or a wrong weight.
        CalibrationError: The adapter has no bases, it is merged, or the batches are bad. No basis is changed then.
    """
    adapter_name, config, layers = adapter_for_new_bases(model, adapter_name, reset=True)
    weights = require_groups(groups, config, weights)
    rank = _widened_rank(config, layers, adapter_name, by)
    before = {name: known_basis(*layer.factors(adapter_name)[:2]) for name, layer in layers.items()}
    started, grown_from = time.perf_counter(), config.own_header() or config._grown_from
    with reporting(progress) as tell:
        with all_ranks_or_none():
            of_groups = {name: list(batches_from(rows)) for name, rows in groups.items()}
        owners = assign_owners({name: layer.shape for name, layer in layers.items()})
        work = GroupWork(
            model, adapter_name, config, layers, owners, tell, ranks=dict.fromkeys(layers, rank), groups=of_groups,
            weights=weights, beside=before,
        )  # fmt: skip
        work.read([batch for batches in of_groups.values() for batch in batches], options or CalibrationOptions())
    bases = share_bases(work.bases, owners, {name: work.like_factors(name) for name in layers})
    require_same_bases({name: (basis.P, basis.Q) for name, basis in bases.items()})
    for name, layer in layers.items():
        core = layer.core(adapter_name).detach().clone()
        layer.resize(adapter_name, rank, layer.frozencore_scale[adapter_name], trains=True)
        layer.set_basis(adapter_name, bases[name])
        with torch.no_grad():
            layer.core(adapter_name)[: len(core), : len(core)] = core
    config.scale_rank, config.r = config.scale_rank or config.r, rank
    config.name_basis(None)
    config._grown_from = grown_from
    warn_of_weak_layers(bases, layers)
    return Calibration(
        layers={name: describe(bases[name], work.diagonals.get(name), None) for name in layers},
        collect_s=work.collect_s,
        build_s=time.perf_counter() - started - work.collect_s,
        shares=work.share_of_groups(),
    )


def _widened_rank(config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer], adapter_name: str, by: int) -> int:
    if type(by) is not int or by < 1:
        raise ConfigError(f"A basis grows by one direction at least, but by={by!r:.20} came.")
    if config.coordinates not in GROWING_COORDINATES:
        raise ConfigError(
            f"A basis grows in the coordinates {', '.join(sorted(GROWING_COORDINATES))}, but this one has "
            f"{config.coordinates!r}. Calibrate a new one."
        )
    if config.rank_pattern:
        raise ConfigError(
            "A basis grows by as much in every layer, but this one has ranks of its own in some "
            "(rank_pattern). Calibrate a new one for all groups."
        )
    rank = config.r + by
    for name, layer in layers.items():
        layer.require_basis(adapter_name)
        if rank > min(layer.shape):
            m, n = layer.shape
            raise ConfigError(
                f"A basis has at most min(m, n) directions, but layer {name!r} is {m} x {n} and {config.r} + {by} were "
                "asked for. Grow it by less, or exclude that layer from a new basis."
            )
    return rank
