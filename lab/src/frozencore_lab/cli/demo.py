"""``frozencore demo``: a small campaign on the shipped pocket model, and what each method was worth on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frozencore.cli.console import console

if TYPE_CHECKING:
    from frozencore_lab.campaign.spec import Campaign

FILE = Path(__file__).parents[1] / "demo.yaml"


def demo(
    output: Annotated[
        Path, typer.Option("--output", "--out", help="Folder of the runs and of the report; it is resumed.")
    ] = Path("runs/demo"),
    workers: Annotated[
        int | None, typer.Option(min=0, help="Runs at a time. Default: one per core, at most eight.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of calibration rows, row order and random directions.")] = 42,
) -> None:
    """Adapt the shipped pocket model to its four tasks with every constructor and LoRA; show what each was worth."""
    from frozencore_lab.campaign.results import load_results
    from frozencore_lab.cli.campaign_lines import run_campaign, write_campaign_report
    from frozencore_lab.reports.campaign import study_section
    from frozencore_lab.reports.sheet import rich_table, transposed

    campaign = demo_campaign(seed)
    standing = run_campaign(
        campaign, output, console, data_root=None, models={}, num_workers=workers, device="cpu", ray_address=None,
        retry_failed=True,
    )  # fmt: skip
    for part in write_campaign_report([output], output / "report"):
        console.print(part, highlight=False)
    for study in load_results(output).studies:
        for table in study_section(study).tables:
            if table.pivot is not None:
                console.print(rich_table(transposed(table.sheet)))
    console.print(campaign.about, style="dim", markup=False)
    raise typer.Exit(0 if not standing.failed and not standing.left else 1)


def demo_campaign(seed: int = 42) -> Campaign:
    """The campaign of the demo, from another seed if wanted."""
    from frozencore_lab.campaign.spec import read_campaign

    campaign = read_campaign(FILE)
    studies = {
        name: study.model_copy(update={"axes": {**study.axes, "seed": (seed,)}})
        for name, study in campaign.studies.items()
    }
    return campaign.model_copy(update={"studies": studies})
