"""``frozencore inspect``: say what a folder holds, and show an adapter's bases as JSON or as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.text import Text

from frozencore.cli.display import console, table_of
from frozencore.files.adapter_folder import PEFT_TYPE, adapter_in, folder_of, holds_adapter, read_config
from frozencore.files.names import ADAPTER, BASIS, COMPRESSION_FILE, CONFIG_FILE, HEADER_FILE, RUN_FILE
from frozencore.text import num_of, one_line
from frozencore.tune.accuracy import accuracy_in_words
from frozencore.tune.folder import CHECKPOINTS, PREDICTIONS, RECORD, SAMPLES, START
from frozencore.tune.record import EvaluationRecord, TunedRecord, read_record

if TYPE_CHECKING:
    from frozencore.adapter.basis import Basis
    from frozencore.adapter.report import LayerReport
    from frozencore.calibration.calibrate import Calibration

PARTS = {
    RECORD: "the record",
    COMPRESSION_FILE: "what each adapter keeps",
    RUN_FILE: "the flags of the run, for --config",
    ADAPTER: "an adapter",
    BASIS: "a basis, for --basis",
    PREDICTIONS: "the answer to each scored row",
    SAMPLES: "sample answers before and after training",
    CHECKPOINTS: "checkpoints of an interrupted run: the same command with --resume continues",
    START: "results of an interrupted run: the same command with --resume continues",
}
"""The parts of a run's folder."""
QUANTITIES: dict[str, tuple[str, str, Literal["small", "large", ""]]] = {
    "m x n": ("outputs by inputs of the layer", "", ""),
    "‖R‖": ("norm of the core: the length of its way from zero", "", ""),
    "effective": (
        "number of independent directions that were found; random ones fill the rest of the rank", "", "small",
    ),
    "σ₁": ("the constructor's largest singular value", "", ""),
    "σ_r": ("the last singular value that the rank keeps", "", ""),
    "max/med a": ("largest over median second moment of the inputs: outlier channels", ".1f", "large"),
    "max/med d": ("the same for the output errors", ".1f", "large"),
}  # fmt: skip
"""The columns by heading: the meaning, the format of its numbers, and which end is the worst."""
Column = Sequence[float | None]


