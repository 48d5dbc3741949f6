"""How a run learned, in its folder: ``history.csv``, a line a step, and ``training.png``."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from matplotlib.figure import Figure

from frozencore.cli.figure_style import GREY, NAVY, ORANGE, binned, plt, save_figure
from frozencore.files.whole_file import write_text
from frozencore.tune.run.record import TunedRecord

HISTORY, FIGURE = "history.csv", "training.png"
COLUMNS = ("step", "loss", "validation_loss", "validation_accuracy")


def write_learning(record: TunedRecord, out: Path) -> None:
    """Both files; validation scores stand at the steps that were scored."""
    write_text(out / HISTORY, _history(record))
    save_figure(_figure(record), out / FIGURE)


def _history(record: TunedRecord) -> str:
    scores = {score.step: score for score in record.selection.scores} if record.selection else {}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for step, loss in enumerate(record.training.losses, start=1):
        score = scores.get(step)
        rows.writerow([step, loss, *((score.held_out_loss, score.accuracy) if score else (None, None))])
    return text.getvalue()


def _figure(record: TunedRecord) -> Figure:
    """The loss of every step, means over twentieths of them, and the validation loss where there is one."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    steps = [(step, loss) for step, loss in enumerate(record.training.losses, start=1) if loss is not None]
    axes.plot(*zip(*steps, strict=True) if steps else ((), ()), color=NAVY, alpha=0.3, lw=0.8, label="each step")
    axes.plot(*binned([loss for _, loss in steps]), color=NAVY, lw=1.6, label="mean of a twentieth")
    if record.selection and record.selection.scores:
        scored = [(score.step, score.held_out_loss) for score in record.selection.scores]
        axes.plot(*zip(*scored, strict=True), "o-", color=ORANGE, ms=4, lw=1.2, label="validation rows")
        axes.axvline(record.selection.kept_step, color=GREY, ls=":", lw=1, label="kept")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"{record.method} on {record.task or record.config.data}", fontsize=10, loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure
