"""The findings of ``frozencore doctor`` in a campaign."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frozencore.cli.findings import Finding, read_json
from frozencore.errors import FrozenCoreError
from frozencore.tune.run.run_folder import RECORD
from frozencore.words import one_line
from frozencore_lab.campaign.results import load_results
from frozencore_lab.campaign.store import INDEX, Store


def campaign(path: Path) -> Iterator[Finding]:
    """Report a campaign's runs, the failed runs and the open runs."""
    try:
        store = Store(path)
        results = load_results(path)
        campaign = store.campaign()
    except (FrozenCoreError, RecursionError) as error:
        yield Finding("campaign", one_line(error), sound=False)
        return
    runs = [run for study in results.studies for run in study.runs]
    failed, missing = [run for run in runs if run.failure is not None], [run for run in runs if run.record is None]
    yield Finding("campaign", f"{campaign.name}: {len(runs) - len(missing)} of {len(runs)} final runs are there")
    if failed:
        reasons = sorted({run.failure.reason for run in failed if run.failure is not None})
        yield Finding(
            "failed runs",
            f"{len(failed)} ({', '.join(reasons)}): see {path}/failed, then `frozencore campaign run --retry-failed`.",
            sound=False,
        )
    left = len(missing) - len(failed)
    if left > 0:
        yield Finding("open runs", f"{left}: `frozencore campaign run` with the same file goes on.", sound=False)
    for folder in sorted(p for p in (path / "runs").glob("*") if p.is_dir() and not p.name.startswith(".")):
        if not isinstance(read_json(folder / RECORD), dict):
            yield Finding(
                folder.name,
                f"{RECORD} is missing or damaged: remove {folder} and {INDEX}, it is made again.",
                sound=False,
            )
