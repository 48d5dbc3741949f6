"""Losses as they come, in TensorBoard's own files; a package that is not there is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapted import adapted
from frozencore.errors import ConfigError, DivergenceError
from frozencore.lab.rows.prompts import TokenRow
from frozencore.lab.training import reporting
from frozencore.lab.training.recipe import Recipe
from frozencore.lab.training.selection import Selection
from frozencore.lab.training.train import train
from tiny import draw_examples

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(20, seed=5))]
RECIPE = Recipe(learning_rate=1e-2, warmup=0.3, epochs=3, batch_size=5, accumulation=1)


def written(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_package_that_is_not_installed_is_one_line(
    name: reporting.Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reporting._AVAILABLE, name, lambda: False)
    with pytest.raises(ConfigError, match=f"pip install {name}, or leave it out of --report-to"):
        train(adapted("random"), ROWS, RECIPE, pad_id=0, reports=((name,), tmp_path))


def test_tensorboard_has_every_steps_loss_and_rate_and_every_score(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    scores = iter([3.0, 2.0, 2.5])
    chosen = Selection("epoch", lambda *_: (next(scores), 0.5), identity="some rows")
    report = train(adapted("random"), ROWS, RECIPE, pad_id=0, selection=chosen, reports=(("tensorboard",), tmp_path))
    found = written(tmp_path)
    assert list(found["train/loss"].values()) == pytest.approx(report.losses)
    assert found["train/learning_rate"].keys() == set(range(1, 13))
    assert found["eval/loss"] == {4: 3.0, 8: 2.0, 12: 2.5}
    assert found["eval/accuracy"] == {4: 0.5, 8: 0.5, 12: 0.5}


def test_tensorboard_has_what_came_before_a_training_diverged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    wild = Recipe(learning_rate=1e30, warmup=0.0, epochs=3, batch_size=5, accumulation=1)
    with pytest.raises(DivergenceError):
        train(adapted("random"), ROWS, wild, pad_id=0, reports=(("tensorboard",), tmp_path))
    assert 1 in written(tmp_path)["train/loss"]
