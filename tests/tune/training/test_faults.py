"""Training that is killed while it saves, or meets a full disk: what is there is whole, and it goes on bit-equal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from forked import forget_cuda
from frozencore.errors import TrainingError
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.callbacks import Seal
from frozencore.tune.training.checkpoints import Stop, is_complete
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import draw_examples, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(12, seed=5))]
RECIPE = Recipe(learning_rate=1e-2, warmup=0.03, epochs=1, batch_size=2, accumulation=1)
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir"}


def run(folder: Path | None, model: nn.Module, *, resume: bool = False) -> TrainingReport:
    return train(model, ROWS, RECIPE, pad_id=0, checkpoint_dir=folder, checkpoint_steps=2, resume=resume)


def train_and_count(folder: Path, killed_at: int | None) -> int:
    """The number of writes of a training to its checkpoint folder; it is killed, as by the system, at one of them."""
    num_touches = 0

    def watch(event: str, words: tuple[object, ...]) -> None:
        nonlocal num_touches
        if event in WRITES and isinstance(words[0], str | bytes | os.PathLike) and str(folder) in os.fsdecode(words[0]):
            num_touches += 1
            if num_touches == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(folder, tiny_qwen2())
    return num_touches


def in_a_child(folder: Path, killed_at: int | None) -> int:
    """The touches of a training in a process of its own; 0 if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            forget_cuda()
            os.write(writer, str(train_and_count(folder, killed_at)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = told.read()
    os.waitpid(child, 0)
    return int(found or 0)


def stages(num_touches: int) -> list[int]:
    """Every ninth touch, and the last ones."""
    return [*range(1, num_touches, 9), *range(num_touches - 3, num_touches + 1)]


@pytest.mark.slow
def test_a_kill_at_every_stage_of_a_save_leaves_a_whole_checkpoint_or_none_and_resumes_bit_equal(
    tmp_path: Path,
) -> None:
    whole = tiny_qwen2()
    expected = run(None, whole)
    num_touches = in_a_child(tmp_path / "counted", None)
    assert num_touches > 20
    resumed_from = set()
    for stage in stages(num_touches):
        folder = tmp_path / "killed"
        assert in_a_child(folder, stage) == 0
        model = tiny_qwen2()
        report = run(folder, model, resume=True)
        assert report.losses == expected.losses, stage
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True)), stage
        resumed_from.add(report.resumed_from and report.resumed_from.name)
        shutil.rmtree(folder)
    assert {None, "checkpoint-2", "checkpoint-4"} <= resumed_from


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def test_a_full_disk_stops_the_training_and_what_was_whole_stays_usable(small_disk: Path) -> None:
    with pytest.raises(TrainingError, match=r"could not be written to .*Free some space and resume") as caught:
        run(small_disk / "run", tiny_qwen2())
    assert "\n" not in str(caught.value)
    expected = run(None, tiny_qwen2())
    shutil.copytree(small_disk / "run", small_disk.parent / "moved")
    assert run(small_disk.parent / "moved", tiny_qwen2(), resume=True).losses == expected.losses


def test_of_several_processes_one_seals_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "weights").write_text("w")
    seal, arguments = Seal({"seed": 1}, Stop(), None, None), TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for is_first in (False, True):
        seal.on_save(arguments, TrainerState(global_step=3, is_world_process_zero=is_first), TrainerControl())
        assert is_complete(folder) == is_first


@pytest.mark.parametrize(
    ("error", "saves"), [(OSError(28, "No space left on device"), False), (RuntimeError("mat1 and mat2"), True)]
)
def test_an_error_that_no_checkpoint_met_stays_what_it_is(error: Exception, saves: bool, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        train(tiny_qwen2(), ROWS, RECIPE, pad_id=0, progress=fail, checkpoint_dir=tmp_path / "c" if saves else None)
    assert caught.value is error
