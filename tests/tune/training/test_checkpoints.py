"""Trainings that end early, are killed while they save, or meet a full disk go on bit-equal from what is whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from fixtures import few
from forked import as_ranks, ended
from frozencore import calibrate
from frozencore.errors import TrainingError
from frozencore.tune.adapters import add_adapter, default_targets
from frozencore.tune.methods import METHODS, MethodConfig
from frozencore.tune.training import callbacks
from frozencore.tune.training.callbacks import Saving
from frozencore.tune.training.checkpoints import Stop, explain_disk_errors, is_whole, newest_whole
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import BATCHES, draw_rows, tiny_qwen2

ROWS = draw_rows(20, seed=5)
RECIPE = Recipe(
    learning_rate=1e-2, epochs=2, batch_size=2, accumulation=3, warmup=0.3, overhead_tokens=5
)  # eight steps
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir"}
DAMAGES = ("unmarked", "empty")


def made(name: str) -> nn.Module:
    """A new model with this method on it; ``alone`` is a model without PEFT."""
    if name == "alone":
        return tiny_qwen2()
    method, model = METHODS[name], tiny_qwen2()
    options = MethodConfig(r=3, target_modules=default_targets(method, model), seed=1)
    adapted = add_adapter(method, model, options)
    if method.needs(options):
        calibrate(adapted, BATCHES, progress=False)
    return adapted


def trained(
    name: str, folder: Path | None, *, stop_at: int | None = None, resume: bool = False
) -> tuple[nn.Module, TrainingReport]:
    def progress(stage: str, done: int, total: int | None, note: str = "") -> None:
        if done == stop_at:
            raise KeyboardInterrupt

    model = made(name)
    return model, train(
        model, ROWS, RECIPE, pad_id=0, checkpoint_dir=folder, checkpoint_steps=2, resume=resume, progress=progress
    )


@pytest.mark.parametrize("name", few(["alone", *METHODS], "alone", "fcca", "lora"))
def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole, expected = trained(name, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(name, tmp_path / "cut", stop_at=7)
    resumed, report = trained(name, tmp_path / "cut", resume=True)
    assert report.resumed_from == tmp_path / "cut" / "checkpoint-6"
    assert (report.training.losses, report.training.num_steps) == (expected.training.losses, 8)
    require_equal(resumed, whole)
    if name != "alone":  # a checkpoint holds the adapter alone
        whole.save_pretrained(tmp_path / "adapter")
        (weights,) = (tmp_path / "cut" / "checkpoint-8").glob("*.safetensors")
        assert weights.stat().st_size == (tmp_path / "adapter" / weights.name).stat().st_size


@pytest.mark.parametrize("damage", few(DAMAGES, "unmarked"))
def test_a_checkpoint_that_is_not_whole_is_skipped_with_a_warning(damage: str, tmp_path: Path) -> None:
    whole, expected = trained("fcca", tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained("fcca", tmp_path / "cut", stop_at=7)
    newest = tmp_path / "cut" / "checkpoint-6"
    spoil: dict[str, Callable[[], object]] = {
        "unmarked": lambda: (newest / "complete.json").unlink(),
        "empty": lambda: (tmp_path / "cut" / "checkpoint-7").mkdir(),
    }
    spoil[damage]()
    with pytest.warns(UserWarning, match=r"checkpoint-[67] is not whole, so it is removed"):
        resumed, report = trained("fcca", tmp_path / "cut", resume=True)
    assert report.resumed_from == tmp_path / "cut" / ("checkpoint-6" if damage == "empty" else "checkpoint-4")
    assert report.training.losses == expected.training.losses
    require_equal(resumed, whole)


def test_a_checkpoint_that_is_not_whole_takes_the_place_of_none_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer removes checkpoints after it has written a new one, and before that is marked."""
    with pytest.raises(KeyboardInterrupt):
        trained("alone", tmp_path, stop_at=7)
    (tmp_path / "checkpoint-6" / "complete.json").unlink()
    monkeypatch.setattr(callbacks, "mark_whole", Mock(side_effect=KeyboardInterrupt))
    with pytest.warns(UserWarning, match="not whole"), pytest.raises(KeyboardInterrupt):
        train(made("alone"), ROWS, RECIPE, pad_id=0, checkpoint_dir=tmp_path, checkpoint_steps=5, resume=True)
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-4"


