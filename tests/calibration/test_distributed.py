"""Two and four processes (gloo) calibrate on shares of the examples and train together; compared with one on all."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fixtures import few
from forked import FORK, as_ranks, ended
from frozencore import FrozenCoreConfig, calibrate, distributed
from frozencore.calibration.hooks import CalibrationPass
from frozencore.errors import CalibrationError, RankError
from frozencore.maths.linalg import principal_cosines
from frozencore.maths.moments import LayerMoments
from tiny import Example, batches_of, draw_examples, same_tensors, tiny_qwen2

EXAMPLES = draw_examples(num_examples=12, seed=5)
CONSTRUCTORS = ("fcca", "rawgrad", "signgrad", "filora", "eva", "lora_xs", "random")


def adapted(constructor: str, **options: Any) -> torch.nn.Module:
    return get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, constructor=constructor, **options))


def bases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers() if "frozencore_" in name}


def cores_after_a_step(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], rate: float = 0.1
) -> dict[str, torch.Tensor]:
    """One SGD step on the mean over the batch's examples of their completion loss."""
    model.train()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="none")
    (losses.sum(1) / batch["labels"][:, 1:].ne(-100).sum(1)).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def fsdp_step(
    batch: dict[str, torch.Tensor], calibration: list[dict[str, torch.Tensor]], out: Path
) -> dict[str, torch.Tensor]:
    """The same step with every decoder layer sharded by FSDP2, and the adapter saved; cores gathered whole."""
    model = adapted("fcca")
    calibrate(model, calibration, progress=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_base_model().model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stepped = cores_after_a_step(model, batch)
    model.save_pretrained(out, is_main_process=dist.get_rank() == 0)
    return {name: core.full_tensor() for name, core in stepped.items()}


def bases_where_one_rank_has_little_room(share: list[Example]) -> dict[str, torch.Tensor]:
    """The second rank has none for the sums of more than three layers."""
    record = CalibrationPass.record

    def with_room(capture: CalibrationPass, *words: Any, **more: Any) -> None:
        record(capture, *words, **more)
        if dist.get_rank() == 1 and sum(bool(recorder.totals) for recorder in capture.recorders.values()) > 3:
            raise torch.OutOfMemoryError("injected")

    CalibrationPass.record = with_room  # type: ignore[method-assign]
    try:
        model = adapted("fcca")
        calibrate(model, batches_of(share, 2), progress=False)
    finally:
        CalibrationPass.record = record  # type: ignore[method-assign]
    return bases(model)


def bases_where_one_rank_has_no_room_to_exchange(share: list[Example]) -> dict[str, torch.Tensor]:
    """The second rank has none on its GPU for the first of the sums that are on the CPU."""
    real, failures = distributed.exchange_device, [True] * dist.get_rank()

    def with_room() -> torch.device:
        if failures:
            failures.clear()
            raise torch.OutOfMemoryError("injected")
        return real()

    distributed.exchange_device = with_room
    try:
        model = adapted("fcca")
        calibrate(model, batches_of(share, 2), progress=False)
    finally:
        distributed.exchange_device = real
    return bases(model)


def bases_only(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if "frozencore_R" not in name}


def failure(work: Any) -> str:
    try:
        work()
    except CalibrationError as error:
        return str(error)
    return ""


def main(out: Path, rank: int) -> None:
    """Everything that one rank does."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    share = EXAMPLES[rank::size]
    report: dict[str, Any] = {}

    for constructor in CONSTRUCTORS:
        model = adapted(constructor, initial_step=0.1 if constructor == "signgrad" else 0.0)
        calibration = calibrate(model, batches_of(share, 2), progress=False)
        report[constructor] = bases(model) | {n: p.detach() for n, p in model.named_parameters() if "frozencore_R" in n}
        report[f"{constructor} tokens"] = {name: layer.num_tokens for name, layer in calibration.layers.items()}
        captured = {name: layer.capture for name, layer in calibration.layers.items()}
        report[f"{constructor} J"] = {name: found and found.J for name, found in captured.items()}

    report["little room"] = bases_where_one_rank_has_little_room(share)
    report["no room to exchange"] = bases_where_one_rank_has_no_room_to_exchange(share)

    model = adapted("fcca")
    calibrate(model, batches_of(share, 2), progress=False)
    wrapped = DistributedDataParallel(model)
    own = {b.data_ptr() for n, b in model.named_buffers() if "frozencore_" in n}
    report["bases"] = len(own)
    report["broadcast bases"] = sum(buffer.data_ptr() in own for buffer in wrapped.modules_buffers)
    report["step"] = cores_after_a_step(wrapped, batches_of(share, len(share))[0])

    report["fsdp step"] = fsdp_step(batches_of(share, len(share))[0], batches_of(share, 2), out / "sharded")

    bad = batches_of(share, 2)
    if rank == 1:
        bad[0]["labels"].fill_(-100)
    report["failure"] = failure(lambda: calibrate(adapted("fcca"), bad, progress=False))
    some = batches_of(share, 2) if rank else []  # this basis needs none, and each rank needs them for a rate
    report["rate of some"] = calibrate(adapted("random"), some, progress=False).learning_rate
    of_another_seed = adapted("random", seed=rank, target_modules=["v_proj"])
    report["other bases"] = failure(lambda: DistributedDataParallel(of_another_seed))
    on_other_layers = adapted("random", layers_to_transform=[0, 1] if rank else [0], target_modules=["v_proj"])
    report["other layers"] = failure(lambda: DistributedDataParallel(on_other_layers))
    if rank == 0:
        loaded = PeftModel.from_pretrained(tiny_qwen2(), out / "sharded", is_trainable=True)
        report["fsdp saved"] = {n: p.detach() for n, p in loaded.named_parameters() if p.requires_grad}
        report["fsdp bases"] = bases(loaded)
    torch.save(report, out / f"rank{rank}.pt")
    dist.destroy_process_group()


def be_rank(rank: int, size: int, out: Path, stage: str, signal_number: int, timeout_s: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    model = adapted("fcca")
    before = bases(model)
    waiting_since = time.monotonic()

    def lose_the_last(now: str, *_: int | None) -> None:
        nonlocal waiting_since
        waiting_since = time.monotonic()
        if now == stage and rank == size - 1:
            os.kill(os.getpid(), signal_number)

    error = ""
    try:
        calibrate(model, batches_of(draw_examples(8, seed=rank), 2), progress=lose_the_last)
    except CalibrationError as caught:
        error = str(caught)
    report = {
        "error": error,
        "waited_s": time.monotonic() - waiting_since,
        "bases as before": all(bool((value == before[name]).all()) for name, value in bases(model).items()),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    os._exit(0)  # the group cannot be left in order


def lose_a_rank(size: int, *words: Any) -> None:
    """Start the ranks and wait for all but the last."""
    ranks = [FORK.Process(target=be_rank, args=(rank, size, *words)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks[:-1]:
        process.join()
    ranks[-1].kill()


TIMEOUT_S = 10  # of the process group, where a rank is lost


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank; one launch for the whole file."""
    out = tmp_path_factory.mktemp("ranks")
    done = ended(partial(as_ranks, request.param, partial(main, out)), out)
    assert done.status == 0, done.err[-2000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_all_ranks_hold_the_same_bytes(constructor: str, reports: list[dict[str, Any]]) -> None:
    first, *others = (report[constructor] for report in reports)
    assert all(same_tensors(first, other) for other in others)
    tokens = [report[f"{constructor} tokens"] for report in reports]
    assert all(count == tokens[0] for count in tokens)


@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "eva"))
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


