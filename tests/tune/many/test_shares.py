"""``tune-many`` by several processes against one: the same tenants, whoever trained them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from forked import Ended, as_ranks, command, ended
from frozencore.distributed import assign_owners
from frozencore.errors import ConfigError, TrainingError
from frozencore.tune.many import run as executing
from frozencore.tune.many import tenant_rows as shares
from frozencore.tune.many.run import TenantOutcome
from frozencore.tune.pocket import pocket_model_path
from small_tenants import SIZES, cores_in, difference

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def words(tenants: Path, out: Path, *more: str) -> list[str]:
    """The work of the fixture ``together`` as a command."""
    few = "--rank 4 --calibration-size 16 --batch-size 2 --accumulation 2 --epochs 2 --slots 2 --device cpu"
    whole = ["tune-many", "--model", str(pocket_model_path()), "--tenants", str(tenants), *few.split()]
    return [*whole, "--select-checkpoint", "epoch", "--output", str(out), *more]


def by_two(asked: list[str], said: Path, fails: int | None = None, *, is_scored: bool = False) -> Ended:
    """Two forked processes are the command; training fails in one of them, if asked for.

    Args:
        is_scored: The base model is, and may not be once more.
    """

    said.mkdir(exist_ok=True)
    return ended(partial(as_ranks, 2, partial(be, asked, fails, is_scored)), said)


def be(asked: list[str], fails: int | None, is_scored: bool, rank: int) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise TrainingError("No room on the\ndisk.")

    if rank == fails:
        executing.train_many = refuses
    if is_scored:
        score = executing.held_out_losses
        executing.held_out_losses = lambda *of, **how: score(*of, **how) if "through" in how else refuses()
    command(asked)


def same_tenants(out: Path, together: tuple[Path, dict[str, TenantOutcome]]) -> None:
    """To rounding, and in the same files."""
    one, records = together
    files, of_one = ({path.relative_to(folder) for path in folder.rglob("*")} for folder in (out, one))
    assert files == of_one
    for file in ("basis.safetensors", "basis.json"):
        assert (out / "basis" / file).read_bytes() == (one / "basis" / file).read_bytes()
    for name, alone in records.items():
        record = json.loads((out / name / "result.json").read_text())
        assert record["training"]["losses"] == pytest.approx(alone.training.losses, rel=1e-5)
        for key in ("held_out_loss_before", "held_out_loss"):
            assert record[key] == pytest.approx(getattr(alone, key), rel=1e-5)
        assert record["hashes"] == alone.hashes.content()
        assert record["config"] == alone.config.content()
        assert record["resolved"] == alone.resolved.content()
        assert difference(cores_in(out / name), cores_in(one / name)) < 1e-5


def test_of_two_processes_one_fails_in_a_line_and_both_go_on_to_what_one_process_leaves(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path, command: Any
) -> None:
    out = tmp_path / "two"
    done = by_two(words(tenants, out), tmp_path / "first", fails=1)
    assert done.status != 0
    assert [line for line in done.err.splitlines() if line.startswith("frozencore: ")] == [
        "frozencore: Rank 1 failed: No room on the disk."
    ]
    assert [path.parent.name for path in out.glob("*/result.json")] == ["ben"]  # that is the first's whole share
    status, _, said = command(*words(tenants, out, "--resume"))
    assert (status, said.count("\n")) == (2, 1)
    assert said.endswith(f"but 2 began {out} and 1 came. Resume it with 2.\n")
    done = by_two(words(tenants, out, "--resume"), tmp_path / "second", is_scored=True)
    assert (done.status, done.err) == (0, "")
    same_tenants(out, together)
    assert done.out.count("3 tenants on one basis") == done.out.count("Adapters: ") == 1
    assert all(len(re.findall(rf"^│ {name} ", done.out, re.MULTILINE)) == 1 for name in SIZES)
    companies = [json.loads((out / name / "result.json").read_text())["company"] for name in SIZES]
    assert companies == [{"tenants": 2, "slots": 2}, {"tenants": 1, "slots": 1}, {"tenants": 2, "slots": 2}]


@pytest.mark.slow
def test_two_processes_of_torchrun_that_were_killed_go_on_to_what_one_leaves(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    out, environment = tmp_path / "cut", {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [*TORCHRUN, "-m", "frozencore", *words(tenants, out)]
    first = subprocess.Popen(started, env=environment, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(out.glob("checkpoints/share-2/*/complete.json")):
        time.sleep(0.001)
    psutil.Process(first.pid).children()[-1].kill()  # torchrun then ends the other
    assert first.wait() != 0
    assert (out / "checkpoints").is_dir()
    second = subprocess.run([*started, "--resume"], env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    same_tenants(out, together)


def test_shares_differ_by_the_dearest_tenant_at_most() -> None:
    drawn = random.Random(0)
    for size in (1, 2, 3, 8):
        costs = {f"tenant {i}": drawn.randrange(1, 500) for i in range(40)}
        found = assign_owners(costs, size)
        loads = [sum(costs[name] for name, rank in found.items() if rank == own) for own in range(size)]
        assert found.keys() == costs.keys()
        assert max(loads) - min(loads) <= max(costs.values())


def test_a_tenant_counts_by_its_tokens_and_there_is_one_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def tenant(num_rows: int, length: int) -> Any:
        rows = SimpleNamespace(train=[SimpleNamespace(input_ids=[0] * length)] * num_rows)
        return SimpleNamespace(rows=rows)

    tenants = {"few long rows": tenant(2, 100), "many short rows": tenant(20, 5), "as many": tenant(20, 5)}
    monkeypatch.setattr(shares, "num_ranks", lambda: 2)
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(shares, "own_rank", lambda rank=rank: rank)
        found.append(list(shares.own_tenants(tenants)))
    assert found == [["few long rows"], ["many short rows", "as many"]]
    monkeypatch.setattr(shares, "num_ranks", lambda: 4)
    with pytest.raises(ConfigError, match="there are 3 tenants for 4 processes. Start fewer"):
        shares.own_tenants(tenants)
