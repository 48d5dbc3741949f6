"""A tenant trained beside others against the same tenant trained alone by the existing recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from frozencore import FrozenCoreConfig
from frozencore.errors import CalibrationError, ConfigError
from frozencore.tune.many.tenant import Tenant, Trained, Validation, train_many
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.scoring.forward import row_losses
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.training.callbacks import Selection
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from small_runs import DIVERGES, difference
from tiny import adapted, cores_of, draw_rows, same_tensors, tiny_gpt2, tiny_qwen2, train_at_random

CPU_TOKENS = "frozencore.tune.rows.token_batches.CPU_TOKENS"  # of one pass
RECIPE = Recipe(learning_rate=2e-2, warmup=0.2, epochs=2, batch_size=2, accumulation=2)


TENANTS = {
    "anna": Tenant(draw_rows(13, seed=1), RECIPE),
    "ben": Tenant(draw_rows(4, seed=2, longest=20), replace(RECIPE, seed=7, learning_rate=5e-3)),
    "cleo": Tenant(draw_rows(1, seed=3), replace(RECIPE, epochs=3)),
    "dora": Tenant(draw_rows(16, seed=4, longest=30), replace(RECIPE, batch_size=1, accumulation=1, warmup=0.0)),
    "emil": Tenant(draw_rows(9, seed=5), replace(RECIPE, warmup=0.5)),
}

TWO = {name: TENANTS[name] for name in ("anna", "ben")}


def trained_at_once(model: nn.Module, tenants: Mapping[str, Tenant] = TENANTS, **options: object) -> dict[str, Trained]:
    ended: dict[str, Trained] = {}
    train_many(model, tenants, ended.update, pad_id=0, **options)
    return {name: ended[name] for name in tenants}


def alone(model: nn.Module, tenant: Tenant) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    report = train(model, tenant.rows, tenant.recipe, pad_id=0)
    return cores_by_name(model), report.training.losses


def cores_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {layer.name: layer.factors("default")[2].detach().clone() for layer in cores_of(model)}


def cores_of_one(trained: Trained, base: Callable[[], nn.Module] = tiny_qwen2) -> dict[str, Tensor]:
    assert trained.core is not None
    return trained.core.by_layer(dict(sorted((layer.name, 3) for layer in cores_of(adapted(model=base())))))


@pytest.mark.parametrize(("base", "num_slots"), [(tiny_qwen2, 2), pytest.param(tiny_gpt2, 3, marks=pytest.mark.slow)])
def test_a_tenant_beside_others_is_the_tenant_alone(
    base: Callable[[], nn.Module], num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPU_TOKENS, 64)
    trained = trained_at_once(adapted(model=base()), num_slots=num_slots)
    assert list(trained) == list(TENANTS)
    for name, tenant in TENANTS.items():
        cores, losses = alone(adapted(model=base()), tenant)
        assert difference(cores_of_one(trained[name], base), cores) < 1e-5
        assert trained[name].report.training.losses == pytest.approx(losses, rel=1e-5)
        assert trained[name].report.training.num_steps == tenant.num_steps == len(losses)


def test_what_is_not_of_a_tenant_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tenant beside others, beside one that diverges, and in another slot: bit for bit where batches agree."""
    monkeypatch.setattr(CPU_TOKENS, 1)
    lone = trained_at_once(adapted(), {"anna": TENANTS["anna"]})
    wild = {"wild": Tenant(draw_rows(30, seed=9), replace(RECIPE, learning_rate=DIVERGES)), "anna": TENANTS["anna"]}
    beside = trained_at_once(adapted(), wild)
    assert "diverged at step" in str(beside["wild"].diverged)
    assert beside["wild"].core is None
    assert beside["anna"].diverged is None
    assert beside["anna"].report.training.losses == lone["anna"].report.training.losses
    assert torch.equal(beside["anna"].core.values, lone["anna"].core.values)


def test_each_tenant_starts_from_the_core_of_the_adapter_which_stays() -> None:
    model, expected = adapted(trained=True), adapted(trained=True)
    before = cores_by_name(model)
    trained = trained_at_once(model, TWO, num_slots=2)
    assert same_tensors(cores_by_name(model), before)
    cores, _ = alone(expected, TENANTS["anna"])
    assert difference(cores_of_one(trained["anna"]), cores) < 1e-5


def test_another_adapter_that_is_active_does_not_reach_a_tenant() -> None:
    model = adapted("random", target_modules=["q_proj"])
    expected = trained_at_once(model, TWO)
    options = {"r": 3, "constructor": "random", "target_modules": ["q_proj", "v_proj"]}
    model.add_adapter("wide", FrozenCoreConfig(**options))
    train_at_random(model, "wide")
    model.set_adapter("wide")
    trained = trained_at_once(model, TWO)
    assert all(trained[name].report.training.losses == expected[name].report.training.losses for name in TWO)
    assert all(torch.equal(trained[name].core.values, expected[name].core.values) for name in TWO)


def test_a_16_bit_base_trains_float32_cores() -> None:
    trained = trained_at_once(adapted(dtype=torch.bfloat16), TWO)
    assert {one.core.values.dtype for one in trained.values()} == {torch.float32}
    _, losses = alone(adapted(dtype=torch.bfloat16), TENANTS["anna"])
    assert trained["anna"].report.training.losses == pytest.approx(losses, rel=0.02)


