"""Rank and scale of one layer, which may have a pattern of its own."""

from __future__ import annotations

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer_names import key_for
from frozencore.constructors.options import AUTO_ALPHA


def rank_of(config: FrozenCoreConfig, layer_name: str) -> int:
    """The rank that was asked for in a layer; 0 for one that is not adapted."""
    if config.rank_budget is not None:  # an allocation has full names, which may be the ends of others
        return config.rank_pattern.get(layer_name, config.r)
    key = key_for(config.rank_pattern, layer_name, "rank_pattern")
    return config.r if key is None else config.rank_pattern[key]


def scale_of(config: FrozenCoreConfig, layer_name: str) -> float:
    """s of a layer: alpha over the rank that was asked for, or 1."""
    key = key_for(config.alpha_pattern, layer_name, "alpha_pattern")
    alpha = config.alpha if key is None else config.alpha_pattern[key]
    if alpha is None:
        return 1.0
    return (AUTO_ALPHA if alpha == "auto" else alpha) / rank_of(config, layer_name)
