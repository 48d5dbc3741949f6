"""``tune-many`` by several processes against one: each trains its share of the tenants, and they exchange nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from forked import Ended, as_ranks, command, ended
from frozencore.distributed import assign_owners
from frozencore.tune.many import tenant_rows as shares
from frozencore.tune.many.finisher import TenantOutcome
from frozencore.tune.pocket import pocket_model_path
from small_runs import SIZES, cores_in, difference


def words(tenants: Path, out: Path, *more: str) -> list[str]:
    few = "--batch-size 2 --accumulation 2 --epochs 2 --slots 2 --device cpu --select-checkpoint epoch --bits 32"
    whole = ["tune-many", "--model", str(pocket_model_path()), "--tenants", str(tenants), *few.split()]
    return [*whole, "--output", str(out), *more]


def by_two(asked: list[str], said: Path) -> Ended:
    """Run the command in two forked processes with torchrun's environment; exchanges between them are errors."""

    said.mkdir(exist_ok=True)
    return ended(partial(as_ranks, 2, partial(be, asked)), said)


def be(asked: list[str], rank: int) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("an exchange")

    torch.distributed.init_process_group = refuses
    command(asked)


def test_two_processes_leave_what_one_leaves_and_go_on_with_what_is_missing(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    (one, records), out = together, tmp_path / "two"
    basis = ("--basis", str(one / "basis"))
    done = by_two(words(tenants, out, *basis), tmp_path / "first")
    assert (done.status, done.err) == (0, "")
    assert all(done.out.count(f" {name} ") == 1 for name in SIZES)
    assert sorted(path.name for path in out.iterdir()) == [*SIZES, "run.yaml"]
    for name, alone in records.items():
        record = json.loads((out / name / "result.json").read_text())
        assert record["training"]["losses"] == pytest.approx(alone.training.losses, rel=1e-5)
        for key in ("held_out_loss_before", "held_out_loss"):
            assert record[key] == pytest.approx(getattr(alone, key), rel=1e-5)
        for key in ("model", "train", "evaluation", "validation", "basis"):
            assert record["hashes"][key] == getattr(alone.hashes, key)
        assert difference(cores_in(out / name), cores_in(one / name)) < 1e-5
    times = {name: (out / name / "result.json").stat().st_mtime_ns for name in SIZES}
    (out / "ben" / "result.json").unlink()
    (out / "ben" / "adapter").rename(tmp_path / "before")
    done = by_two(words(tenants, out, *basis, "--resume"), tmp_path / "second")
    assert (done.status, done.err) == (0, "")
    changed = [name for name in SIZES if (out / name / "result.json").stat().st_mtime_ns != times[name]]
    assert changed == ["ben"]
    core = "adapter_model.safetensors"
    assert (out / "ben" / "adapter" / core).read_bytes() == (tmp_path / "before" / core).read_bytes()


@pytest.mark.parametrize(
    ("names", "more", "rule"),
    [
        (SIZES, (), "a basis that --basis names"),
        (SIZES, ("--basis", "BASIS", "--device", "cpu:0"), "--device cpu:0"),
        (["anna"], ("--basis", "BASIS"), "there are 1 tenant for 2"),
    ],
)
def test_what_several_processes_cannot_share_is_refused_in_a_line_each(
    tenants: Path,
    together: tuple[Path, dict[str, TenantOutcome]],
    tmp_path: Path,
    names: Iterable[str],
    more: tuple[str, ...],
    rule: str,
) -> None:
    files = tmp_path / "tenants.yaml"
    files.write_text("".join(f"{name}: {tenants}/{name}.jsonl\n" for name in names))
    places = {"BASIS": str(together[0] / "basis")}
    done = by_two(words(files, tmp_path / "many", *(places.get(word, word) for word in more)), tmp_path)
    assert done.status != 0
    refusals = [line for line in done.err.splitlines() if line.startswith("frozencore: ")]
    assert len(refusals) == 2
    assert all(rule in line for line in refusals)
    assert not (tmp_path / "many").exists()


def test_shares_differ_by_the_largest_tenant_at_most() -> None:
    drawn = random.Random(0)
    for size in (1, 2, 3, 8):
        costs = {f"tenant {i}": drawn.randrange(1, 500) for i in range(40)}
        found = assign_owners(costs, size)
        loads = [sum(costs[name] for name, rank in found.items() if rank == own) for own in range(size)]
        assert found.keys() == costs.keys()
        assert max(loads) - min(loads) <= max(costs.values())


def test_a_share_is_a_tenants_bytes_and_every_tenant_has_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for name, size in {"large": 300, "small": 100, "as small": 100}.items():
        files[name] = tmp_path / name
        files[name].write_bytes(b" " * size)
    config: Any = SimpleNamespace(method=SimpleNamespace(basis="here"), model=SimpleNamespace(device="cpu"))
    monkeypatch.setattr(shares, "num_started", lambda: 2)
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(shares, "own_number", lambda rank=rank: rank)
        found.append(list(shares._own_share(config, files)))
    assert found == [["large"], ["small", "as small"]]