VALIDATED = TENANTS | {
    "anna": replace(TENANTS["anna"], validation=Validation(draw_rows(6, seed=11), every=2)),
    "dora": replace(TENANTS["dora"], validation=Validation(draw_rows(3, seed=12), every=3, patience=2)),
}


def test_a_step_that_does_not_fit_in_memory_is_made_in_smaller_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    three, sizes = TWO | {"emil": TENANTS["emil"]}, []
    monkeypatch.setattr(CPU_TOKENS, 64)
    whole = trained_at_once(adapted(), three)

    def no_room_for_three(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        sizes.append(len(batch["labels"]))
        losses = row_losses(model, batch)
        if len(losses) > 2:
            raise torch.OutOfMemoryError("no room")
        return losses

    monkeypatch.setattr("frozencore.tune.many.tenant.row_losses", no_room_for_three)
    narrow = trained_at_once(adapted(), three)
    assert max(sizes) > 2
    assert sum(size > 2 for size in sizes) < 8  # each halves the budget for good
    for name, trained in narrow.items():
        assert trained.report.training.losses == pytest.approx(whole[name].report.training.losses, rel=1e-5)
        assert difference(cores_of_one(trained), cores_of_one(whole[name])) < 1e-5


def test_layers_whose_product_is_not_plain_train_the_same() -> None:
    """With a hook on each base layer, as quantised ones, the product goes through autograd."""
    model = adapted()
    for layer in cores_of(model):
        layer.get_base_layer().register_forward_hook(lambda *_: None)
    hooked, plain = trained_at_once(model, TWO), trained_at_once(adapted(), TWO)
    for name, trained in hooked.items():
        assert difference(cores_of_one(trained), cores_of_one(plain[name])) < 1e-5


def test_validation_rows_choose_the_step_that_they_would_choose_alone() -> None:
    tenant = VALIDATED["anna"]
    validation = tenant.validation
    chosen = trained_at_once(adapted(), {name: VALIDATED[name] for name in TWO})["anna"]
    model = adapted()

    def score(scored: nn.Module, *_: object) -> tuple[float, None]:
        return held_out_loss(scored, validation.rows, pad_id=0), None

    report = train(model, tenant.rows, tenant.recipe, pad_id=0, selection=Selection(2, score))
    mine, theirs = chosen.report.selected, report.selected
    assert [score.step for score in mine.scores] == [score.step for score in theirs.scores] == [2, 4, 6, 8]
    losses = [[score.held_out_loss for score in selected.scores] for selected in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert mine.kept_step == theirs.kept_step
    assert difference(cores_of_one(chosen), cores_by_name(model)) < 1e-5


def test_a_tenant_whose_validation_loss_rises_stops_early_and_keeps_its_best() -> None:
    tenant = replace(TENANTS["anna"], recipe=replace(RECIPE, epochs=6, learning_rate=0.5))
    rows = draw_rows(6, seed=11)
    patient = replace(tenant, validation=Validation(rows, every=1))
    stopped, whole = (
        trained_at_once(adapted(), TWO | {"anna": replace(patient, validation=Validation(rows, every=1, patience=k))})
        for k in (3, None)
    )
    scores = whole["anna"].report.selected.scores
    best = [
        i for i in range(len(scores)) if scores[i].held_out_loss < min([9.9, *(s.held_out_loss for s in scores[:i])])
    ]
    ends = next(i for i in range(len(scores)) if i - max(b for b in best if b <= i) == 3)
    report = stopped["anna"].report
    assert (report.selected.stopped_early, whole["anna"].report.selected.stopped_early) == (True, False)
    assert report.training.num_steps == ends + 1 < whole["anna"].report.training.num_steps
    assert report.selected.scores == scores[: ends + 1]
    assert {name: one.report.training.num_steps for name, one in stopped.items() if name != "anna"} == {
        name: tenant.num_steps for name, tenant in TWO.items() if name != "anna"
    }


def test_a_causal_model_is_not_told_what_is_padding_and_another_one_is() -> None:
    """Gradients of padded rows, against each row alone."""
    rows, model, told = draw_rows(4, seed=21, longest=20), tiny_qwen2().requires_grad_(False), []
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    batch = PaddingCollator(0)(rows)
    assert not batch["attention_mask"].all()
    model.register_forward_pre_hook(lambda _, args, given: told.append("attention_mask" in given), with_kwargs=True)

    def found(batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        nats = torch.cat([row_losses(model, one) for one in batches])
        return nats, *torch.autograd.grad(nats.sum(), embeddings)

    alone = found([PaddingCollator(0)([row]) for row in rows])
    for is_causal in (True, False):
        for layer in model.model.layers:
            layer.self_attn.is_causal = is_causal
        told.clear()
        for ours, theirs in zip(found([batch]), alone, strict=True):
            assert (ours - theirs).norm() < 1e-5 * theirs.norm()
        assert told == [not is_causal]


def test_what_cannot_train_together_is_refused_in_one_line() -> None:
    merged = adapted(trained=True)
    merged.merge_adapter()
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: trained_at_once(adapted(calibrated=False)), CalibrationError, r"Call frozencore\.calibrate"),
        (lambda: trained_at_once(adapted(modules_to_save=["lm_head"])), ConfigError, "modules_to_save"),
        (lambda: trained_at_once(merged), ConfigError, "unmerge_adapter"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    assert trained_at_once(adapted(), {}) == {}
