"""A training that is stopped and resumed, beside one that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frozencore.errors import TrainingError
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train


def require_bit_equal_resume(
    adapted: Callable[[], nn.Module], rows: Sequence[TokenRow], recipe: Recipe, place: Path, **further: Any
) -> None:
    """Stopped at step 7 and resumed from its checkpoint, a training ends in the values of an uninterrupted one."""

    def stop(stage: str, done: int, total: int | None, note: str = "") -> None:
        if done == 7:
            raise KeyboardInterrupt

    def trained(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
        model = adapted()
        try:
            report = train(
                model, rows, recipe, pad_id=0, checkpoint_dir=folder, checkpoint_steps=3, **options, **further
            )
        except (KeyboardInterrupt, TrainingError):
            return {}
        assert (report.resumed_from is not None) == ("resume" in options)
        return {key: value for key, value in model.named_parameters() if value.requires_grad}

    whole = trained(place / "whole")
    assert whole
    assert not trained(place / "stopped", progress=stop)
    resumed = trained(place / "stopped", resume=True)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
