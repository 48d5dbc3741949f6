"""Rows of a step go through the model together, as many as fit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adapted import adapted
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.cost import row_bytes, rows_at_once
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute
from tiny import tiny_gpt2, tiny_llama, tiny_qwen2


def silent(stage: str, done: int, total: int | None, note: str = "") -> None:
    pass


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """The bytes that autograd keeps of a forward pass without dropout, beside the parameters."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama, tiny_gpt2])
def test_a_row_is_foreseen_to_keep_no_less_than_it_does_and_no_more_than_three_times_that(
    make: type[nn.Module], dtype: torch.dtype
) -> None:
    targets = ["c_attn"] if make is tiny_gpt2 else ["q_proj", "v_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted("random", model=make(), dtype=dtype, target_modules=targets)
    ids = torch.arange(32).remainder(30)[None]
    found = kept_bytes(model, ids)
    assert found <= row_bytes(32, model) <= 3 * found


@pytest.mark.parametrize(
    ("rows", "room", "at_once"), [(8, 8, 8), (8, 7.9, 4), (8, 3, 2), (8, 0.1, 1), (6, 5, 3), (7, 5, 1), (1, 9, 1)]
)
def test_as_many_go_at_once_as_fit_and_divide_a_step(
    rows: int, room: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_qwen2()
    weights = sum(p.nbytes for p in model.parameters())
    there = int(weights + 2 * room * row_bytes(20, model)) + 1
    monkeypatch.setattr("frozencore.tune.cost.memory_of", lambda device: there)
    assert rows_at_once(rows, 20, model) == at_once


def few(**options: object) -> RunConfig:
    return make_config(
        model=str(pocket_model_path()), task="pocket-sentiment", rank=4, calibration_size=16, epochs=1, num_train=24,
        num_evaluation=10, device="cpu", **options,
    )  # fmt: skip


def cores(folder: Path) -> dict[str, Tensor]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(str(pocket_model_path()))[0], folder / "adapter")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FrozenCoreLayer)}
    return {name: layer.core("default").detach() for name, layer in layers.items()}


def test_a_run_cut_as_it_fits_is_the_run_of_one_row_after_the_other(tmp_path: Path) -> None:
    fitted = execute(few(batch_size="auto"), tmp_path / "fitted", silent)
    alone = execute(few(), tmp_path / "alone", silent)
    for record, batch_size, accumulation in ((fitted, 8, 1), (alone, 1, 8)):
        assert record.resolved is not None
        assert record.resolved.recipe.items() >= {"batch_size": batch_size, "accumulation": accumulation}.items()
    expected = cores(tmp_path / "alone")
    assert fitted.training.losses == pytest.approx(alone.training.losses, rel=1e-5)
    for name, core in cores(tmp_path / "fitted").items():
        torch.testing.assert_close(core, expected[name], rtol=1e-3, atol=1e-5)
