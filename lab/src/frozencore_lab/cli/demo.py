"""``frozencore demo``: a small campaign on the shipped pocket model, with a table of all methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frozencore.cli.display import console

if TYPE_CHECKING:
    from frozencore_lab.campaign.spec import Campaign

FILE = Path(__file__).parents[1] / "demo.yaml"


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
    from frozencore_lab.cli.campaign_lines import run_campaign, write_campaign_report
    from frozencore_lab.reports.report import study_section
    from frozencore_lab.reports.sheet import rich_table, transposed

    campaign = demo_campaign(seed)
    standing = run_campaign(
        campaign, output, console, data_root=None, models={}, num_workers=workers, device="cpu", ray_address=None,
        retry_failed=True,
    )  # fmt: skip
    for part in write_campaign_report(output, output / "report"):
        console.print(part, highlight=False)
    for study in load_results(output).studies:
        for table in study_section(study).tables:
            if table.pivot is not None:
                console.print(rich_table(transposed(table.sheet)))
    console.print(campaign.about, style="dim", markup=False)
    raise typer.Exit(0 if not standing.failed and not standing.left else 1)


def demo_campaign(seed: int = 42) -> Campaign:
    """The demo's campaign, with any seed."""
    from frozencore_lab.campaign.spec import read_campaign

    campaign = read_campaign(FILE)
    studies = {
        name: study.model_copy(update={"axes": {**study.axes, "seed": (seed,)}})
        for name, study in campaign.studies.items()
    }
    return campaign.model_copy(update={"studies": studies})
