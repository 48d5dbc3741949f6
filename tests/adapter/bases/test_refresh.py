"""Refreshing: a core that trains in rounds. The sum is exact, the moments are those of the batches, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from adapted import BATCHES, EXAMPLES, adapted, cores_of, logits, train_at_random
from frozencore import CoreBank, Refresh, calibrate, export_lora, get_bases, prepare_swap, save_basis
from frozencore.adapter.inspection import inspect_adapter
from frozencore.adapter.saved.folder import read_adapter
from frozencore.calibration.training_moments import TrainingMoments
from frozencore.errors import CalibrationError, ConfigError
from references import Evidence, fcca_factors, numpy_of, reference_moments, span_distance, sum_of_rounds, svd
from tiny import attention_names, batch_of, draw_examples, tiny_qwen2

STEPS = 6
FCCA_NEEDS = frozenset({"cross", "input_square", "error_square"})


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(model: nn.Module, folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 5e-2,
        "save_steps": 1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "remove_unused_columns": False, "optim": "adamw_torch",
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**settings, **changes})
    return Trainer(model, arguments, train_dataset=EXAMPLES, data_collator=batch_of, callbacks=list(callbacks))


def trained(folder: Path, rounds: int = 3, model: nn.Module | None = None, **changes: Any) -> PeftModel:
    model = adapted() if model is None else model
    trainer_of(model, folder, Refresh(model, rounds), **{"save_strategy": "no", **changes}).train()
    return model.eval()


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    """Trained in three rounds of two steps; not to be changed."""
    return trained(tmp_path_factory.mktemp("refreshed"))


def factors_of(model: nn.Module) -> list[Tensor]:
    return [factor.detach().clone() for layer in cores_of(model) for factor in layer.factors("default")]


def test_a_layer_gives_the_sum_of_its_rounds_before_and_after_a_refresh() -> None:
    model = adapted(model=tiny_qwen2().double(), dtype=torch.float64, alpha=None)
    layer = cores_of(model)[0]
    x = torch.randn(5, layer.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    W, bias = (numpy_of(value) for value in (layer.base_layer.weight, layer.base_layer.bias))
    rounds = []
    for number in range(3):
        train_at_random(model, seed=number)
        P, Q, _ = layer.factors("default")
        r = len(layer.core("default"))
        rounds.append(tuple(numpy_of(X.clone()) for X in (P[:, -r:], layer.core("default"), Q[:, -r:])))
        expected = sum_of_rounds(W, rounds, 1.0, numpy_of(x)) + bias
        before = layer(x).detach()
        np.testing.assert_allclose(numpy_of(before), expected, atol=1e-12)
        for other in cores_of(model):
            generator = torch.Generator().manual_seed(number)
            other.begin_round("default", basis_like(other, generator))
        torch.testing.assert_close(layer(x), before, atol=1e-13, rtol=0)
        assert layer.core("default").count_nonzero() == 0
        assert layer.core("default").requires_grad


def basis_like(layer: Any, generator: torch.Generator) -> Any:
    from frozencore.maths.basis import known_basis

    r = len(layer.core("default"))
    P, Q = (
        torch.linalg.qr(torch.randn(size, r, dtype=torch.float64, generator=generator)).Q
        for size in (layer.out_features, layer.in_features)
    )
    return known_basis(P, Q)


def test_a_round_that_is_taken_back_was_never_there() -> None:
    model = adapted()
    seen = []
    for number in range(3):
        train_at_random(model, seed=number)
        seen.append(factors_of(model))
        for layer in cores_of(model):
            layer.begin_round("default", basis_like(layer, torch.Generator().manual_seed(number)))
    for expected in reversed(seen):
        for layer in cores_of(model):
            layer.take_back_round("default")
        assert all(torch.equal(a, b) for a, b in zip(factors_of(model), expected, strict=True))


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_gathered_while_training_are_the_moments_of_the_batches(checkpointing: str, size: int) -> None:
    """With a core of zeros the base model's; each batch's loss is a mean over its completion tokens."""
    model = adapted().train()
    layers = {layer.name: layer for layer in cores_of(model)}
    if checkpointing != "none":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    sums = TrainingMoments(model, layers, FCCA_NEEDS)
    examples = EXAMPLES[:3]
    for begin in range(0, 3, size):
        batch = batch_of(examples[begin : begin + size])
        model(**batch, use_cache=False).loss.backward()
        with torch.no_grad():
            model(**batch, use_cache=False)
    names = attention_names(tiny_qwen2())
    counts = [len(e.ids) - e.num_prompt for e in examples]
    expected = reference_moments(tiny_qwen2(), [(e.ids, e.num_prompt) for e in examples], names, token_sum=size > 1)
    scale = 1 / sum(counts) if size > 1 else 1.0
    for name, moments in sums.moments().items():
        assert moments.num_tokens == expected[name].num_tokens
        for what, power in (("cross", 1), ("input_square", 0), ("error_square", 2)):
            wanted = getattr(expected[name], what) * scale**power
            np.testing.assert_allclose(
                numpy_of(getattr(moments, what)), wanted, rtol=2e-4, atol=1e-6 * abs(wanted).max()
            )
    sums.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.values())


def test_new_bases_are_those_of_the_moments_of_the_round_before(tmp_path: Path) -> None:
    """At a rate of zero every step sees the base model, so the reference knows what was gathered."""
    rows = [EXAMPLES[0], EXAMPLES[1]]
    model = adapted()
    arguments = {"learning_rate": 0.0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    trainer = trainer_of(model, tmp_path, Refresh(model, 2, cost=0.5), max_steps=4, save_strategy="no", **arguments)
    trainer.train_dataset = rows
    trainer.train()
    names = attention_names(tiny_qwen2())
    moments = reference_moments(tiny_qwen2(), [(e.ids, e.num_prompt) for e in rows], names)
    for layer in cores_of(model):
        mean = moments[layer.name]
        G, a, d = (getattr(mean, what) / mean.num_tokens for what in ("cross", "input_square", "error_square"))
        zeros = np.zeros(0)
        P0, Q0 = fcca_factors(Evidence(G, np.diag(a), np.diag(d), zeros, zeros, zeros, zeros), 3)
        P, Q, _ = (numpy_of(X) for X in layer.factors("default"))
        assert P.shape[1] == 6
        assert span_distance(P[:, 3:], P0) < 1e-3
        assert span_distance(Q[:, 3:], Q0) < 1e-3


def test_auto_counts_the_rows_that_the_trainer_will_see(tmp_path: Path) -> None:
    model = adapted()
    refresh = Refresh(model, "auto")
    arguments = {"max_steps": 30, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer_of(model, tmp_path, refresh, save_strategy="no", **arguments).train()
    assert refresh.rounds == model.peft_config["default"].rounds == 240 // 100


def test_gathering_adds_nine_hundredths_of_the_products_at_most(tmp_path: Path) -> None:
    """A training makes two products a weight, what is gathered one more."""
    counted: list[int] = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            sums = refresh._sums
            counted.append(next(iter(sums.capture.recorders.values())).num_tokens if sums else -1)

    model = adapted()
    refresh = Refresh(model, 2)
    one_row = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    trainer = trainer_of(model, tmp_path, refresh, Look(), max_steps=20, save_strategy="no", **one_row)
    trainer.train_dataset = EXAMPLES[:1]
    trainer.train()
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32  # q, k and v of half the heads, o: each layer
    whole = 2 * (attention + 3 * 32 * 48) + 40 * 32
    share = 0.09 * 2 * whole / (2 * attention)
    assert 0.3 < share < 0.7
    steps = sum(later > before for before, later in zip([0, *counted], counted[:10], strict=False))
    assert steps == 1 + int(9 * share)
    assert counted[10:] == [-1] * 10


def test_what_trains_and_its_state_stay_as_small_as_one_core(tmp_path: Path) -> None:
    model = adapted()
    trainer = trainer_of(model, tmp_path, Refresh(model, 3), save_strategy="no")
    trainer.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert {tuple(p.shape) for p in trainable} == {(3, 3)}
    assert set(trainer.optimizer.state) <= set(trainable)
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {2.0}  # fresh in each round
    for layer in cores_of(model):
        P, _, R = layer.factors("default")
        assert P.shape[1] == 9
        blocks = R.detach().reshape(3, 3, 3, 3).transpose(1, 2).ne(0).any(-1).any(-1)
        assert torch.equal(blocks, torch.eye(3, dtype=torch.bool))


def test_one_schedule_runs_over_all_rounds_and_each_begins_small(tmp_path: Path) -> None:
    rates: dict[str, list[float]] = {"planned": [], "taken": []}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            rates["taken"].append(optimizer.param_groups[0]["lr"])

        def on_step_end(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
            rates["planned"].append(lr_scheduler.get_last_lr()[0])

    model = adapted()
    changes = {"max_steps": 20, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    trainer_of(model, tmp_path, Refresh(model, 2), Look(), **changes).train()
    linear = [5e-2 * (1 - step / 20) for step in range(21)]
    assert rates["planned"] == pytest.approx(linear[1:])
    small = {10: 0.5}
    assert rates["taken"] == pytest.approx([small.get(step, 1.0) * linear[step] for step in range(20)])


def test_a_saved_sum_loads_bit_equal_and_merges_and_exports(refreshed: PeftModel, tmp_path: Path) -> None:
    expected = logits(refreshed)
    assert (expected - logits(adapted())).abs().max() > 1e-2
    refreshed.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_qwen2(), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)
    assert all(torch.equal(a, b) for a, b in zip(factors_of(loaded), factors_of(refreshed), strict=True))
    assert loaded.peft_config["default"].rounds == 3
    for report in inspect_adapter(*read_adapter(tmp_path / "adapter")).values():
        assert (report.basis.rank, report.basis.values_at_once, report.basis.values_in_all) == (9, 9, 27)
        assert report.basis.orthonormality_error < 1e-5
    lora = export_lora(tmp_path / "adapter", tmp_path / "lora", base=tiny_qwen2())
    assert lora.rank == 9
    exported = PeftModel.from_pretrained(tiny_qwen2(), tmp_path / "lora").eval()
    torch.testing.assert_close(logits(exported), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), expected, atol=1e-5, rtol=1e-4)


def test_a_lora_of_a_lower_rank_is_the_best_of_that_rank_and_says_what_it_lost(
    refreshed: PeftModel, tmp_path: Path
) -> None:
    refreshed.save_pretrained(tmp_path / "adapter")
    found = export_lora(tmp_path / "adapter", tmp_path / "lora", base=tiny_qwen2(), rank=2)
    exported = PeftModel.from_pretrained(tiny_qwen2(), tmp_path / "lora")
    lost = whole = 0.0
    for layer in cores_of(refreshed):
        update = layer.get_delta_weight("default").detach().double().numpy()
        U, S, V = svd(update)
        best = (U[:, :2] * S[:2]) @ V[:, :2].T
        own = exported.get_submodule(f"base_model.model.{layer.name}").get_delta_weight("default")
        np.testing.assert_allclose(numpy_of(own.detach()), best, atol=1e-6)
        lost, whole = lost + np.linalg.norm(update - best) ** 2, whole + np.linalg.norm(update) ** 2
    assert found.rank == 2
    assert found.error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    assert 0.01 < found.error < 1
    assert export_lora(refreshed, tmp_path / "whole", rank=9).error is None
    with pytest.raises(ConfigError, match="rank of at least 1, but 0 came"):
        export_lora(refreshed, tmp_path / "none", rank=0)


def test_a_loaded_sum_trains_on_with_its_last_core_alone(refreshed: PeftModel, tmp_path: Path) -> None:
    refreshed.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_qwen2(), tmp_path, is_trainable=True)
    assert {tuple(p.shape) for p in loaded.parameters() if p.requires_grad} == {(3, 3)}
    calibrate(loaded, BATCHES, reset=True, progress=False)
    assert loaded.peft_config["default"].rounds == 1
    torch.testing.assert_close(logits(loaded), logits(adapted()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4, 5])
def test_a_training_that_is_killed_and_resumed_is_bit_equal(
    killed_at: int, tmp_path: Path, refreshed: PeftModel
) -> None:
    model = adapted()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, StopAt(killed_at), Refresh(model, 3)).train()
    resumed = adapted()
    trainer_of(resumed, tmp_path, Refresh(resumed, 3)).train(resume_from_checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(factors_of(resumed), factors_of(refreshed), strict=True))


def sketching(model: nn.Module, rounds: int = 2) -> Refresh:
    """In seven columns, where the rank is three and a layer has 16 outputs or 32."""
    refresh = Refresh(model, rounds, memory_budget="40KB")
    assert refresh.widths is not None
    assert set(refresh.widths.values()) == {7}
    return refresh


@pytest.fixture(scope="module")
def sketched(tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    """As ``refreshed``, in two rounds of three steps, by sketches."""
    model = adapted()
    trainer_of(model, tmp_path_factory.mktemp("sketched"), sketching(model), save_strategy="no").train()
    return model.eval()


def test_rounds_by_sketches_learn_as_those_by_exact_sums(sketched: PeftModel, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return sum(float(model(**batch_of([example])).loss) for example in EXAMPLES) / len(EXAMPLES)

    exact, before, after = loss(trained(tmp_path, 2)), loss(adapted()), loss(sketched)
    assert before - after > 0.8 * (before - exact) > 0
    assert {layer.rank("default") for layer in cores_of(sketched)} == {6}


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
def test_a_training_by_sketches_that_is_killed_and_resumed_is_bit_equal(
    killed_at: int, tmp_path: Path, sketched: PeftModel
) -> None:
    model = adapted()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, StopAt(killed_at), sketching(model)).train()
    resumed = adapted()
    trainer_of(resumed, tmp_path, sketching(resumed)).train(resume_from_checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(factors_of(resumed), factors_of(sketched), strict=True))


def test_how_a_step_is_cut_into_batches_does_not_change_a_training_by_sketches(
    sketched: PeftModel, tmp_path: Path
) -> None:
    model = adapted()
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    trainer_of(model, tmp_path, sketching(model), **whole).train()
    torch.testing.assert_close(logits(model.eval()), logits(sketched), atol=5e-3, rtol=0)


def test_a_resume_without_the_moments_says_so(tmp_path: Path) -> None:
    model = adapted()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, StopAt(3), Refresh(model, 3)).train()
    (tmp_path / "checkpoint-3" / "refresh-0.safetensors").unlink()
    resumed = adapted()
    with pytest.raises(CalibrationError, match=r"there is no .*refresh-0.safetensors.*Resume from a checkpoint"):
        trainer_of(resumed, tmp_path, Refresh(resumed, 3)).train(resume_from_checkpoint=True)


def test_how_a_step_is_cut_into_batches_does_not_change_a_refreshed_training(
    refreshed: PeftModel, tmp_path: Path
) -> None:
    whole = trained(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    torch.testing.assert_close(logits(whole), logits(refreshed), atol=5e-3, rtol=0)


def test_one_round_is_the_plain_training_bit_for_bit(tmp_path: Path) -> None:
    plain = adapted()
    trainer_of(plain, tmp_path, save_strategy="no").train()
    one = trained(tmp_path, rounds=1)
    assert all(torch.equal(a, b) for a, b in zip(factors_of(one), factors_of(plain), strict=True))


def test_what_needs_one_basis_refuses_a_sum(refreshed: PeftModel, tmp_path: Path) -> None:
    for attempt in (
        lambda: get_bases(refreshed),
        lambda: save_basis(refreshed, tmp_path / "basis"),
        lambda: prepare_swap(refreshed, tmp_path),
        lambda: CoreBank(refreshed, 2),
        lambda: refreshed.base_model.add_weighted_adapter(["default"], [1.0], "sum"),
    ):
        with pytest.raises(ConfigError, match=r"a sum of 3 rounds, each on a basis of its own\. Export or merge it"):
            attempt()
    assert list(refreshed.peft_config) == ["default"]


def test_what_cannot_be_refreshed_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'at least one round, .* "auto" finds, but rounds=0 came'):
        Refresh(adapted(), 0)
    with pytest.raises(ConfigError, match=r"cost is a share above 0, but 0 came"):
        Refresh(adapted(), 2, cost=0)
    with pytest.raises(ConfigError, match=r"which 'random' does not read"):
        Refresh(adapted("random"), 2)
    shared = adapted()
    save_basis(shared, tmp_path / "basis")
    with pytest.raises(ConfigError, match=r"shares its own with others"):
        Refresh(shared, 2)
    with pytest.raises(ConfigError, match=r"budget of 1 KB is too small .*smallest that works is .\d+KB"):
        Refresh(adapted(), 2, memory_budget="1 KB")
    model = adapted()
    with pytest.raises(ConfigError, match=r"a first round of at least two steps, .* refresh=6 and 6 steps"):
        trainer_of(model, tmp_path, sketching(model, 6)).train()
    with pytest.raises(ConfigError, match=r"refresh=7 came for 6 steps"):
        trainer_of(model, tmp_path, Refresh(model, 7)).train()


def test_an_input_that_is_not_finite_is_named_at_the_refresh() -> None:
    model = adapted().train()
    sums = TrainingMoments(model, {layer.name: layer for layer in cores_of(model)}, FCCA_NEEDS)
    with torch.no_grad():
        model.get_input_embeddings().weight[draw_examples(1, seed=5)[0].ids[0]] = torch.nan
    model(**batch_of(EXAMPLES[:1])).loss.backward()
    with pytest.raises(CalibrationError, match=r"of layer 'model\.layers\.0.* met NaN or Inf while training"):
        sums.moments()
    sums.close()
