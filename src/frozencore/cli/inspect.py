"""``frozencore inspect``: say what a folder holds, and show an adapter's bases as JSON or as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.calibration.moments_file import require_moments
from frozencore.cli.console import console
from frozencore.files.adapter_folder import CONFIG_FILE, HEADER_FILE, PEFT_TYPE, adapter_in, read_config
from frozencore.tune.run.run_folder import (
    ADAPTER,
    ASKED,
    BASIS,
    CACHE,
    CHECKPOINTS,
    MOMENTS_FILE,
    PREDICTIONS,
    RECORD,
    SAMPLES,
)
from frozencore.words import num_of, one_line

if TYPE_CHECKING:
    from frozencore.adapter.inspection import LayerReport

PARTS = {
    RECORD: "the record",
    ASKED: "the flags of the run, for --config",
    MOMENTS_FILE: "moments, for --moments",
    ADAPTER: "an adapter",
    BASIS: "a basis, for --basis",
    PREDICTIONS: "the answer to each scored row",
    SAMPLES: "sample answers before and after training",
    CHECKPOINTS: "checkpoints of an interrupted run: the same command with --resume continues",
    CACHE: "results of an interrupted run: the same command with --resume continues",
}
"""The parts of a run's folder."""
LEGEND = {
    "m x n": "outputs by inputs of the layer",
    "coher. P": "coherence of P: largest leverage of an output over the mean; 1: even, m/r: single outputs only",
    "coher. Q": "coherence of Q, the same for the inputs",
    "‖R‖": "norm of the core: the length of its way from zero",
    "effective": "number of independent directions that were found; random ones fill the rest of the rank",
    "σ₁": "the constructor's largest singular value",
    "σ_r": "the last singular value that the rank keeps",
    "σ₁(T)": "largest singular value of the whitened cross moment",
    "σ_r(T)": "the last singular value that the rank keeps",
    "‖PᵀGQ‖": "norm of the gradient that the core sees",
    "of ‖G‖": "share of that norm in the norm of the whole gradient",
    "J": "squared correlation that the basis captures",
    "of best": "J over the largest J of any basis of this rank",
    "max/med a": "largest over median second moment of the inputs: outlier channels",
    "max/med d": "the same for the output errors",
    "cos P": "mean cosine of the angles between the two P; 1 is the same span",
    "cos Q": "the same for Q",
}
SMALL_IS_WORST = ("effective", "of ‖G‖", "of best", "cos P", "cos Q")
LARGE_IS_WORST = ("coher. P", "coher. Q", "max/med a", "max/med d")
SHARES, COSINES = ("of ‖G‖", "of best"), ("cos P", "cos Q")
Column = Sequence[float | None]


def inspect(
    adapter: Annotated[Path, typer.Argument(help="Folder of a run, of a saved frozen-core adapter, or of a basis.")],
    moments: Annotated[
        Path | None, typer.Option(help="Moments file: show how much of the gradient the bases capture.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another adapter or basis: show the principal angles between the bases.")
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    inside, inner = [] if as_json else list(contents(adapter)), adapter / ADAPTER
    if inside and (not (inner / CONFIG_FILE).is_file() or read_config(inner).get("peft_type") != PEFT_TYPE):
        console.print(*inside, sep="\n", soft_wrap=True)
        return
    folder, other = adapter_in(adapter), None if against is None else adapter_in(against)
    if moments is not None:
        require_moments(moments)
    from frozencore.adapter.folders import read_adapter_or_basis
    from frozencore.adapter.inspection import inspect_adapter
    from frozencore.calibration.moments_file import load_moments
    from frozencore.maths.basis import ORTHONORMAL_COORDINATES

    config, layers = read_adapter_or_basis(folder)
    reports = inspect_adapter(
        config,
        layers,
        moments=load_moments(moments) if moments else None,
        other=None if other is None else read_adapter_or_basis(other)[1],
    )
    if as_json:
        found = {name: asdict(report) for name, report in reports.items()}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    if inside:
        console.print(*inside, sep="\n", soft_wrap=True)
    orthonormal = config.coordinates in ORTHONORMAL_COORDINATES
    console.print(inspection_table(reports, every_layer=all_layers, orthonormal=orthonormal))
    saved = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    console.print(f"Saved in {saved:,} bytes.")


def contents(folder: Path) -> Iterator[Text]:
    """Yield a line for each known part of a run's folder, and one for the runs in its folders; none for an adapter."""
    if any((folder / name).is_file() for name in (CONFIG_FILE, HEADER_FILE)):
        return
    for name, words in PARTS.items():
        if (folder / name).exists():
            yield Text(one_line(f"{folder / name}: {_of_record(folder / name) if name == RECORD else words}"))
    if inside := sorted(file.parent.name for file in folder.glob(f"*/{RECORD}")):
        yield Text(one_line(f"{folder}: {num_of(len(inside), 'folder')} with a record: {', '.join(inside)}", 1000))


def _of_record(file: Path) -> str:
    from frozencore.tune.run.record import TunedRecord, read_record

    try:
        record = read_record(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "a record, but not of a run, or damaged"
    if not isinstance(record, TunedRecord):
        return "how near two bases are"
    scored = f", accuracy {record.accuracy:.4f}" if record.has("accuracy") else ""
    return f"the record of {record.method} on {record.task or record.config.sources}{scored}"


def inspection_table(
    reports: Mapping[str, LayerReport], *, every_layer: bool = False, orthonormal: bool = True
) -> Group:
    """Show a saved adapter's bases and totals: the spread over the layers, or a line for each layer.

    Args:
        orthonormal: Whether the coordinates promise orthonormal bases; their error is then shown.
    """

    columns, names = _columns(list(reports.values())), list(reports)
    shapes = [f"{report.basis.shape[0]} x {report.basis.shape[1]}" for report in reports.values()]
    num_values = sum(report.basis.num_values for report in reports.values())
    basis_bytes = sum(report.basis.basis_bytes for report in reports.values())
    worst = max(report.basis.orthonormality_error for report in reports.values())
    return Group(
        by_layer("Bases", names, columns, shapes) if every_layer else spread("Bases", names, columns),
        legend([*(["m x n"] if every_layer else []), *columns]),
        Text(
            f"{len(reports)} layers; {num_of(num_values, 'trained value')} ({4 * num_values:,} bytes), "
            f"bases {basis_bytes:,} bytes{f'; largest |PᵀP - I| {worst:.1e}' if orthonormal else ''}"
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


def by_layer(
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


def spread(title: str, layers: Sequence[str], columns: Mapping[str, Column]) -> Table:
    """Show the smallest, middle and largest value of each quantity, and its worst layer."""
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


def legend(columns: Iterable[str]) -> Text:
    """Explain the abbreviated headings."""
    return Text("\n".join(f"{heading}: {LEGEND[heading]}" for heading in columns if heading in LEGEND), style="dim")