def inspect(
    adapter: Annotated[
        str, typer.Argument(help="Folder of a run; folder or hub id of a saved frozen-core adapter, or of a basis.")
    ],
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    place = folder_of(adapter)
    inside, inner = [] if as_json else list(contents(place)), place / ADAPTER
    if inside and (not (inner / CONFIG_FILE).is_file() or read_config(inner).get("peft_type") != PEFT_TYPE):
        console.print(*inside, sep="\n", soft_wrap=True)
        return
    folder = adapter_in(place)
    from frozencore.adapter.report import read_report

    report = read_report(folder)
    basis = report.basis
    if as_json:
        layers = {name: asdict(layer) for name, layer in report.layers.items()}
        shown = {
            "basis": basis.id, "coordinates": basis.options["coordinates"], "bits": report.bits, "layers": layers,
        }  # fmt: skip
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return
    if inside:
        console.print(*inside, sep="\n", soft_wrap=True)
    if (folder / HEADER_FILE).is_file():
        console.print(*_of_basis(basis, folder), sep="\n", soft_wrap=True)
    orthonormal = basis.options["coordinates"] == "qr"
    console.print(inspection_table(report.layers, every_layer=all_layers, orthonormal=orthonormal))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    few = "" if report.bits in (None, 32) else f", values of {report.bits} bits"
    console.print(f"Saved in {size:,} bytes{few}. Basis: {basis.id}", soft_wrap=True)


def contents(folder: Path) -> Iterator[Text]:
    """Yield lines for each known part of a verb's folder, and one for the runs in its folders; none for an adapter."""
    if holds_adapter(folder):
        return
    for name, words in PARTS.items():
        if (folder / name).exists():
            read = {RECORD: _of_record, COMPRESSION_FILE: _of_compression}.get(name)
            about, *rest = [words] if read is None else read((folder / name).read_text(encoding="utf-8"))
            yield Text(one_line(f"{folder / name}: {about}"))
            yield from (Text(f"  {one_line(line)}") for line in rest)
    if inside := sorted(file.parent.name for file in folder.glob(f"*/{RECORD}")):
        yield Text(one_line(f"{folder}: {num_of(len(inside), 'folder')} with a record: {', '.join(inside)}", 1000))


def _of_basis(basis: Basis, folder: Path) -> Iterator[str]:
    """Yield what a basis was made from; for one of `frozencore compress` also the share that each adapter keeps."""
    yield one_line(f"Basis {basis.id} of {basis.base_model}: {basis.calibrated_on}")
    if (beside := folder.parent / COMPRESSION_FILE).is_file():
        first, *rest = _of_compression(beside.read_text(encoding="utf-8"))
        yield one_line(f"{beside}: {first}")
        yield from (f"  {one_line(line)}" for line in rest)


def _of_compression(text: str) -> Iterator[str]:
    try:
        made = json.loads(text)
        kept = {str(name): float(one["kept"]) for name, one in made["adapters"].items()}
        yield f"{num_of(len(kept), 'adapter')} on one basis of rank {int(made['rank'])}; the share kept of each update:"
        yield from (f"{name} {share:.1%}" for name, share in kept.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        yield "damaged"


def _of_record(text: str) -> Iterator[str]:
    with suppress(ValueError, TypeError):
        if "scores" in json.loads(text):
            yield from _of_evaluation(text)
            return
    try:
        record = read_record(text)
    except ValueError:
        yield "a record, but not of a run, or damaged"
        return
    if not isinstance(record, TunedRecord):
        yield "how near two bases are"
        return
    scored = ""
    if record.accuracy is not None:
        scored = f", accuracy {accuracy_in_words(record.accuracy, record.rows.scored)}"
    yield f"the record of {record.method} on {record.task or record.config.sources}{scored}"


def _of_evaluation(text: str) -> Iterator[str]:
    record = EvaluationRecord.model_validate_json(text)
    yield f"scores on {record.model}; the answers to each task are in SUBJECT/TASK/predictions.jsonl"
    for one in record.scores:
        scores = [f"accuracy {accuracy_in_words(one.score.accuracy, one.num_examples)}"] if one.score else []
        scores += [] if one.held_out_loss is None else [f"{one.held_out_loss:.3f} nats/token"]
        yield f"{one.subject} on {one.task}: {one.failure or ', '.join(scores)}"


def inspection_table(
    reports: Mapping[str, LayerReport], *, every_layer: bool = False, orthonormal: bool = True
) -> Group:
    """Show a saved adapter's bases and totals: the spread over the layers, or a line for each layer.

    Args:
        orthonormal: Whether the coordinates promise orthonormal bases; their error is then shown.
    """
    layers = list(reports.values())
    columns: dict[str, Column] = {"r": [one.rank for one in layers], "‖R‖": [one.core_norm for one in layers]}
    shapes = [f"{report.shape[0]} x {report.shape[1]}" for report in layers]
    num_values = sum(report.num_values for report in layers)
    basis_bytes = sum(report.basis_bytes for report in layers)
    worst = max(report.orthonormality_error for report in layers)
    totals = Text(
        f"{len(reports)} layers; {num_of(num_values, 'trained value')} ({4 * num_values:,} bytes in memory), "
        f"bases {basis_bytes:,} bytes{f'; largest |PᵀP - I| {worst:.1e}' if orthonormal else ''}"
    )
    return Group(layer_table("Bases", list(reports), columns, every_layer=every_layer, shapes=shapes), totals)


def calibration_summary(calibration: Calibration, *, every_layer: bool) -> Group:
    """Show the result of calibration: the spread over the layers, or a line for each layer."""
    layers = calibration.layers
    ends = [(layer.spectrum[0], layer.spectrum[-1]) if layer.spectrum else (None, None) for layer in layers.values()]
    columns: dict[str, Column] = {
        "tokens": [layer.num_tokens for layer in layers.values()],
        "rank": [layer.rank for layer in layers.values()],
        "effective": [layer.effective_rank for layer in layers.values()],
        "σ₁": [first for first, _ in ends],
        "σ_r": [last for _, last in ends],
        "max/med a": [layer.input_spread for layer in layers.values()],
        "max/med d": [layer.error_spread for layer in layers.values()],
    }
    return layer_table(f"Calibration, {calibration.time_s:.1f} s", list(layers), columns, every_layer=every_layer)


def layer_table(
    title: str,
    layers: Sequence[str],
    columns: Mapping[str, Column],
    *,
    every_layer: bool = False,
    shapes: Sequence[str] | None = None,
) -> Group:
    """Show quantities of the layers, and explain their headings.

    Without ``every_layer`` a line has the smallest, middle and largest value of a quantity, and its worst layer.
    """
    headings = [*(["m x n"] if every_layer and shapes else []), *columns]
    if every_layer:
        cells = [[_cell(heading, value) for value in column] for heading, column in columns.items()]
        table = table_of(title, ("layer", *headings), zip(layers, *([shapes] if shapes else []), *cells, strict=True),
                         names=("layer",))  # fmt: skip
    else:
        title = f"{title}: {num_of(len(layers), 'layer')} (--all-layers shows each)"
        rows = [row for heading, column in columns.items() for row in _spread(heading, column, layers)]
        table = table_of(title, ("", "smallest", "median", "largest", "worst layer"), rows, names=("", "worst layer"))
    lines = [f"{heading}: {QUANTITIES[heading][0]}" for heading in headings if heading in QUANTITIES]
    return Group(table, Text("\n".join(lines), style="dim"))


def _spread(heading: str, column: Column, layers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the smallest, middle and largest value of a quantity with its worst layer, if any value is known."""
    known = [(value, -i) for i, value in enumerate(column) if value is not None]
    if known:
        (most, at_most), (least, at_least) = max(known), min(known, key=lambda pair: pair[0])
        worst = {"small": -at_least, "large": -at_most}.get(QUANTITIES.get(heading, ("", "", ""))[2])
        at = layers[worst] if worst is not None and least != most else ""
        middle = median(value for value, _ in known)
        if isinstance(most, int) and middle == int(middle):
            middle = int(middle)  # a count between two equal ones
        yield heading, *(_cell(heading, value) for value in (least, middle, most)), at


def _cell(heading: str, value: float | None) -> str:
    if value is None:
        return ""
    number_format = QUANTITIES.get(heading, ("", "", ""))[1]
    return format(value, number_format or ("," if isinstance(value, int) else ".3g"))
