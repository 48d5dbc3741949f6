"""``frozencore advise``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.calibrate import OF_TRAINING
from frozencore.cli.console import console
from frozencore.cli.run_flags import TakesRun
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.early import refuse_early
from frozencore.tune.run.option_groups import GROUPS

OF_SCORING = ("evaluate_on", "num_evaluation", "max_new_tokens", "paper_steps", "select_checkpoint", "select_by")


def _advise(
    config: RunConfig,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="New folder for advice.json and advice.png.")
    ] = None,
) -> None:
    refuse_early(config)
    from frozencore.cli.advice_figure import FIGURE, advice_figure
    from frozencore.cli.advice_lines import advice_lines
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.figure_style import save_figure
    from frozencore.tune.run.advising import execute_advice
    from frozencore.tune.run.files import ADVICE

    with StageDisplay(console) as progress:
        advice = execute_advice(config, output, progress)
    for line in advice_lines(config, advice):
        console.print(line, highlight=False, soft_wrap=isinstance(line, str), markup=False)
    if output is not None:
        save_figure(advice_figure(advice), output / FIGURE)
        console.print(f"Record: {output / ADVICE}   Figure: {output / FIGURE}", highlight=False)


advise = TakesRun(_advise, without=(*OF_TRAINING, *OF_SCORING, *GROUPS["core"](), "method", "memory_budget"))
