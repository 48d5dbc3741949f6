"""The ``frozencore`` command: verbs only. Each parses, calls the library or the lab, and prints."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from frozencore.cli_campaign import campaign_app, schema
from frozencore.cli_doctor import doctor
from frozencore.cli_evaluate import evaluate, tasks_app
from frozencore.errors import FrozenCoreError
from frozencore.lab.quiet import ignore_known_warnings

INTERRUPTED, TERMINATED = 130, 143  # the exit status of Ctrl-C, and of SIGTERM
WIDE = 160  # columns of a table in a file or a pipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune language models by training only r x r cores between frozen, calibrated bases.",
)
console = Console()
if not console.is_terminal:
    console.width = max(console.width, WIDE)

Model = Annotated[str, typer.Option(help="Hub id or local folder of a causal language model.")]
TaskName = Annotated[str | None, typer.Option("--task", help="A task by name, for instance svamp or sst2.")]
Data = Annotated[
    Path | None, typer.Option(help="Your own JSONL or Parquet rows: prompt and completion, messages, or text.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the task's data set under its hub id.")]
Method = Annotated[
    str,
    typer.Option(help="fcca, rawgrad, signgrad, filora, eva, lora_xs, milora, random, vera; or lora, dora, pissa."),
]
Rank = Annotated[int, typer.Option(help="Rank r of the bases; a core holds r x r values.")]
Targets = Annotated[
    str | None, typer.Option(help="Layer names, comma-separated, or all-linear. Default: the attention projections.")
]
CalibrationSize = Annotated[int, typer.Option(help="Training rows that the calibration pass reads.")]
Seed = Annotated[int, typer.Option(help="Of calibration rows, row order and random directions.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a row. Default: 512, or the model's context if less.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut long prompts at their beginning instead of refusing.")]
Whiten = Annotated[str, typer.Option(help="fcca: both, input, output or none.")]
Fisher = Annotated[str, typer.Option(help="fcca: diagonal, or dense (K-FAC).")]
Damping = Annotated[float, typer.Option(help="fcca: damping relative to the mean second moment.")]
Coordinates = Annotated[str, typer.Option(help="qr, polar, or the ablations raw and scaled_raw.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]


app.command()(evaluate)
app.add_typer(tasks_app, name="tasks")
app.add_typer(campaign_app, name="campaign")
app.command()(schema)
app.command()(doctor)


@app.callback()
def _common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.obj = console
    if debug:
        os.environ["FROZENCORE_DEBUG"] = "1"


@app.command()
def tune(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the adapter and its record.")],
    task: TaskName = None,
    data: Data = None,
    data_root: DataRoot = None,
    method: Method = "fcca",
    rank: Rank = 16,
    targets: Targets = None,
    calibration_size: CalibrationSize = 128,
    memory_budget: Annotated[
        str | None, typer.Option(help="What calibration may take beside the model, 8GiB for instance (docs/memory.md).")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--lr", "--learning-rate", help="Default: 5e-3 for cores, each baseline's own otherwise."),
    ] = None,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the learning rate rises.")] = 0.03,
    epochs: Annotated[int | None, typer.Option(help="Default: the task's number; 1 for --data.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in one forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Forward passes in one optimiser step.")] = 8,
    seed: Seed = 42,
    evaluate_on: Annotated[
        str, typer.Option(help="evaluation, or validation: rows to choose options with, never evaluated.")
    ] = "evaluation",
    num_train: Annotated[int | None, typer.Option(help="Training rows. Default: the protocol's.")] = None,
    num_evaluation: Annotated[int | None, typer.Option(help="Evaluation rows. Default: the protocol's.")] = None,
    paper_steps: Annotated[
        bool, typer.Option("--paper-steps", help="Train on all rows, as the paper; validation comes from elsewhere.")
    ] = False,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    prompt_style: Annotated[str, typer.Option(help="auto, chat or plain.")] = "auto",
    alpha: Annotated[float | None, typer.Option(help="Scale s = alpha / r of the cores. Default: s = 1.")] = None,
    whiten: Whiten = "both",
    fisher: Fisher = "diagonal",
    damping: Damping = 1e-3,
    coordinates: Coordinates = "qr",
    moments: Annotated[
        Path | None, typer.Option(help="A moments file of `frozencore calibrate`, instead of a new pass.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Calibrate, train, score and save an adapter: one run of the recipe."""
    from frozencore.lab.config import make_config
    from frozencore.lab.display import StageDisplay
    from frozencore.lab.reports.tables import run_summary
    from frozencore.lab.run import adapt_from_data, execute

    config = make_config(
        model=model, task=task, data=data, data_root=data_root, method=method, rank=rank,
        targets=_targets(targets), calibration_size=calibration_size, memory_budget=memory_budget,
        learning_rate=learning_rate, warmup=warmup,
        epochs=epochs, batch_size=batch_size, accumulation=accumulation, seed=seed, evaluate_on=evaluate_on,
        num_train=num_train, num_evaluation=num_evaluation, paper_steps=paper_steps, max_length=max_length,
        truncate=truncate, prompt_style=prompt_style,
        core={"alpha": alpha, "whiten": whiten, "fisher": fisher, "damping": damping, "coordinates": coordinates},
        dtype=dtype, device=device,
    )  # fmt: skip
    with StageDisplay(console) as stages:
        record = execute(config, output, stages, resume=resume, adapt=partial(adapt_from_data, moments_file=moments))
    for warning in record["warnings"]:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    console.print(run_summary(record))
    console.print(f"Adapter: {output / 'adapter'}   Record: {output / 'result.json'}", highlight=False)


