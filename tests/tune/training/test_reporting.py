"""Losses and scores in the reporters of transformers; a package that is not there is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapted import adapted
from frozencore.errors import ConfigError
from frozencore.tune.training import recipe
from frozencore.tune.training.callbacks import Selection
from frozencore.tune.training.recipe import Recipe, require_reporters
from frozencore.tune.training.train import train
from tiny import draw_rows

ROWS = draw_rows(20, seed=5)
RECIPE = Recipe(learning_rate=1e-2, warmup=0.3, epochs=3, batch_size=5, accumulation=1)


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_package_that_is_not_installed_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "get_available_reporting_integrations", lambda: ["mlflow"])
    with pytest.raises(ConfigError, match=f"pip install {name}, or leave it out of --report-to"):
        require_reporters((name,))


def test_tensorboard_has_every_steps_loss_and_rate_and_every_score_in_the_folder_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = iter([3.0, 2.0, 2.5])
    chosen = Selection("epoch", lambda _: (next(scores), 0.5), identity="some rows")
    report = train(
        adapted("random"), ROWS, RECIPE, pad_id=0, selection=chosen, checkpoint_dir=tmp_path / "checkpoints",
        report_to=("tensorboard",),
    )  # fmt: skip
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    written = {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    assert list(written["train/loss"].values()) == pytest.approx(report.losses)
    assert written["train/learning_rate"].keys() == set(range(1, 13))
    assert written["eval/loss"] == {4: 3.0, 8: 2.0, 12: 2.5}
    assert written["eval/accuracy"] == {4: 0.5, 8: 0.5, 12: 0.5}
