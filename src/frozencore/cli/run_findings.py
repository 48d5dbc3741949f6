"""What is found in a run and in an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frozencore.cli.findings import Finding, diagnose, inside, read_json, things_in
from frozencore.tune.run.files import ADAPTER, CHECKPOINTS, FAILURE, PREDICTIONS, RECORD
from frozencore.tune.run.interrupted import kept_of
from frozencore.tune.run.record import TunedRecord, read_record
from frozencore.words import one_line

ACCURACY_ROUNDING = 1e-9


def run(path: Path) -> Iterator[Finding]:
    """Its record, its predictions and its adapter."""
    if not (path / RECORD).exists():
        kept = kept_of(path)
        way_on = f"go on from {kept} with --resume" if kept else "run it again"
        yield Finding(RECORD, f"missing: the run was interrupted; {way_on}.", sound=False)
        return
    try:
        record = read_record((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        damage = f"damaged ({one_line(error)}): it is no record of a run. Remove the folder and run it again."
        yield Finding(RECORD, damage, sound=False)
        return
    if not isinstance(record, TunedRecord):
        yield Finding(RECORD, "how near two bases are")
        return
    yield Finding(RECORD, f"{record.method} on {record.task or record.config.data}")
    if record.has("accuracy"):
        yield _rescored(path / PREDICTIONS, record.accuracy)
    if (path / ADAPTER).exists():
        of_baseline = record.hashes is None or record.hashes.basis is None
        from frozencore.cli.adapter_findings import adapter, baseline

        yield from inside(path / ADAPTER, "adapter", baseline if of_baseline else adapter)


def runs(path: Path) -> Iterator[Finding]:
    """A line for each thing in a folder of runs: what it is, and the first that is wrong with it."""
    for place in things_in(path):
        seen = diagnose(place)
        wrong = [finding for finding in seen.findings if not finding.sound]
        told = [f"{finding.part}: {finding.found}" for finding in wrong] or [one.found for one in seen.findings]
        yield Finding(place.name, ": ".join([str(seen.kind), *told[:1]]), not wrong)


def tenants(path: Path) -> Iterator[Finding]:
    """Of ``tune-many``: how many tenants there are, those that diverged, and what is wrong with any of them."""
    if (path / CHECKPOINTS).is_dir():
        said = "not all have ended: the run was interrupted; the same command goes on with --resume."
        yield Finding("tenants", said, sound=False)
    folders = sorted({file.parent for name in (RECORD, FAILURE) for file in path.glob(f"*/{name}")})
    diverged = [folder.name for folder in folders if not (folder / RECORD).exists()]
    yield Finding("tenants", f"{len(folders) - len(diverged)} with a record and an adapter")
    if diverged:
        yield Finding(FAILURE, f"diverged: {', '.join(diverged)}. Train them again at a lower rate.", sound=False)
    for folder in folders:
        if folder.name not in diverged:
            yield from (finding for finding in inside(folder, folder.name, run) if not finding.sound)


def evaluation(path: Path) -> Iterator[Finding]:
    """Its record and every score."""
    total = read_json(path / RECORD)
    if not (isinstance(total, dict) and isinstance(total.get("scores"), list)):
        yield Finding(
            RECORD,
            "missing or damaged: run the same `frozencore evaluate` again, finished tasks are kept.",
            sound=False,
        )
    elif total.get("failed"):
        yield Finding(
            RECORD, f"not scored: {', '.join(map(str, total['failed']))}. Its `failed` says why.", sound=False
        )
    for predictions in sorted(path.glob(f"*/*/{PREDICTIONS}")):
        place = predictions.parent
        name = str(place.relative_to(path))
        score = read_json(place / RECORD)
        if not isinstance(score, dict):
            yield Finding(name, f"{RECORD} is missing or damaged: evaluate again, it is scored again.", sound=False)
        elif "metric" not in score and score.get("accuracy", 0) is not None:  # not an average or a loss of other rows
            yield _rescored(predictions, score.get("accuracy"), name)


def _rescored(path: Path, recorded: Any, part: str = PREDICTIONS) -> Finding:
    """Whether the stored predictions give the stored accuracy."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        correct = [row["prediction"] == row["gold"] for row in rows]
        contradicted = [row["correct"] for row in rows] != correct
        share = sum(correct) / len(correct)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return Finding(part, f"{path.name} is missing or damaged. Score again.", sound=False)
    is_share = isinstance(recorded, int | float) and 0 <= recorded <= 1
    if not is_share or abs(share - recorded) > ACCURACY_ROUNDING:
        said = f"{share:.4f} by the predictions, {recorded!r:.40} recorded: changed. Score again."
        return Finding(part, said, sound=False)
    if contradicted:
        return Finding(part, "a row's `correct` is not what it predicts: changed. Score again.", sound=False)
    return Finding(part, f"{len(rows)} rows give the recorded accuracy, {share:.4f}")