@app.command()
def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the moments and the adapter.")],
    task: TaskName = None,
    data: Data = None,
    data_root: DataRoot = None,
    method: Method = "fcca",
    rank: Rank = 16,
    targets: Targets = None,
    calibration_size: CalibrationSize = 128,
    seed: Seed = 42,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    whiten: Whiten = "both",
    fisher: Fisher = "diagonal",
    damping: Damping = 1e-3,
    coordinates: Coordinates = "qr",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Collect moments and fix the bases, without training: a moments file and an adapter with zero cores."""
    from frozencore.lab.calibrating import execute_calibration
    from frozencore.lab.config import make_config
    from frozencore.lab.display import StageDisplay
    from frozencore.lab.reports.tables import calibration_summary

    config = make_config(
        model=model, task=task, data=data, data_root=data_root, method=method, rank=rank, targets=_targets(targets),
        calibration_size=calibration_size, seed=seed, max_length=max_length, truncate=truncate,
        core={"whiten": whiten, "fisher": fisher, "damping": damping, "coordinates": coordinates},
        dtype=dtype, device=device,
    )  # fmt: skip
    with StageDisplay(console) as stages:
        calibration = execute_calibration(config, output, stages)
    console.print(calibration_summary(calibration))
    console.print(f"Adapter: {output / 'adapter'}   Moments: {output / 'moments.safetensors'}", highlight=False)


@app.command()
def inspect(
    adapter: Annotated[Path, typer.Argument(help="Folder of a saved frozen-core adapter.")],
    moments: Annotated[
        Path | None, typer.Option(help="Moments file: adds what the basis captured of the gradient.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another adapter folder: adds the principal angles to its bases.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what a basis is: per layer its size, coherence and core, what it captured, its angles to another."""
    from frozencore.adapter.directory import read_adapter
    from frozencore.calibration.store import load_moments
    from frozencore.inspection import inspect_adapter
    from frozencore.lab.reports.tables import inspection_table

    reports = inspect_adapter(
        *read_adapter(adapter),
        moments=load_moments(moments) if moments else None,
        other=read_adapter(against)[1] if against else None,
    )
    if as_json:
        sys.stdout.write(json.dumps({name: asdict(report) for name, report in reports.items()}, indent=2) + "\n")
    else:
        console.print(inspection_table(reports))


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(help="Folder of a saved frozen-core adapter.")],
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the export.")],
    to: Annotated[str, typer.Option(help="lora: an exact LoRA directory. merged: base model plus update.")] = "lora",
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of the base model. Default: the one that the adapter names.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (lora: float32, merged: as the base), float32, ...")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write an adapter in a form that is served without frozencore."""
    from frozencore.lab.exporting import export_adapter

    for line in export_adapter(adapter, output, to=to, base=base, dtype=dtype, overwrite=overwrite):
        console.print(line, highlight=False)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="Any LoRA directory: adapter_config.json and its weights.")],
) -> None:
    """Say which serving engines take a LoRA directory; exit status 1 if one of them does not."""
    from frozencore.adapter.serving import ENGINES, check_lora_directory
    from frozencore.lab.exporting import serving_lines

    report = check_lora_directory(directory)
    for line in serving_lines(report):
        console.print(line, highlight=False)
    raise typer.Exit(0 if report.engines == ENGINES else 1)


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "--out", help="Folder for records, table, figure and page.")
    ] = Path("runs/demo"),
    workers: Annotated[int | None, typer.Option(help="Runs at a time. Default: one per core, at most eight.")] = None,
    seed: Seed = 42,
) -> None:
    """Adapt the shipped pocket model to its four tasks with every constructor and LoRA; show what each was worth."""
    from frozencore.lab.demo import run_demo

    run_demo(output, console, num_workers=workers, seed=seed)


def _targets(text: str | None) -> Any:
    if text is None or text == "all-linear":
        return text
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _ended_early(status: int) -> NoReturn:
    how = "interrupted" if status == INTERRUPTED else "terminated"
    sys.stderr.write(
        f"frozencore: {how}; run the same command again and it goes on from what is there (`tune` with --resume)\n"
    )
    sys.exit(status)


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit status 2; Ctrl-C is 130, SIGTERM 143."""
    ignore_known_warnings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        app()
    except FrozenCoreError as error:
        if os.environ.get("FROZENCORE_DEBUG"):
            raise
        sys.stderr.write(f"frozencore: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except OSError as error:
        if os.environ.get("FROZENCORE_DEBUG"):
            raise
        sys.stderr.write(f"frozencore: {error.strerror or error}: {error.filename or ''}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        _ended_early(INTERRUPTED)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):  # typer turns Ctrl-C into the first
            _ended_early(end.code)
        raise
    except (RuntimeError, MemoryError) as error:
        from frozencore.out_of_memory import is_out_of_memory

        if os.environ.get("FROZENCORE_DEBUG") or not is_out_of_memory(error):
            raise
        sys.stderr.write(
            f"frozencore: out of memory ({' '.join(str(error).split())[:200]}): use a smaller --batch-size or "
            "--max-length, --memory-budget for the calibration, or --dtype bfloat16\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
