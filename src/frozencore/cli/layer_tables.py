"""Tables of layers: what calibration found, and what a saved basis is. A line for each quantity, or for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.adapter.inspection import LayerReport
from frozencore.cli.tables import allocation_line, values_in_words
from frozencore.words import num_of

LEGEND = {
    "m x n": "outputs by inputs of the layer",
    "coher. P": "coherence, the largest leverage of an output over its mean; 1 is even, m/r sits on single ones",
    "coher. Q": "the same of the inputs",
    "‖R‖": "how far the core was trained",
    "effective": "independent directions that were found; the rest of the rank are seeded random ones",
    "σ₁": "the constructor's largest singular value",
    "σ_r": "the last that the rank keeps",
    "σ₁(T)": "largest singular value of the whitened cross moment",
    "σ_r(T)": "the last that the rank keeps",
    "‖PᵀGQ‖": "norm of the gradient that the core sees",
    "of ‖G‖": "its share of the whole gradient's",
    "J": "squared correlation that the basis captures",
    "of best": "its share of the largest that a basis of this rank could capture",
    "max/med a": "largest over median second moment of the inputs: outlier channels",
    "max/med d": "the same of the output errors",
    "cos P": "mean cosine of the angles to the other basis, outputs; 1 is the same span",
    "cos Q": "the same of the inputs",
}
SMALL_IS_WORST = ("effective", "of ‖G‖", "of best", "cos P", "cos Q")
LARGE_IS_WORST = ("coher. P", "coher. Q", "max/med a", "max/med d")
SHARES, COSINES = ("of ‖G‖", "of best"), ("cos P", "cos Q")
Column = Sequence[float | None]


def calibration_summary(calibration: Calibration, *, every_layer: bool = False) -> Group:
    """What calibration found: the spread over the layers, or a line for each of them."""
    found = calibration.layers
    ends = [(layer.spectrum[0], layer.spectrum[-1]) if layer.spectrum else (None, None) for layer in found.values()]
    columns: dict[str, Column] = {
        "tokens": [layer.num_tokens for layer in found.values()],
        "rank": [layer.rank for layer in found.values()],
        "effective": [layer.effective_rank for layer in found.values()],
        "σ₁": [first for first, _ in ends],
        "σ_r": [last for _, last in ends],
        "max/med a": [layer.input_spread for layer in found.values()],
        "max/med d": [layer.error_spread for layer in found.values()],
    }
    title = f"Calibration, {calibration.time_s:.1f} s"
    lines = []
    if calibration.rank_budget is not None:
        ranks = {name: layer.rank for name, layer in found.items()}
        lines = [Text(allocation_line(calibration.rank_budget, ranks | dict.fromkeys(calibration.not_adapted, 0)))]
    table = _by_layer(title, list(found), columns) if every_layer else _spread(title, list(found), columns)
    return Group(table, *lines, _legend(columns))


def inspection_table(reports: Mapping[str, LayerReport], *, every_layer: bool = False) -> Group:
    """A saved adapter's bases and their totals: the spread over the layers, or a line for each of them."""
    columns, names = _columns(list(reports.values())), list(reports)
    shapes = [f"{report.basis.shape[0]} x {report.basis.shape[1]}" for report in reports.values()]
    at_once = sum(report.basis.values_at_once for report in reports.values())
    in_all = sum(report.basis.values_in_all for report in reports.values())
    basis_bytes = sum(report.basis.basis_bytes for report in reports.values())
    worst = max(report.basis.orthonormality_error for report in reports.values())
    return Group(
        _by_layer("Bases", names, columns, shapes) if every_layer else _spread("Bases", names, columns),
        _legend([*(["m x n"] if every_layer else []), *columns]),
        Text(
            f"{len(reports)} layers; {values_in_words(at_once, in_all)} ({4 * in_all:,} bytes), "
            f"bases {basis_bytes:,} bytes; largest |PᵀP - I| {worst:.1e}"
        ),
    )


def _columns(reports: Sequence[LayerReport]) -> dict[str, Column]:
    columns: dict[str, Column] = {
        "r": [report.basis.rank for report in reports],
        "coher. P": [report.basis.output_coherence for report in reports],
        "coher. Q": [report.basis.input_coherence for report in reports],
        "‖R‖": [report.basis.core_norm for report in reports],
    }
    if captures := [report.capture for report in reports if report.capture]:
        columns |= {
            "effective": [capture.effective_rank for capture in captures],
            "σ₁(T)": [capture.singular_values[0] for capture in captures],
            "σ_r(T)": [capture.singular_values[-1] for capture in captures],
            "‖PᵀGQ‖": [capture.gradient_norm for capture in captures],
            "of ‖G‖": [capture.gradient_share for capture in captures],
            "J": [capture.correlation for capture in captures],
            "of best": [capture.correlation_share for capture in captures],
            "max/med a": [capture.input_spread for capture in captures],
            "max/med d": [capture.error_spread for capture in captures],
        }
    if angles := [report.angles for report in reports if report.angles]:
        columns["cos P"] = [angle.output_cosine for angle in angles]
        columns["cos Q"] = [angle.input_cosine for angle in angles]
    return columns


def _by_layer(
    title: str, layers: Sequence[str], columns: Mapping[str, Column], shapes: Sequence[str] | None = None
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    if shapes is not None:
        table.add_column("m x n", justify="right", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    for i, name in enumerate(layers):
        shape = [] if shapes is None else [shapes[i]]
        table.add_row(Text(name), *shape, *(_cell(heading, column[i]) for heading, column in columns.items()))
    return table


def _spread(title: str, layers: Sequence[str], columns: Mapping[str, Column]) -> Table:
    """The smallest, the middle and the largest value of each quantity, and the layer that is worst by it."""
    table = Table(title=f"{title}: {num_of(len(layers), 'layer')} (--all-layers shows each)", title_justify="left")
    table.add_column("")
    for heading in ("smallest", "median", "largest"):
        table.add_column(heading, justify="right")
    table.add_column("worst layer")
    for heading, column in columns.items():
        known = [(value, name) for value, name in zip(column, layers, strict=True) if value is not None]
        if known:
            least, most = (pick(known, key=lambda pair: pair[0]) for pick in (min, max))
            worst = {**dict.fromkeys(SMALL_IS_WORST, least), **dict.fromkeys(LARGE_IS_WORST, most)}.get(heading)
            at = Text(worst[1]) if worst is not None and least[0] != most[0] else Text("")
            values = (least[0], median(value for value, _ in known), most[0])
            table.add_row(heading, *(_cell(heading, value) for value in values), at)
    return table


def _cell(heading: str, value: float | None) -> str:
    if value is None:
        return ""
    if heading in SHARES:
        return f"{value:.0%}"
    if heading in COSINES:
        return f"{value:.3f}"
    if heading in LARGE_IS_WORST:
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _legend(columns: Iterable[str]) -> Text:
    """What the abbreviated headings mean."""
    return Text("\n".join(f"{heading}: {LEGEND[heading]}" for heading in columns if heading in LEGEND), style="dim")
