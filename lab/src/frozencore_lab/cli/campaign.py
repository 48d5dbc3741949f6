"""``frozencore campaign``, ``demo`` and ``schema``: parse, call, print."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frozencore.cli.display import console
from frozencore.errors import ConfigError
from frozencore.files.atomic_write import write_json

if TYPE_CHECKING:
    from frozencore_lab.campaign.spec import Campaign

campaign_app = typer.Typer(no_args_is_help=True)

DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the data sets under their hub ids.")]

Spec = Annotated[Path, typer.Argument(help="YAML file of a campaign; see `frozencore schema` and campaigns/.")]
Folder = Annotated[Path, typer.Argument(help="Folder of a campaign.")]
Output = Annotated[
    Path | None,
    typer.Option("--out", "--output", help="The campaign's folder, resumed if it exists. Default: runs/<name>."),
]
ModelPath = Annotated[
    list[str] | None, typer.Option("--model-path", help="NAME=FOLDER: the folder of a model of the campaign.")
]
DEMO_FILE = Path(__file__).parents[1] / "demo.yaml"


@campaign_app.command("plan")
def plan_(
    spec: Spec,
    output: Output = None,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="Print only the ids of ready runs, one a line, and make the folder for `one`."),
    ] = False,
    runs: Annotated[bool, typer.Option("--runs", help="Print every run with its options and state.")] = False,
    data_root: DataRoot = None,
    model_path: ModelPath = None,
) -> None:
    """Print the runs, the source of the searches' rows, and the mean time of a run; start nothing."""
    from frozencore_lab.cli.campaign_lines import plan_lines, ready_ids, run_lines

    if ids:
        sys.stdout.write("".join(f"{run_id}\n" for run_id in ready_ids(spec, output, data_root=data_root)))
        return
    for line in run_lines(spec, output) if runs else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for part in plan_lines(spec, output, data_root=data_root, models=_models(model_path)):
        console.print(part, highlight=False)


@campaign_app.command()
def run(
    spec: Spec,
    output: Output = None,
    data_root: DataRoot = None,
    model_path: ModelPath = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes; 0: only this one. Default: one per device or core.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, or several for the workers in turn: cuda:0,cuda:1.")
    ] = "auto",
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster (needs frozencore-lab[ray]).")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed runs again.")] = False,
) -> None:
    """Make all runs that are not done yet. Stop it at any time; the same command resumes it."""
    from frozencore_lab.campaign.spec import read_campaign
    from frozencore_lab.cli.campaign_lines import default_folder, run_campaign

    campaign = read_campaign(spec)
    standing = run_campaign(
        campaign, output, console, data_root=data_root, models=_models(model_path), num_workers=workers, device=device,
        ray_address=ray, retry_failed=retry_failed,
    )  # fmt: skip
    folder = shlex.quote(str(output or default_folder(campaign)))
    console.print(f"Next: frozencore campaign report {folder}", highlight=False)
    raise typer.Exit(0 if not standing.failed and not standing.left else 1)


@campaign_app.command(name="rehearse")
def rehearse_(
    spec: Spec,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", "--output", help="Folder of the rehearsal, emptied first. Default: runs/<name>-rehearsal."
        ),
    ] = None,
    data_root: DataRoot = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes; 0: only this one. Default: one per core, at most 4.")
    ] = None,
) -> None:
    """Make a campaign's runs on the pocket model and few rows, and check its report. Status 1 if a cell is empty."""
    from frozencore_lab.campaign.spec import read_campaign
    from frozencore_lab.cli.campaign_lines import Board, default_folder, rehearsal_screen
    from frozencore_lab.rehearsal import rehearse

    campaign = read_campaign(spec)
    folder = output or default_folder(campaign).with_name(f"{campaign.name}-rehearsal")
    board = Board(console, line_every=100)
    with board.bars:
        found = rehearse(campaign, folder, data_root, num_workers=workers, watch=board)
    for part in rehearsal_screen(found):
        console.print(part, highlight=False)
    raise typer.Exit(1 if found.lacks else 0)


