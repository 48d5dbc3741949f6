"""The recipe against a training loop written out, what diverging leaves behind, and what reporters receive."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn

from frozencore.errors import ConfigError, TrainingError
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.training import recipe as recipes
from frozencore.tune.training.callbacks import Selection
from frozencore.tune.training.recipe import Recipe, epochs_for, require_reporters
from frozencore.tune.training.train import train
from small_runs import DIVERGES
from tiny import adapted, draw_rows, tiny_gpt2, tiny_qwen2

ROWS = draw_rows(20, seed=5)
RECIPE = Recipe(learning_rate=1e-2, epochs=2, batch_size=2, accumulation=3, warmup=0.3)


def with_lora(model: nn.Module) -> nn.Module:
    targets = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_trained_model_is_freed_with_its_last_reference() -> None:
    """Another run may need its memory before the garbage collector runs."""
    model = with_lora(tiny_qwen2())
    weight = weakref.ref(next(model.parameters()))
    gc.disable()
    try:
        train(model, ROWS, RECIPE, pad_id=0)
        del model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("adapted", [False, True])
def test_training_is_the_written_out_loop(adapted: bool) -> None:
    model = with_lora(tiny_qwen2()) if adapted else tiny_qwen2()
    by_hand = copy.deepcopy(model).train()
    recipe = Recipe(learning_rate=3e-3, epochs=10, batch_size=len(ROWS), accumulation=1, warmup=0.2)
    report = train(model, ROWS, recipe, pad_id=0)

    batch = PaddingCollator(pad_id=0)(ROWS)
    parameters = [parameter for parameter in by_hand.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    losses = []
    for step in range(10):
        rate = (step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        loss = by_hand(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    assert report.training.losses == pytest.approx(losses, abs=1e-4)
    for name, value in weights(by_hand).items():
        torch.testing.assert_close(weights(model)[name], value, atol=1e-4, rtol=1e-3)
    assert report.training.num_steps == 10
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("warmup", "num_steps"), [(0.0, 1), (0.03, 1), (0.1, 2), (0.3, 10), (1.0, 7)])
def test_every_step_has_a_rate_and_none_is_above_the_peak(warmup: float, num_steps: int) -> None:
    rates = [Recipe(learning_rate=1.0, warmup=warmup).rate(step, num_steps) for step in range(num_steps)]
    rise = math.ceil(warmup * num_steps)
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:rise] == pytest.approx([(step + 1) / (rise + 1) for step in range(rise)])
    assert rates[rise : rise + 1] in ([], [1.0])


def test_a_training_of_one_step_trains() -> None:
    model = adapted("random")
    before = weights(model)
    train(model, ROWS, Recipe(learning_rate=1e-2, warmup=0.03, batch_size=len(ROWS), accumulation=1), pad_id=0)
    moved = max(float((R - before[name]).abs().max()) for name, R in weights(model).items())
    assert moved == pytest.approx(1e-2 / 2, rel=1e-2)  # a first step of Adam has the length of the rate


@pytest.mark.parametrize("takes_counts", [True, False])  # Gemma 3n takes no number of tokens
def test_a_step_is_the_mean_over_its_tokens_however_it_is_cut(takes_counts: bool) -> None:
    expected = train(tiny_qwen2(), ROWS, RECIPE, pad_id=0)
    assert expected.training.num_steps == RECIPE.num_steps(len(ROWS)) == 8
    for size, accumulation, overhead_tokens in ((1, 6, None), (6, 1, None), (2, 3, 1)):
        model = tiny_qwen2()
        model.accepts_loss_kwargs = takes_counts
        recipe = replace(RECIPE, batch_size=size, accumulation=accumulation, overhead_tokens=overhead_tokens)
        assert train(model, ROWS, recipe, pad_id=0).training.losses == pytest.approx(expected.training.losses, abs=1e-4)


def test_dropout_is_off_and_comes_back() -> None:
    rows, recipe = ROWS[:4], Recipe(learning_rate=5e-3, warmup=0.03, batch_size=4, accumulation=1)
    model = with_lora(tiny_gpt2())
    with torch.no_grad():
        expected = float(model.eval()(**PaddingCollator(pad_id=0)(rows)).loss)
    assert train(model, rows, recipe, pad_id=0).training.losses[0] == pytest.approx(expected, abs=1e-5)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.3}


@pytest.mark.usefixtures("as_a_user")  # beartype draws from Python's RNG
def test_only_trainable_parameters_change_states_are_put_back_and_nothing_is_printed_or_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = with_lora(tiny_qwen2())
    model.config.use_cache = True
    before = weights(model)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    train(model, ROWS, RECIPE, pad_id=0)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert model.config.use_cache is True
    assert not model.training
    assert (list(tmp_path.iterdir()), capfd.readouterr().out) == ([], "")


@pytest.mark.parametrize("left", [{"LOCAL_RANK": "0"}, {"WORLD_SIZE": "4"}, {"PMI_SIZE": "2"}])
def test_what_a_scheduler_or_a_notebook_left_in_the_environment_makes_a_process_no_part_of_several(
    left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
    train(with_lora(tiny_qwen2()), ROWS, RECIPE, pad_id=0)
    assert left.items() <= os.environ.items()


def test_the_mixed_precision_of_accelerate_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(with_lora(tiny_qwen2()), ROWS, RECIPE, pad_id=0)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.warns(UserWarning, match="mixed precision .bf16. is not used"):
        assert train(with_lora(tiny_qwen2()), ROWS, RECIPE, pad_id=0).training == plain.training


def test_epochs_of_all_seeds_have_different_orders() -> None:
    recipes = [Recipe(learning_rate=1.0, warmup=0.0, seed=seed) for seed in (*range(40, 60), 2**40, -1)]
    orders = [tuple(recipe.row_order(50, epoch)) for recipe in recipes for epoch in range(10)]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(recipes[3].row_order(50, 7)) == orders[37]


def test_a_default_device_of_torch_is_not_that_of_the_order_of_rows() -> None:
    with torch.device("meta"):
        order = RECIPE.row_order(20, 0)
    assert order == RECIPE.row_order(20, 0)


def test_divergence_stops_at_its_step_and_is_never_saved(tmp_path: Path) -> None:
    model = tiny_qwen2()
    with pytest.raises(TrainingError, match=r"diverged at step \d of 8: .*Lower the learning rate"):
        train(
            model, ROWS, replace(RECIPE, learning_rate=DIVERGES), pad_id=0, checkpoint_dir=tmp_path, checkpoint_steps=1
        )
    for state in tmp_path.glob("*/trainer_state.json"):
        assert all(math.isfinite(entry["loss"]) for entry in json.loads(state.read_text())["log_history"])


def test_a_nan_in_the_model_is_told_from_divergence() -> None:
    model = tiny_qwen2()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(TrainingError, match=r"at step 1 of 8: .*check the model's weights"):
        train(model, ROWS, RECIPE, pad_id=0)


def test_an_adapter_trains_in_float32_on_a_bf16_base() -> None:
    model = with_lora(tiny_qwen2().bfloat16())
    report = train(model, ROWS, RECIPE, pad_id=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert report.training.losses[-1] < report.training.losses[0]


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="in float32, but .* is torch.bfloat16"):
        train(tiny_qwen2().bfloat16(), ROWS, RECIPE, pad_id=0)
    with pytest.raises(ConfigError, match="has none"):
        train(tiny_qwen2().requires_grad_(False), ROWS, RECIPE, pad_id=0)
    assert "overhead_tokens" not in RECIPE.content()  # records without groups of rows stay as they were


@pytest.mark.parametrize(("rows", "epochs"), [(3, 8), (32, 8), (60, 4), (128, 2), (256, 1), (10_000, 1)])
def test_few_rows_of_ones_own_are_seen_several_times(rows: int, epochs: int) -> None:
    """32 steps of 8 rows, in 8 epochs at most."""
    assert epochs_for(rows, 8) == epochs


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_package_that_is_not_installed_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "get_available_reporting_integrations", lambda: ["mlflow"])
    with pytest.raises(ConfigError, match=f"pip install {name}, or leave it out of --report-to"):
        require_reporters((name,))


def test_tensorboard_has_every_steps_loss_and_rate_and_every_score_in_the_folder_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = iter([3.0, 2.0, 2.5])
    chosen = Selection("epoch", lambda _: (next(scores), 0.5))
    recipe = replace(RECIPE, epochs=3, batch_size=5, accumulation=1)
    report = train(
        adapted("random"), ROWS, recipe, pad_id=0, selection=chosen, checkpoint_dir=tmp_path / "checkpoints",
        report_to=("tensorboard",),
    )  # fmt: skip
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    written = {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    assert list(written["train/loss"].values()) == pytest.approx(report.training.losses)
    assert written["train/learning_rate"].keys() == set(range(1, 13))
    assert written["eval/loss"] == {4: 3.0, 8: 2.0, 12: 2.5}
    assert written["eval/accuracy"] == {4: 0.5, 8: 0.5, 12: 0.5}
