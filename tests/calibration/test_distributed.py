"""Two and four processes (gloo) calibrate on shares of the examples and train together; compared with one on all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from calibration.lost_rank import lose_a_rank
from calibration.two_ranks import (
    CONSTRUCTORS,
    EXAMPLES,
    adapted,
    bases,
    cores_after_a_step,
    costs,
    main,
)
from forked import as_ranks, ended
from frozencore import calibrate, ranks
from frozencore.calibration.layer_owners import assign_owners
from frozencore.errors import RankError
from frozencore.maths.linalg import principal_cosines
from places import SOURCES, TESTS
from tiny import batches_of

ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{SOURCES}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
TIMEOUT_S = 10  # of the process group, where a rank is lost


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow)],
)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank; one launch for the whole file."""
    out = tmp_path_factory.mktemp("ranks")
    if request.param == "torchrun":
        size, status, said = 2, *launched(out)
    else:
        size = request.param
        done = ended(lambda: as_ranks(size, lambda rank: main(out)), out)
        status, said = done.status, done.err
    assert status == 0, said[-2000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


def launched(out: Path) -> tuple[int, str]:
    """As a user starts two ranks."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, str(TESTS / "calibration" / "two_ranks.py"), str(out)],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_all_ranks_hold_the_same_bytes(constructor: str, reports: list[dict[str, Any]]) -> None:
    first, *others = (report[constructor] for report in reports)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    tokens = [report[f"{constructor} tokens"] for report in reports]
    assert all(count == tokens[0] for count in tokens)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_the_bases_are_those_of_one_process_on_all_examples(constructor: str, reports: list[dict[str, Any]]) -> None:
    model = adapted(constructor, initial_step=0.1 if constructor == "signgrad" else 0.0)
    calibration = calibrate(model, batches_of(EXAMPLES, 4), progress=False)
    for name, single in bases(model).items():
        shared = reports[0][constructor][name]
        if constructor != "signgrad":  # equal singular values of a sign matrix leave no single basis to agree on
            torch.testing.assert_close(shared, single, rtol=0, atol=2e-4)
        assert principal_cosines(shared, single).min() > 0.9999
    captured = {name: layer.capture.J for name, layer in calibration.layers.items() if layer.capture}
    for report in reports:  # each layer's from its owner
        assert {name: J for name, J in report[f"{constructor} J"].items() if J} == pytest.approx(captured, rel=1e-4)
    tokens = {name: layer.num_tokens for name, layer in calibration.layers.items()}
    assert reports[0][f"{constructor} tokens"] == tokens


def test_a_budget_counts_the_largest_batch_of_all_ranks_on_each_of_them(reports: list[dict[str, Any]]) -> None:
    """Ranks that planned other passes would wait for one another for ever."""
    size = len(reports)
    batches = [batch for rank in range(size) for batch in batches_of(EXAMPLES[rank::size], 1 + rank)]
    assert all(report["costs"] == costs(batches) for report in reports)


@pytest.mark.parametrize("how", ["step", "fsdp step"])
def test_a_step_together_is_a_step_on_the_whole_batch(how: str, reports: list[dict[str, Any]]) -> None:
    model = adapted("fcca")
    calibrate(model, batches_of(EXAMPLES, 4), progress=False)
    single = cores_after_a_step(model, batches_of(EXAMPLES, len(EXAMPLES))[0])
    assert single.keys() == reports[0][how].keys()
    for name, core in single.items():
        assert all(torch.equal(reports[0][how][name], report[how][name]) for report in reports)
        torch.testing.assert_close(reports[0][how][name], core, rtol=1e-3, atol=1e-5)
        assert core.any()


def test_the_bases_are_not_broadcast_at_every_step(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["bases"] == 2 * 8
    assert reports[0]["broadcast bases"] == 0


def test_a_rank_that_fails_ends_the_others_with_its_name(reports: list[dict[str, Any]]) -> None:
    assert "every label of a batch is masked" in reports[1]["failure"]
    for report in (*reports[:1], *reports[2:]):
        assert report["failure"] == f"Rank 1 failed: {reports[1]['failure']}"


def test_a_rank_without_room_makes_all_go_on_in_smaller_groups_to_the_same_bytes(reports: list[dict[str, Any]]) -> None:
    expected = {name: value for name, value in reports[0]["fcca"].items() if "frozencore_R" not in name}
    for report in reports:
        assert report["little room"].keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in report["little room"].items())


def test_a_rank_that_holds_another_basis_is_found_out_before_training(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for fault, (layer, count) in {"other bases": (0, 2), "other layers": (1, 1)}.items():
            name = f"'default model.layers.{layer}.self_attn.v_proj'"
            assert report[fault].startswith("All ranks must have the same bases, but those of layer")
            assert f"{name} ({count} in all) differ between rank 1 and rank 0" in report[fault]
            assert "\n" not in report[fault]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "how"),
    [
        (2, "calibration", SIGKILL),
        pytest.param(4, "bases", SIGKILL, marks=pytest.mark.slow),
        (2, "calibration", SIGSTOP),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_within_the_timeout(
    num_ranks: int, stage: str, how: Signals, tmp_path: Path
) -> None:
    """Killed, its connections close; stopped, it only stays silent."""
    done = ended(lambda: lose_a_rank(num_ranks, tmp_path, stage, how, TIMEOUT_S), tmp_path, timeout_s=120)
    assert done.status == 0, done.err[-2000:]
    for rank in range(num_ranks - 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert re.match(r"A rank died or stopped answering \(.+\)\. Start all ranks again\.$", report["error"])
        assert report["waited_s"] < TIMEOUT_S + 5
        assert report["bases as before"]


def leave_out_a_call(out: Path, foreign: bool) -> None:
    """Rank 0 calibrates, while rank 1 wraps the model, or exchanges objects of its own."""
    dist.init_process_group("gloo")
    rank, model, ranks.LATE_S = dist.get_rank(), adapted("random"), 1
    try:
        if rank == 0:
            calibrate(model, progress=False)
        elif foreign:
            dist.all_gather_object([None, None], {"own": "message"})
        else:
            DistributedDataParallel(model)
    except RankError as error:
        (out / f"{rank}").write_text(str(error))
    dist.barrier()


@pytest.mark.parametrize("foreign", [False, True])
def test_a_rank_that_leaves_out_calibration_is_one_clear_line(foreign: bool, tmp_path: Path) -> None:
    done = ended(lambda: as_ranks(2, lambda _: leave_out_a_call(tmp_path, foreign)), tmp_path, timeout_s=60)
    assert done.status == 0, done.err[-2000:]
    said = [(tmp_path / f"{rank}").read_text() for rank in range(1 if foreign else 2)]
    theirs = "another exchange of torch.distributed" if foreign else "torch's DistributedDataParallel on the model"
    assert f"rank 1 called {theirs}" in said[0]
    for line in said:
        assert line.startswith("All ranks must call the same functions in the same order, but rank ")
        assert "\n" not in line


def test_owners_share_the_work_evenly(reports: list[dict[str, Any]]) -> None:
    assert [report["owner share"] for report in reports] == [8 // len(reports)] * len(reports)
    shapes = {f"mlp{i}": (64, 16) for i in range(4)} | {f"q{i}": (16, 16) for i in range(16)}
    owners = assign_owners(shapes, 4)
    cost = [sum(m * n * min(m, n) for name, (m, n) in shapes.items() if owners[name] == rank) for rank in range(4)]
    assert max(cost) == min(cost)
    assert owners == assign_owners(dict(reversed(shapes.items())), 4)
