"""Two processes (gloo) calibrate on halves of the examples and train together; compared with one process on all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration.two_ranks import CONSTRUCTORS, EXAMPLES, adapted, bases, cores_after_a_step, streamed_bases
from frozencore import calibrate
from frozencore.calibration.shards import assign_owners
from frozencore.linalg import principal_cosines
from tiny import batches_of

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; one launch for the whole file."""
    out = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(TESTS / "calibration" / "two_ranks.py"), str(out)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_both_ranks_hold_the_same_bytes(constructor: str, reports: list[dict[str, Any]]) -> None:
    first, second = (report[constructor] for report in reports)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert reports[0][f"{constructor} tokens"] == reports[1][f"{constructor} tokens"]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_the_bases_are_those_of_one_process_on_all_examples(constructor: str, reports: list[dict[str, Any]]) -> None:
    model = adapted(constructor, initial_step=0.1 if constructor == "signgrad" else 0.0)
    calibration = calibrate(model, batches_of(EXAMPLES, 4), progress=False)
    for name, single in bases(model).items():
        shared = reports[0][constructor][name]
        if constructor != "signgrad":  # equal singular values of a sign matrix leave no single basis to agree on
            torch.testing.assert_close(shared, single, rtol=0, atol=2e-4)
        assert principal_cosines(shared, single).min() > 0.9999
    tokens = {name: layer.num_tokens for name, layer in calibration.layers.items()}
    assert reports[0][f"{constructor} tokens"] == tokens


def test_sketches_are_added_up_over_the_ranks(reports: list[dict[str, Any]]) -> None:
    for name, single in streamed_bases(EXAMPLES).items():
        assert torch.equal(reports[0]["streamed"][name], reports[1]["streamed"][name])
        torch.testing.assert_close(reports[0]["streamed"][name], single, rtol=0, atol=2e-4)


@pytest.mark.parametrize("how", ["step", "fsdp step"])
def test_a_step_together_is_a_step_on_the_whole_batch(how: str, reports: list[dict[str, Any]]) -> None:
    model = adapted("fcca")
    calibrate(model, batches_of(EXAMPLES, 4), progress=False)
    single = cores_after_a_step(model, batches_of(EXAMPLES, len(EXAMPLES))[0])
    assert single.keys() == reports[0][how].keys()
    for name, core in single.items():
        assert torch.equal(reports[0][how][name], reports[1][how][name])
        torch.testing.assert_close(reports[0][how][name], core, rtol=1e-3, atol=1e-5)
        assert core.any()


def test_the_bases_are_not_broadcast_at_every_step(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["bases"] == 2 * 8
    assert reports[0]["broadcast bases"] == 0


def test_a_rank_that_fails_ends_the_others_with_its_name(reports: list[dict[str, Any]]) -> None:
    assert "every label of a batch is masked" in reports[1]["failure"]
    assert reports[0]["failure"] == "Calibration failed on rank 1; its own message says why."


def test_owners_share_the_work_evenly(reports: list[dict[str, Any]]) -> None:
    assert [report["owner share"] for report in reports] == [4, 4]
    shapes = {f"mlp{i}": (64, 16) for i in range(4)} | {f"q{i}": (16, 16) for i in range(16)}
    owners = assign_owners(shapes, 4)
    cost = [sum(m * n * min(m, n) for name, (m, n) in shapes.items() if owners[name] == rank) for rank in range(4)]
    assert max(cost) == min(cost)
    assert owners == assign_owners(dict(reversed(shapes.items())), 4)
