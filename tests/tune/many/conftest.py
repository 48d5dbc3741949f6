"""Fixtures of several files: a folder of tenants, and all of them trained at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from frozencore.progress import no_progress
from frozencore.tune.many.finisher import TenantOutcome
from frozencore.tune.many.run import execute_many
from input_files import write_rows
from small_runs import SIZES, config_of


@pytest.fixture(scope="session")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sums, of which each tenant has an odd idea of its own."""
    folder, drawn = tmp_path_factory.mktemp("x") / "tenants", random.Random(0)
    folder.mkdir()
    for more, (name, size) in enumerate(SIZES.items()):
        rows = []
        for _ in range(size):
            a, b = drawn.randrange(30), drawn.randrange(30)
            rows.append({"prompt": f"How many is {a} and {b}?", "completion": f" {a + b + more}"})
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "notes.txt").write_text("no rows")
    return folder


@pytest.fixture(scope="session")
def together(tenants: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, TenantOutcome]]:
    out = tmp_path_factory.mktemp("together") / "out"
    return out, execute_many(config_of(tenants, select_checkpoint="epoch"), out, no_progress, num_slots=2)
