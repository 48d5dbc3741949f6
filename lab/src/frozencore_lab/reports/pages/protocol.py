"""A campaign's specification, as its report states it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.labels import axis_name, value_name


def protocol_yaml(campaign: Campaign) -> str:
    """The specification as YAML, without what is at its default."""
    content = campaign.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110))


def studies_axes(campaign: Campaign) -> Iterator[tuple[str, str, str]]:
    """Study, option and its values, line by line: what all runs share first."""
    for name, folder in campaign.models.items():
        yield "all", f"model {name}", folder
    for name, value in campaign.base.items():
        yield "all", axis_name(name), value_name(name, value)
    for study in campaign.studies.values():
        for name, values in study.axes.items():
            yield study.title, axis_name(name), ", ".join(value_name(name, value) for value in values)
        for name, value in study.fixed.items():
            yield study.title, axis_name(name), value_name(name, value)
        for variant, options in study.variants.items():
            said = "; ".join(f"{axis_name(name)} {value_name(name, value)}" for name, value in options.items())
            yield study.title, variant, said
        if study.search is not None:
            for grid in study.search.grids:
                chosen = "; ".join(f"{axis_name(name)} {_listed(name, values)}" for name, values in grid.items())
                yield study.title, f"search by {study.search.select.replace('_', ' ')}", chosen


def _listed(name: str, values: Any) -> str:
    return "{" + ", ".join(value_name("method" if name == "for" else name, value) for value in values) + "}"
