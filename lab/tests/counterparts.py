"""The table of docs/campaign.md that says which file of which report holds the paper's tables, figures and counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from places import ROOT

PAGE = ROOT / "docs" / "campaign.md"
HEADING = "### The paper's tables and figures"


@dataclass(frozen=True)
class Counterpart:
    """One line.

    Attributes:
        label: In the paper, ``tab:...`` or ``fig:...``; ``text: ...`` of what only its text says.
        campaigns: Names of files in ``lab/campaigns/``; several are reported on together.
        files: Relative to the report's folder; none for a drawing without data.
    """

    label: str
    campaigns: tuple[str, ...]
    files: tuple[str, ...]


def counterparts() -> list[Counterpart]:
    """Every line of the table, in its order."""
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ((?:tab|fig|text):[^|]*?) \| ([^|]*) \| ?([^|]*)\|$", section, re.MULTILINE)
    return [
        Counterpart(label, tuple(re.findall("`([^`]+)`", campaigns)), tuple(re.findall("`([^`]+)`", files)))
        for label, campaigns, files in lines
    ]
