"""A training in groups that is stopped and resumed, beside one that is not, for every method and damaged checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from adapted import BATCHES
from frozencore import calibrate
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from places import few
from tiny import ATTENTION, draw_examples, tiny_gpt2, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(20, seed=5))]
RECIPE = Recipe(learning_rate=1e-2, epochs=2, batch_size=2, accumulation=3, warmup=0.3, pass_tokens=5)  # eight steps
DAMAGES = ("truncated", "unsealed", "empty")


def made(name: str) -> nn.Module:
    """A new model with this method on it; ``alone`` is a model without PEFT."""
    if name == "alone":
        return tiny_gpt2()
    method, model = METHODS[name], tiny_qwen2()
    options = AdapterOptions(rank=3, targets=method.default_targets(model) or ATTENTION, seed=1, core={})
    adapted = method.add(model, options)
    if method.needs(options):
        calibrate(adapted, BATCHES, progress=False)
    return adapted


def trained(
    name: str, folder: Path, *, stop_at: int | None = None, resume: bool = False
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
    assert (report.losses, report.num_steps) == (expected.losses, 8)
    require_equal(resumed, whole)
    if name != "alone":  # a checkpoint holds the adapter alone
        whole.save_pretrained(tmp_path / "adapter")
        (weights,) = (tmp_path / "cut" / "checkpoint-8").glob("*.safetensors")
        assert weights.stat().st_size == (tmp_path / "adapter" / weights.name).stat().st_size


@pytest.mark.parametrize("damage", few(DAMAGES, "truncated"))
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage: str, tmp_path: Path) -> None:
    whole, expected = trained("fcca", tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained("fcca", tmp_path / "cut", stop_at=7)
    newest = tmp_path / "cut" / "checkpoint-6"
    spoil: dict[str, Callable[[], object]] = {
        "truncated": lambda: shorten(newest / "adapter_model.safetensors"),
        "unsealed": lambda: (newest / "complete.json").unlink(),
        "empty": lambda: (tmp_path / "cut" / "checkpoint-7").mkdir(),
    }
    spoil[damage]()
    with pytest.warns(UserWarning, match=r"checkpoint-[67] is not complete, so training continues from an earlier"):
        resumed, report = trained("fcca", tmp_path / "cut", resume=True)
    assert report.resumed_from == tmp_path / "cut" / ("checkpoint-6" if damage == "empty" else "checkpoint-4")
    assert report.losses == expected.losses
    require_equal(resumed, whole)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def require_equal(a: nn.Module, b: nn.Module) -> None:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    assert all(one == other and torch.equal(x, y) for (one, x), (other, y) in pairs)
