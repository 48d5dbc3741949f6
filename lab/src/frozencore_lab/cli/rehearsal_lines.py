"""``frozencore campaign rehearse``: choose the workers, run the rehearsal, and print its final screen."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from frozencore.words import num_of, time_in_words
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import LocalPool, OwnProcess, WorkerPool
from frozencore_lab.cli.board import Board
from frozencore_lab.cli.campaign_lines import by_location, default_folder
from frozencore_lab.rehearsal.rehearse import Means, Rehearsal, rehearse
from frozencore_lab.rehearsal.sample import quick_sample, whole_sample

MOST_WORKERS = 4
MOST_REASONS = 10
LINE_EVERY = 100  # runs


def run_rehearsal(
    spec: Path,
    output: Path | None,
    console: Console,
    *,
    data_root: Path | None,
    models: dict[str, str],
    num_workers: int | None,
    quick: bool,
) -> Rehearsal:
    """Rehearse a specification.

    Raises:
        ConfigError: The specification is wrong.
        ModelError: A model's architecture is unknown.
        ArtifactError: The output folder holds something else.
    """
    campaign = read_campaign(spec)
    by_location(campaign, models)

    def hire(worker: Worker) -> WorkerPool:
        size = min(MOST_WORKERS, os.cpu_count() or 1) if num_workers is None else num_workers
        if size:
            return LocalPool(size, worker, devices=("cpu",))
        gc.freeze()  # as in its workers
        return OwnProcess(worker)

    sample = quick_sample(campaign) if quick else whole_sample(campaign)
    folder = output or default_folder(campaign).with_name(f"{campaign.name}-rehearsal")
    means = Means(data_root, models, hire, lambda store: Board(console, store, line_every=LINE_EVERY))
    return rehearse(campaign, sample, folder, means)


def rehearsal_screen(found: Rehearsal) -> Iterator[RenderableType]:
    """Yield one screen: filled and empty cells, files, and the requirements of a real run that are missing here."""
    runs = num_of(found.num_runs, "run")
    yield Text(
        f"Rehearsal of {found.campaign}: {runs}, {found.num_failed} failed, {time_in_words(found.time_s)}", "bold"
    )
    yield _stand_ins(found)
    if found.left_out:
        yield Text(f"Sampled: {'; '.join(found.left_out)}.")
    yield _studies(found)
    yield from _lacks(found)
    yield from _files(found)
    yield from _needs(found)


def _stand_ins(found: Rehearsal) -> Text:
    models = ", ".join(f"{name} by {kind}" for name, kind in found.stand_ins.items())
    rows = f" Rows made up by schema: {', '.join(found.made_up)}." if found.made_up else ""
    return Text(f"Models stood for: {models}.{rows}")


def _studies(found: Rehearsal) -> Table:
    table = Table()
    for heading in ("study", "tables", "figures", "cells filled", "empty"):
        table.add_column(heading, justify="left" if heading == "study" else "right")
    for one in found.studies:
        lacking = Text(str(len(one.lacks)), "red" if one.lacks else "green")
        table.add_row(one.name, str(one.num_tables), str(one.num_figures), str(one.filled), lacking)
    return table


def _lacks(found: Rehearsal) -> Iterator[Text]:
    """Yield each reason for empty parts once, with their number and the first of them."""
    reasons: dict[str, list[str]] = {}
    for lack in found.lacks:
        reasons.setdefault(lack.why, []).append(f"{lack.study}, {lack.where}")
    for why, places in list(reasons.items())[:MOST_REASONS]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield Text(f"Empty: {places[0]}{more}: {why}", "red")
    if len(reasons) > MOST_REASONS:
        yield Text(f"and {len(reasons) - MOST_REASONS} more reasons: see rehearsal.json.", "red")


def _files(found: Rehearsal) -> Iterator[Text]:
    """Yield the files of the report, grouped by name."""
    names: dict[tuple[str, str], list[str]] = {}
    for file in map(Path, found.files):
        stem, _, ending = file.name.partition(".")
        names.setdefault((str(file.parent), stem), []).append(ending)
    places: dict[str, list[str]] = {}
    for (place, stem), endings in names.items():
        places.setdefault(f"{place} ({', '.join(endings)})", []).append(stem)
    yield Text(f"{len(found.files)} files under {found.folder}:")
    for place, stems in places.items():
        yield Text(f"  {place}: {', '.join(stems)}")


def _needs(found: Rehearsal) -> Iterator[Text]:
    missing = [need for need in found.needs if need.is_missing]
    here = [need.what for need in found.needs if not need.is_missing]
    yield Text("A real run needs" + (", and has not here:" if missing else " nothing that is missing here."))
    for need in missing:
        yield Text(f"  {need.what}: {need.here}", "yellow")
    if here:
        yield Text(f"  Here: {'; '.join(here)}.")