def resume_as_one_of_two(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    whole, expected = trained("alone", folder)
    if rank == 0:
        shutil.rmtree(folder / "checkpoint-8")
    dist.barrier()
    resumed, report = trained("alone", folder, resume=True)
    assert report.resumed_from == folder / "checkpoint-6"  # two of the four steps of the second epoch are done
    assert report.training.losses == expected.training.losses
    require_equal(resumed, whole)
    dist.destroy_process_group()


def test_two_processes_go_on_with_the_rows_of_the_epoch_in_which_they_stopped(tmp_path: Path) -> None:
    done = ended(partial(as_ranks, 2, partial(resume_as_one_of_two, tmp_path / "run")), tmp_path)
    assert done.status == 0, done.err[-2000:]


def require_equal(a: nn.Module, b: nn.Module) -> None:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    assert all(one == other and torch.equal(x, y) for (one, x), (other, y) in pairs)


def train_and_count(folder: Path, killed_at: int | None) -> None:
    """Count what a training writes to its checkpoint folder; it is killed, as by the system, at one of its writes."""
    num_touches = 0

    def watch(event: str, words: tuple[object, ...]) -> None:
        nonlocal num_touches
        if event in WRITES and isinstance(words[0], str | bytes | os.PathLike) and str(folder) in os.fsdecode(words[0]):
            num_touches += 1
            if num_touches == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    trained("alone", folder)
    (folder.parent / "touches").write_text(str(num_touches))


def in_a_child(folder: Path, killed_at: int | None) -> int:
    """The touches of a training in a process of its own; 0 if it was killed."""
    done = ended(partial(train_and_count, folder, killed_at), folder.parent)
    return 0 if done.status == -signal.SIGKILL else int((folder.parent / "touches").read_text())


def stages(num_touches: int) -> list[int]:
    """Every ninth touch, and the last ones."""
    return [*range(1, num_touches, 9), *range(num_touches - 3, num_touches + 1)]


@pytest.mark.slow
def test_a_kill_at_every_stage_of_a_save_leaves_a_whole_checkpoint_or_none_and_resumes_bit_equal(
    tmp_path: Path,
) -> None:
    whole, expected = trained("alone", None)
    num_touches = in_a_child(tmp_path / "counted", None)
    assert num_touches > 20
    resumed_from = set()
    for stage in stages(num_touches):
        folder = tmp_path / "killed"
        assert in_a_child(folder, stage) == 0
        model, report = trained("alone", folder, resume=True)
        assert report.training.losses == expected.training.losses, stage
        require_equal(model, whole)
        resumed_from.add(report.resumed_from and report.resumed_from.name)
        shutil.rmtree(folder)
    assert {None, "checkpoint-2", "checkpoint-4"} <= resumed_from


@pytest.fixture
def small_disk(mount: Callable[[str], Path]) -> Path:
    return mount("size=300k")


def test_a_full_disk_stops_the_training_and_what_was_whole_stays_usable(small_disk: Path) -> None:
    with pytest.raises(TrainingError, match=r"could not be written to .*Free some space and resume"):
        trained("alone", small_disk / "run")
    shutil.copytree(small_disk / "run", small_disk.parent / "moved")
    _, resumed = trained("alone", small_disk.parent / "moved", resume=True)
    assert resumed.resumed_from is not None
    assert resumed.training.losses == trained("alone", None)[1].training.losses


def test_torch_too_is_known_to_have_met_a_full_disk() -> None:
    with pytest.raises(TrainingError, match="Free some space and resume"), explain_disk_errors(Path("checkpoints")):
        torch.save({"values": torch.zeros(10_000)}, "/dev/full")


def test_of_several_processes_one_marks_a_checkpoint_as_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "weights").write_text("w")
    saving, arguments = (Saving(Stop(), None, None), TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    for is_first in (False, True):
        saving.on_save(arguments, TrainerState(global_step=3, is_world_process_zero=is_first), TrainerControl())
        assert is_whole(folder) == is_first


@pytest.mark.parametrize(
    ("error", "saves"), [(OSError(28, "No space left on device"), False), (RuntimeError("mat1 and mat2"), True)]
)
def test_an_error_that_no_checkpoint_met_stays_what_it_is(error: Exception, saves: bool, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        train(tiny_qwen2(), ROWS, RECIPE, pad_id=0, progress=fail, checkpoint_dir=tmp_path / "c" if saves else None)
    assert caught.value is error
