"""Data sets written as they lie on the hub: Parquet files, and a card that names configurations and splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.hub_split import without_bars

DEFAULT = "default"


def write_hub_folders(root: Path, contents: Mapping[HubDataset, Mapping[str, Any]]) -> None:
    """Write data sets under ``root``, where :meth:`HubDataset.rows` finds them.

    Args:
        contents: Of each configuration its official splits, ``datasets.Dataset`` by name. All configurations of one
            hub id must come together: they have one card.
    """
    cards: dict[str, list[str]] = {}
    for source, splits in contents.items():
        config = source.config or DEFAULT
        card = cards.setdefault(source.path, ["---", "configs:"])
        card += [f"- config_name: {config}", "  data_files:"]
        for name, rows in splits.items():
            file = root / source.path / config / f"{name}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            with without_bars():
                rows.to_parquet(str(file))
            card += [f"  - split: {name}", f"    path: {config}/{name}.parquet"]
    for path, card in cards.items():
        (root / path / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
