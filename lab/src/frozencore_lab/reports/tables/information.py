"""What each constructor may look at (paper, table "basis-signals"), from what its row of the table says it reads."""

from __future__ import annotations

from frozencore.constructors import CONSTRUCTORS
from frozencore.maths.moments import MomentName
from frozencore.tune.methods import method_name
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.sheets.sheet import Sheet, label
from frozencore_lab.reports.tables.hyper_parameters import methods_of

LETTERS: dict[MomentName, str] = {
    "cross": "G", "input_square": "a", "error_square": "d", "input_outer": "A", "error_outer": "D",
    "output_outer": "E[yyᵀ]", "input_total": "E[x]", "output_total": "E[y]",
}  # fmt: skip
INPUT: frozenset[MomentName] = frozenset({"input_square", "input_outer"})
OUTPUT: frozenset[MomentName] = frozenset({"error_square", "error_outer", "output_outer"})
HEADINGS = ("constructor", "task signal", "geometry", "source")


def information_sheet(campaign: Campaign) -> Sheet | None:
    """A line for each constructor of the campaign, at its default options; None where there is none."""
    named = [study.method_of(name) for study in campaign.studies.values() for name in methods_of(campaign, study)]
    names = [name for name in dict.fromkeys(named) if name in CONSTRUCTORS]
    if not names:
        return None
    return Sheet(
        "constructors",
        "What the constructors look at",
        "Task signal: the signed pairing of inputs and output errors, G. Indirect: the data are seen without it.",
        HEADINGS,
        tuple(tuple(map(label, (method_name(name), *_information(name)))) for name in names),
        num_labels=len(HEADINGS),
    )


def _information(name: str) -> tuple[str, str, str]:
    """Task signal, geometry and source."""
    row = CONSTRUCTORS[name]
    needs = row.needs(row.options(coordinates="qr"))  # of the spans: Fisher coordinates read a and d beside
    if not needs:
        return ("no", "weight", "spectrum of W") if row.weights_only else ("no", "no", "random draw")
    sides = [side for side, moments in (("input", INPUT), ("output", OUTPUT)) if needs & moments]
    read = [letter for moment, letter in LETTERS.items() if moment in needs]
    return "yes" if "cross" in needs else "indirect", " and ".join(sides) or "no", ", ".join(read)
