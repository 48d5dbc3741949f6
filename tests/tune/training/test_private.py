"""A recipe with a budget: the steps of PrivateTraining, resumed to the bit, with what is spent said at each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapted import adapted, cores_of
from frozencore.adapter.private import private_training
from frozencore.errors import ConfigError, TrainingError
from frozencore.privacy import PrivateBudget
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.selection import Selection
from frozencore.tune.training.train import TrainingReport, train
from tiny import draw_examples

opacus = pytest.importorskip("opacus")

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(20, seed=5))]
RECIPE = Recipe(
    learning_rate=1e-2, epochs=2, batch_size=2, accumulation=3, warmup=0.3, private=PrivateBudget(8.0, 1e-3, 0.5)
)


def cores(model: torch.nn.Module) -> Tensor:
    return torch.cat([layer.core("default").detach().flatten() for layer in cores_of(model)])


def trained(
    folder: Path | None, *, until: int | None = None, resume: bool = False, recipe: Recipe = RECIPE
) -> tuple[Tensor, TrainingReport | None, list[str]]:
    """Cores, report and what was told; interrupted when a step is told."""
    model, told = adapted("random"), []

    def progress(_: str, done: int, total: int | None, note: str = "") -> None:
        told.append(note)
        if done == until:
            raise KeyboardInterrupt

    options = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_steps": 1}
    report = None
    try:
        report = train(model, ROWS, recipe, pad_id=0, resume=resume, progress=progress, **options)
    except KeyboardInterrupt:
        assert until is not None
    return cores(model), report, told


@pytest.fixture(autouse=True)
def same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_training, "new_secret", lambda: "5a" * 32)


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a step does not follow from its sum, whose rounding may differ."""
    plain = private_training.noise_of
    monkeypatch.setattr(private_training, "noise_of", lambda secret, step, total: plain(secret, step, total * 0))


@pytest.mark.parametrize("until", [2, 5, 8])
def test_a_private_training_resumes_to_the_bit_and_spends_no_step_twice(
    until: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected, told = trained(None)
    trained(tmp_path, until=until)
    monkeypatch.setattr(private_training, "new_secret", lambda: "not that of the checkpoint")
    resumed, report, _ = trained(tmp_path, resume=True)
    assert expected is not None
    assert report is not None
    assert torch.equal(resumed, whole)
    assert report.resumed_from is not None
    assert report.schedule == expected.schedule
    assert report.num_steps == expected.num_steps == RECIPE.num_steps(len(ROWS)) == 8
    assert report.losses == expected.losses
    spent = [float(found[1]) for note in told if (found := re.search(r", epsilon (\d+\.\d+)", note))]
    assert expected.schedule is not None
    assert spent == [pytest.approx(expected.schedule.spent(step), abs=6e-4) for step in range(1, 9)]
    assert spent[-1] <= 8.0


def test_two_private_trainings_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed of the recipe, which a record tells, gives no noise."""
    first, _, _ = trained(None)
    monkeypatch.undo()
    assert not torch.equal(trained(None)[0], first)


def test_a_checkpoint_is_not_resumed_with_another_budget(tmp_path: Path) -> None:
    trained(tmp_path, until=2)
    for private in (None, PrivateBudget(4.0, 1e-3, 0.5)):
        with pytest.raises(TrainingError, match="made with others: private"):
            trained(tmp_path, resume=True, recipe=replace(RECIPE, private=private))


@pytest.mark.usefixtures("same_noise")
def test_padding_free_rows_train_as_padded_ones() -> None:
    """To rounding, before Adam's division by small second moments: in one step."""
    one = replace(RECIPE, epochs=1, accumulation=10, warmup=0.0)
    padded, laid = (trained(None, recipe=replace(one, padding_free=laid_out))[0] for laid_out in (False, True))
    assert bool(padded.any())
    torch.testing.assert_close(laid, padded, rtol=1e-3, atol=1e-4)


def test_what_would_choose_by_rows_is_refused() -> None:
    chosen = Selection("epoch", lambda *_: (0.0, None), "rows")
    with pytest.raises(ConfigError, match="not scores that choose a checkpoint"):
        train(adapted("random"), ROWS, RECIPE, pad_id=0, selection=chosen)
    for changes in ({"pass_tokens": 8},):
        with pytest.raises(ConfigError, match="private excludes"):
            replace(RECIPE, **changes)


def test_a_recipe_without_a_budget_says_nothing_of_it() -> None:
    """Records and checkpoints of other trainings stay as they are."""
    assert "private" not in replace(RECIPE, private=None).content()
    assert RECIPE.content()["private"] == {"epsilon": 8.0, "delta": 1e-3, "clip": 0.5}