@campaign_app.command()
def one(
    run_id: Annotated[str, typer.Argument(help="Id of a run, from `frozencore campaign plan --ids`.")],
    output: Annotated[Path, typer.Option("--out", "--output", help="The campaign's folder.")] = Path(),
    data_root: DataRoot = None,
    model_path: ModelPath = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """Make one run, unless it is done; for Slurm arrays."""
    from frozencore.cli.stages import StageDisplay

    with StageDisplay(console) as progress:
        from frozencore_lab.cli.campaign_lines import run_one

        progress.started()
        message = run_one(output, run_id, progress, data_root=data_root, models=_models(model_path), device=device)
    console.print(message, highlight=False)


@campaign_app.command()
def status(folder: Folder) -> None:
    """Show how many runs are done, running, failed and left, the mean time of a run, and why runs failed."""
    from frozencore_lab.campaign.results import status_lines

    for part in status_lines(folder):
        console.print(part, highlight=False)


@campaign_app.command()
def report(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a campaign.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", "--output", help="Folder of the report. Default: report/ in the campaign's.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Analyse a CSV of task means instead: first column the task, then a column for each method."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="With --table: the method that the others are compared with.")
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="With --table: the values are losses, as in NAME-loss.csv.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --table: write the analysis there too.")
    ] = None,
) -> None:
    """Write a campaign's tables, figures and HTML page from its records, or analyse a table of task means."""
    if folder is not None and table is None:
        if reference is not None or json_file is not None or lower_is_better:
            raise ConfigError("--reference, --json and --lower-is-better go with --table. Leave them out.")
        _write_report(folder, output)
    elif table is not None and folder is None:
        if output is not None:
            raise ConfigError("--table prints its analysis, and --json FILE writes it too. Leave --out out.")
        if reference is None:
            raise ConfigError("--table needs --reference NAME: the method that the others are compared with.")
        from frozencore_lab.reports.comparison import analyse, comparison_view, read_task_means

        comparison = analyse(read_task_means(table), reference, lower_is_better=lower_is_better)
        if json_file is not None:
            write_json(json_file, asdict(comparison))
        console.print(comparison_view(comparison))
    else:
        raise ConfigError("A report reads a campaign's folder or --table FILE.csv: give one of them.")


def demo(
    output: Annotated[
        Path, typer.Option("--out", "--output", help="Folder of the runs and the report, resumed if it exists.")
    ] = Path("runs/demo"),
    workers: Annotated[
        int | None, typer.Option(min=0, help="Runs at a time. Default: one per core, at most eight.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of calibration rows, row order and random directions.")] = 42,
) -> None:
    """Adapt the shipped pocket model to its four tasks with every constructor and LoRA, and compare them."""
    from frozencore_lab.campaign.results import load_results
    from frozencore_lab.cli.campaign_lines import run_campaign
    from frozencore_lab.reports.report import study_section
    from frozencore_lab.reports.sheet import rich_table, transposed

    campaign = demo_campaign(seed)
    standing = run_campaign(
        campaign, output, console, data_root=None, models={}, num_workers=workers, device="cpu", ray_address=None,
        retry_failed=True,
    )  # fmt: skip
    _write_report(output)
    for study in load_results(output).studies:
        for table in study_section(study).tables:
            if table.pivot is not None:
                console.print(rich_table(transposed(table.sheet)))
    console.print(campaign.about, style="dim", markup=False)
    raise typer.Exit(0 if not standing.failed and not standing.left else 1)


def demo_campaign(seed: int) -> Campaign:
    """The demo's campaign, with any seed."""
    from frozencore_lab.campaign.spec import read_campaign

    campaign = read_campaign(DEMO_FILE)
    studies = {
        name: study.model_copy(update={"axes": {**study.axes, "seed": (seed,)}})
        for name, study in campaign.studies.items()
    }
    return campaign.model_copy(update={"studies": studies})


def schema() -> None:
    from frozencore_lab.campaign.spec import Campaign

    sys.stdout.write(json.dumps(Campaign.model_json_schema(), indent=2) + "\n")


def _write_report(folder: Path, output: Path | None = None) -> None:
    """Write the tables, figures and page of a campaign, by default in its ``report/``, and count the files."""
    from frozencore_lab.campaign.results import load_results
    from frozencore_lab.reports.report import campaign_document, count_runs, write_document

    document, output = campaign_document(load_results(folder)), output or folder / "report"
    files = write_document(document, output)
    console.print(f"{count_runs(document.runs)}; {len(files)} files. Open {output / 'index.html'}", highlight=False)


def _models(pairs: list[str] | None) -> dict[str, str]:
    places = {}
    for pair in pairs or []:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"--model-path takes NAME=FOLDER, got {pair!r}.")
        places[name] = path
    return places