def test_an_fsdp2_model_is_saved_whole(reports: list[dict[str, Any]]) -> None:
    for saved, wanted in (("fsdp saved", reports[0]["fsdp step"]), ("fsdp bases", bases_only(reports[0]["fcca"]))):
        assert same_tensors(reports[0][saved], wanted)


def test_the_bases_are_not_broadcast_at_every_step(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["bases"] == 2 * 8
    assert reports[0]["broadcast bases"] == 0


def test_a_rank_that_fails_ends_the_others_with_its_name(reports: list[dict[str, Any]]) -> None:
    assert "every label of a batch is masked" in reports[1]["failure"]
    for report in (*reports[:1], *reports[2:]):
        assert report["failure"] == f"Rank 1 failed: {reports[1]['failure']}"


def test_where_a_rank_has_no_examples_no_rate_is_proposed(reports: list[dict[str, Any]]) -> None:
    assert [report["rate of some"] for report in reports] == [None] * len(reports)


@pytest.mark.parametrize("lacking", ["little room", "no room to exchange"])
def test_a_rank_without_room_makes_all_go_on_in_smaller_groups_to_the_same_bytes(
    lacking: str, reports: list[dict[str, Any]]
) -> None:
    expected = bases_only(reports[0]["fcca"])
    assert all(same_tensors(report[lacking], expected) for report in reports)


def test_reduced_sums_are_where_they_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without values; CalibrationOptions(stats_device="cpu") keeps the sums out of its memory."""
    for name, value in {"num_ranks": 2, "own_rank": 0, "exchange_device": torch.device("cuda:0")}.items():
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, value])
    monkeypatch.setattr(distributed, "call_collective", lambda _: None)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda total: total if total.ndim else 3)
    with FakeTensorMode():
        sums = LayerMoments(3, cross=torch.ones(4, 5), input_square=torch.ones(5))
        reduced = distributed.reduce_moments({"layer": sums}, {"layer": 0})["layer"]
    assert {reduced.cross.device.type, reduced.input_square.device.type} == {"cpu"}


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
        pytest.param(2, "calibration", SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_within_the_timeout(
    num_ranks: int, stage: str, how: Signals, tmp_path: Path
) -> None:
    """Killed, its connections close; stopped, it only stays silent."""
    done = ended(partial(lose_a_rank, num_ranks, tmp_path, stage, how, TIMEOUT_S), tmp_path, timeout_s=120)
    assert done.status == 0, done.err[-2000:]
    for rank in range(num_ranks - 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert re.match(r"A rank died or stopped answering \(.+\)\. Start all ranks again\.$", report["error"])
        assert report["waited_s"] < TIMEOUT_S + 5
        assert report["bases as before"]


def leave_out_a_call(out: Path, foreign: bool, rank: int) -> None:
    """Rank 0 calibrates, while rank 1 wraps the model, or exchanges objects of its own."""
    dist.init_process_group("gloo")
    model, distributed.LATE_S = adapted("random"), 1
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
    done = ended(partial(as_ranks, 2, partial(leave_out_a_call, tmp_path, foreign)), tmp_path, timeout_s=60)
    assert done.status == 0, done.err[-2000:]
    said = [(tmp_path / f"{rank}").read_text() for rank in range(1 if foreign else 2)]
    theirs = "another exchange of torch.distributed" if foreign else "torch's DistributedDataParallel on the model"
    assert f"rank 1 called {theirs}" in said[0]
    for line in said:
        assert line.startswith("All ranks must call the same functions in the same order, but rank ")
        assert "\n" not in line
