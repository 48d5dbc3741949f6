"""``frozencore tune``: one run, its final screen, and the figure of its training."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from frozencore.cli.console import console
from frozencore.cli.flags import DryRun, Out, Resume, TakesRun, as_flags, require_out, told_if_nothing_is_kept
from frozencore.files.hub import require_upload, upload
from frozencore.tune.config import RunConfig
from frozencore.tune.run.processes import is_first, joined, refuse_several
from frozencore.tune.run.refuse_early import refuse_early
from frozencore.tune.run.run_folder import ADAPTER, ASKED, RECORD, SAMPLES, kept_of, refuse_used

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from frozencore.tune.run.record import TunedRecord

HISTORY, FIGURE = "history.csv", "training.png"


def _tune(
    config: RunConfig,
    output: Out = None,
    moments: Annotated[
        Path | None,
        typer.Option(
            help="A moments file of `frozencore calibrate`, in place of a new calibration pass.",
            rich_help_panel="Method and bases",
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the adapter; a new repository is private.")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    if dry_run:
        refuse_several("--dry-run")
    refuse_early(config, moments)
    if dry_run:
        from frozencore.cli.dry_run import print_dry_run

        print_dry_run(config)
        return
    output = require_out(output)
    refuse_used(output, resume=resume)
    if push_to_hub is not None:
        require_upload(push_to_hub)
    from frozencore.cli.display import StageDisplay, resume_line

    if resume:
        console.print(resume_line(output))
    with told_if_nothing_is_kept(lambda: _kept(output)), joined(), StageDisplay(console) as progress:
        from frozencore.cli.run_summary import run_summary, sample_lines, size_lines
        from frozencore.files.whole_file import write_text
        from frozencore.tune.run.execute import execute

        progress.started()
        record = execute(config, output, progress, resume=resume, moments_file=moments)
    if not is_first():
        return
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(run_summary(record))
    if (output / SAMPLES).is_file():
        console.print(Group(*sample_lines(output / SAMPLES)))
    for line in size_lines(output / ADAPTER):
        console.print(line, soft_wrap=True)
    write_text(output / ASKED, as_flags(config))
    write_learning(record, output)
    console.print(f"Adapter: {output / ADAPTER}   Record: {output / RECORD}   Curve: {output / FIGURE}")
    if push_to_hub is not None:
        console.print(f"Uploaded: {upload(output / ADAPTER, push_to_hub)}")


def write_learning(record: TunedRecord, out: Path) -> None:
    """Write ``history.csv``, with a line for each step, and ``training.png``."""
    from frozencore.files.whole_file import write_text
    from frozencore.tune.figure_style import save_figure

    scores = {score.step: score for score in record.selection.scores} if record.selection else {}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("step", "loss", "validation_loss", "validation_accuracy"))
    for step, loss in enumerate(record.training.losses, start=1):
        score = scores.get(step)
        rows.writerow([step, loss, *((score.held_out_loss, score.accuracy) if score else (None, None))])
    write_text(out / HISTORY, text.getvalue())
    save_figure(_figure(record), out / FIGURE)


def _figure(record: TunedRecord) -> Figure:
    """Draw the loss of each step, smoothed too, the held-out loss before and after, and scores."""
    from frozencore.tune.figure_style import BLACK, GREY, NAVY, ORANGE, POINTS, binned, plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    steps = [(step, loss) for step, loss in enumerate(record.training.losses, start=1) if loss is not None]
    thin = {"alpha": 0.3, "lw": 0.8} if len(steps) > POINTS else {"lw": 1.6}
    axes.plot(*zip(*steps, strict=True) if steps else ((), ()), color=NAVY, label="each step", **thin)
    if len(steps) > POINTS:
        axes.plot(*binned([loss for _, loss in steps]), color=NAVY, lw=1.6, label="smoothed")
    kept_step = record.selection.kept_step if record.selection else record.training.num_steps
    held_out = {0: record.held_out_loss_before, kept_step: record.held_out_loss}
    known = {step: loss for step, loss in held_out.items() if loss is not None}
    axes.plot(list(known), list(known.values()), "D", color=BLACK, ms=5, label="held-out rows, before and after")
    for step, loss in known.items():
        axes.annotate(f"{loss:.3f}", (step, loss), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    if record.selection and record.selection.scores:
        scored = [(score.step, score.held_out_loss) for score in record.selection.scores]
        axes.plot(*zip(*scored, strict=True), "o-", color=ORANGE, ms=4, lw=1.2, label="validation rows")
        axes.axvline(kept_step, color=GREY, ls=":", lw=1, label="kept")
    axes.margins(y=0.12)  # the number above the highest point stays below the title
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(
        f"{record.method} on {record.task or record.config.sources}", fontsize=10, loc="left", parse_math=False
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def _kept(output: Path) -> bool:
    return kept_of(output) is not None or (output / RECORD).is_file()


tune = TakesRun(_tune, defaults={"batch_size": "auto", "samples": 3, "exact_match": "auto"})
