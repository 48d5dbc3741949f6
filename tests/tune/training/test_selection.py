"""The step that is kept, against copies of the values taken at every scored step; and kills in between."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

from forked import as_ranks, ended
from frozencore.errors import DivergenceError, ModelError, TrainingError
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.training import callbacks, trainer
from frozencore.tune.training import train as training
from frozencore.tune.training.callbacks import Every, Selection
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import adapted, draw_rows, same_tensors, tiny_qwen2

ROWS = draw_rows(20, seed=5)
VALIDATION = draw_rows(6, seed=8)
RECIPE = Recipe(learning_rate=1e-2, warmup=0.3, epochs=3, batch_size=5, accumulation=1)
STEPS_AN_EPOCH, NUM_STEPS = 4, 12
Values = dict[str, torch.Tensor]


class StoppedError(Exception):
    pass


def values(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Scripted:
    """Scores as they are written down, in the order in which they are asked for; keeps the values it was shown."""

    def __init__(self, *scores: tuple[float, float | None]) -> None:
        self.scores = scores
        self.seen: list[Values] = []

    def __call__(self, model: nn.Module) -> tuple[float, float | None]:
        self.seen.append(values(model))
        random.random(), torch.rand(3)  # a scorer may draw; the training must not notice
        return self.scores[len(self.seen) - 1]


def really(model: nn.Module) -> tuple[float, float | None]:
    return held_out_loss(model, VALIDATION, pad_id=0), None


def run(
    score: Callable[[nn.Module], tuple[float, float | None]] | None,
    *,
    every: Every = "epoch",
    model: nn.Module | None = None,
    folder: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
) -> tuple[TrainingReport, nn.Module]:
    def progress(stage: str, done: int, total: int | None, note: str = "") -> None:
        if done == stop_after:
            raise StoppedError

    model = model or adapted("random")
    chooses = None if score is None else Selection(every, score)
    report = train(
        model, ROWS, RECIPE, pad_id=0, checkpoint_dir=folder, resume=resume, selection=chooses, progress=progress
    )
    return report, model


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[Every], tuple[TrainingReport, Values]]:
    """A training that real scores chose from: its report, and the values that it kept."""

    @cache
    def trained(every: Every) -> tuple[TrainingReport, Values]:
        report, model = run(really, every=every)
        return report, values(model)

    return trained


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        (((3.0, None), (1.0, None), (2.0, None)), 1),
        (((1.0, 0.5), (2.0, 0.75), (3.0, 0.5)), 1),  # accuracy goes first
        (((3.0, 0.5), (2.0, 0.5), (1.0, 0.5)), 2),  # the loss among equals
        (((1.0, 0.5), (1.0, 0.5), (1.0, 0.5)), 0),  # the first of equal ones
        (((3.0, 0.0), (2.0, 0.0), (2.5, 0.0)), 1),
    ],
)
def test_the_values_of_the_best_scored_step_are_kept(scores: tuple[tuple[float, float | None], ...], kept: int) -> None:
    scorer = Scripted(*scores)
    report, model = run(scorer)
    assert same_tensors(values(model), scorer.seen[kept])
    assert not any(same_tensors(scorer.seen[kept], other) for i, other in enumerate(scorer.seen) if i != kept)
    assert [(s.step, s.held_out_loss, s.accuracy) for s in report.selected.scores] == [
        (STEPS_AN_EPOCH * (i + 1), *score) for i, score in enumerate(scores)
    ]
    assert report.selected.kept_step == STEPS_AN_EPOCH * (kept + 1)


def test_scoring_changes_nothing_of_the_training() -> None:
    plain, model = run(None)
    scorer = Scripted((1.0, None), (2.0, None), (3.0, None))
    report, _ = run(scorer)
    assert report.training.losses == plain.training.losses
    assert same_tensors(scorer.seen[-1], values(model))
    assert (plain.selected, report.training.num_steps) == (None, NUM_STEPS)


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10, 12]), (4, [4, 8, 12]), (100, [12])])
def test_every_so_many_steps_and_the_last_one_are_scored(every: int, steps: list[int]) -> None:
    report, _ = run(Scripted(*((float(-i), None) for i in range(3))), every=every)
    assert [score.step for score in report.selected.scores] == steps


@pytest.fixture
def _sigterm_does_nothing() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("every", "how", "at", "saved"),
    [
        ("epoch", "killed at a step", 2, None),
        ("epoch", "killed at a step", 11, 8),
        (3, "killed at a step", 5, 3),
        ("epoch", "killed while it scores", 3, 8),
        ("epoch", "told to stop while it scores", 2, 8),
    ],
)
@pytest.mark.usefixtures("_sigterm_does_nothing")
def test_a_training_that_was_interrupted_chooses_as_if_it_had_not_been(
    every: Every,
    how: str,
    at: int,
    saved: int | None,
    undisturbed: Callable[[Every], tuple[TrainingReport, Values]],
    tmp_path: Path,
) -> None:
    calls = 0

    def disturbed(model: nn.Module) -> tuple[float, float | None]:
        nonlocal calls
        calls += 1
        if calls == at and how == "killed while it scores":
            raise StoppedError
        if calls == at and how == "told to stop while it scores":
            os.kill(os.getpid(), signal.SIGTERM)
        return really(model)

    kind, message = (TrainingError, "told to stop at step 8 of 12.* resume") if "told" in how else (StoppedError, "^$")
    with pytest.raises(kind, match=message):
        run(disturbed, every=every, folder=tmp_path, stop_after=at if how == "killed at a step" else None)
    report, resumed = run(really, every=every, folder=tmp_path, resume=True)
    expected, whole = undisturbed(every)
    assert report.resumed_from == (tmp_path / f"checkpoint-{saved}" if saved else None)
    assert (report.selected.scores, report.selected.kept_step) == (
        expected.selected.scores,
        expected.selected.kept_step,
    )
    assert same_tensors(values(resumed), whole)


def test_the_best_step_is_put_back_for_every_kind_of_model(tmp_path: Path) -> None:
    named = get_peft_model(tiny_qwen2(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    for model in (tiny_qwen2(), named):
        scorer = Scripted((1.0, None), (2.0, None), (3.0, None))
        run(scorer, model=model)
        assert same_tensors(values(model), scorer.seen[0])
        assert not same_tensors(scorer.seen[0], scorer.seen[1])


def test_a_moved_folder_goes_on_and_a_missing_best_step_is_one_line(tmp_path: Path) -> None:
    scores = ((1.0, None), (2.0, None), (3.0, None))
    scorer = Scripted(*scores)
    with pytest.raises(StoppedError):
        run(scorer, folder=tmp_path / "old", stop_after=10)
    (tmp_path / "old").rename(tmp_path / "new")
    _, model = run(Scripted(*scores[2:]), folder=tmp_path / "new", resume=True)
    assert same_tensors(values(model), scorer.seen[0])
    shutil.rmtree(tmp_path / "new" / "checkpoint-4")
    with pytest.raises(TrainingError, match="The best step so far is 4, but .*checkpoint-4 is incomplete"):
        run(Scripted(), folder=tmp_path / "new", resume=True)


def test_a_model_whose_validation_loss_is_no_number_has_diverged() -> None:
    def broken(_: nn.Module) -> tuple[float, float | None]:
        raise ModelError("The model's loss on held-out rows is not finite.")

    with pytest.raises(DivergenceError, match="Training diverged at step 4 of 12: The model's loss on held-out rows"):
        run(broken)


def test_the_time_of_scoring_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of ours, which only scoring moves."""
    now = 100.0

    def slow(model: nn.Module) -> tuple[float, float | None]:
        nonlocal now
        now += 60.0
        return 1.0, None

    for module in (training, trainer, callbacks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    report, _ = run(slow, every=1)
    assert (report.selected.time_s, report.time_s, report.step_s) == (60.0 * NUM_STEPS, 0.0, 0.0)


@pytest.mark.parametrize("stop_after", [None, 6])
def test_a_training_ends_after_so_many_scores_that_are_no_better_and_keeps_the_best(
    tmp_path: Path, stop_after: int | None
) -> None:
    def trained(scorer: Scripted, *, resume: bool = False, stop_after: int | None = None) -> TrainingReport:
        def progress(stage: str, done: int, total: int | None, note: str = "") -> None:
            if done == stop_after:
                raise StoppedError

        chooses = Selection(2, scorer, patience=2)
        return train(
            model, ROWS, RECIPE, pad_id=0, checkpoint_dir=tmp_path, checkpoint_steps=1, resume=resume,
            selection=chooses, progress=progress,
        )  # fmt: skip

    scores = ((3.0, None), (2.0, None), (2.0, None), (2.5, None), (1.0, None))
    model, scorer = adapted("random"), Scripted(*scores)
    if stop_after is not None:
        with pytest.raises(StoppedError):
            trained(scorer, stop_after=stop_after)
        scorer = Scripted(*scores[len(scorer.seen) :])
    report = trained(scorer, resume=stop_after is not None)
    best = values(model)
    again = trained(Scripted(), resume=True)  # killed after its end, it neither trains nor scores again
    for one in (report, again):
        assert one.selected.stopped_early
        assert (one.training.num_steps, len(one.training.losses), one.selected.kept_step) == (8, 8, 4)
        assert [score.step for score in one.selected.scores] == [2, 4, 6, 8]
    assert same_tensors(values(model), best)
    assert again.state_held_bytes == report.state_held_bytes


def train_beside_another(folder: Path, rank: int) -> None:
    """The scores of each process are almost those of the other, as two GPUs round them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    worse = Scripted(*((1.0 + rank * (2 - i) * 1e-12, None) for i in range(3)))
    chooses = Selection("epoch", worse, patience=1)
    recipe = replace(RECIPE, batch_size=4)
    report = train(adapted("random"), ROWS, recipe, pad_id=0, checkpoint_dir=folder, selection=chooses)
    (folder / f"{rank}").write_text(f"{report.training.num_steps} {report.selected.kept_step}")
    dist.destroy_process_group()


def test_one_score_decides_for_all_processes(tmp_path: Path) -> None:
    done = ended(partial(as_ranks, 2, partial(train_beside_another, tmp_path)), tmp_path)
    assert done.status == 0, done.err[-2000:]
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["10 5"] * 2


def test_patience_that_is_never_lost_changes_nothing() -> None:
    falling = Scripted((3.0, None), (2.0, None), (2.5, None))
    report, _ = run(falling)
    patient = Selection("epoch", Scripted((3.0, None), (2.0, None), (2.5, None)), patience=1)
    other = train(adapted("random"), ROWS, RECIPE, pad_id=0, selection=patient)
    assert (other.training.losses, other.training.num_steps) == (report.training.losses, NUM_STEPS)
    assert not other.selected.stopped_early  # the last score has no step after it
