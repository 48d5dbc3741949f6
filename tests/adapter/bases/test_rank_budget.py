"""A rank budget from configuration to outputs: what is allocated, saved, exported, shared, and what is refused."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

from adapted import BATCHES, adapted, cores_of, logits, train_at_random
from frozencore import (
    CalibrationOptions,
    CoreBank,
    FrozenCoreConfig,
    calibrate,
    collect_moments,
    export_lora,
    save_basis,
    swap_core,
)
from frozencore.adapter.bases.passes import BasisWork
from frozencore.adapter.bases.rank_budget import GainWork
from frozencore.adapter.layer import FrozenCoreLayer, layer_shape
from frozencore.calibration.budget import PassPlan
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.allocation import num_values
from frozencore.maths.linalg import principal_cosines
from tiny import tiny_qwen2

TWICE = [batch for batch in BATCHES for _ in range(2)]
"""Every other batch of these is all of the data, so the halves agree on everything that is there."""


def base() -> torch.nn.Module:
    """One block whose values are so small that its queries and keys hardly matter to the loss."""
    model = tiny_qwen2(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e-3)
    return model


LAYERS = [name for name, m in base().named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
SHAPES = {name: layer_shape(base().get_submodule(name)) for name in LAYERS}


def budgeted(budget: int | str = 12, data: Any = TWICE, **options: Any) -> PeftModel:
    """On all seven linear layers; RawGrad, to which those without gradient are worth nothing."""
    config = FrozenCoreConfig(
        rank_budget=budget, **{"target_modules": "all-linear", "constructor": "rawgrad"} | options
    )
    model = get_peft_model(base(), config)
    if data is not None:
        calibrate(model, data, progress=False)
    return model.eval()


def ranks_of(model: torch.nn.Module) -> dict[str, int]:
    return {layer.name: len(layer.core("default")) for layer in cores_of(model)}


def trained_values(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@cache
def allocated(budget: int) -> dict[str, int]:
    """All ranks of ``budgeted``; the zeros among them."""
    return dict(budgeted(budget).peft_config["default"].rank_pattern)


def adapted_ranks(budget: int) -> dict[str, int]:
    return {name: rank for name, rank in allocated(budget).items() if rank}


@pytest.fixture(scope="module")
def trained() -> PeftModel:
    """Only read."""
    model = budgeted()
    train_at_random(model)
    return model


def test_the_budget_is_spent_and_a_layer_that_gets_nothing_is_not_adapted(trained: PeftModel) -> None:
    pattern = trained.peft_config["default"].rank_pattern
    assert list(pattern) == LAYERS
    assert num_values(pattern) == 12
    assert 0 in pattern.values()
    assert max(pattern.values()) > 1
    assert ranks_of(trained) == {name: rank for name, rank in pattern.items() if rank}
    assert trained_values(trained) == num_values(pattern)


def test_what_was_found_says_what_was_spent_and_on_what() -> None:
    model = budgeted(data=None)
    found = calibrate(model, TWICE, progress=False)
    pattern = model.peft_config["default"].rank_pattern
    assert found.rank_budget == 12
    assert found.not_adapted == tuple(name for name, rank in pattern.items() if not rank)
    assert {name: layer.rank for name, layer in found.layers.items()} == ranks_of(model)
    assert calibrate(adapted("fcca", calibrated=False), BATCHES, progress=False).rank_budget is None


@pytest.mark.parametrize(
    "options", [{"constructor": "fcca"}, {"coordinates": "qr"}, {"constructor": "signgrad", "initial_step": 0.1}]
)
def test_bases_are_those_of_the_ranks_given_outright(options: dict) -> None:
    spent = budgeted(**options)
    pattern = spent.peft_config["default"].rank_pattern
    options = {"constructor": "rawgrad"} | options
    given = get_peft_model(base(), FrozenCoreConfig(rank_pattern=pattern, target_modules="all-linear", **options))
    calibrate(given, TWICE, progress=False)
    assert ranks_of(given) == ranks_of(spent)
    for mine, theirs in zip(cores_of(spent), cores_of(given), strict=True):
        for X, Y in zip(mine.factors("default"), theirs.factors("default"), strict=True):
            torch.testing.assert_close(X, Y, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("budget", [12, 30, 65])
@pytest.mark.parametrize("constructor", ["fcca", "rawgrad"])
def test_groups_that_want_the_same_get_the_ranks_of_their_rows_together(constructor: str, budget: int) -> None:
    """Without noise: the halves of ``TWICE`` agree on everything."""
    plain = budgeted(budget, constructor=constructor)
    found = budgeted(budget, data=None, constructor=constructor)
    told = calibrate(found, groups={"one": BATCHES, "two": BATCHES}, weights={"one": 3}, progress=False)
    assert found.peft_config["default"].rank_pattern == plain.peft_config["default"].rank_pattern
    assert told.rank_budget == budget
    assert told.shares["one"].held > told.shares["one"].random
    alone = budgeted(budget, data=None, constructor=constructor)
    calibrate(alone, groups={"one": TWICE}, progress=False)
    for mine, theirs in zip(cores_of(plain), cores_of(alone), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(mine.factors("default"), theirs.factors("default"), strict=True))


class Two(torch.nn.Module):
    """Two layers that read inputs of their own, and whose outputs add up."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (torch.nn.Linear(12, 10, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x[:, :12]) + self.narrow(x[:, 12:])


def test_the_layer_in_which_the_groups_want_more_directions_gets_the_larger_rank() -> None:
    """Both groups want four directions of one layer and one of the other, and the opposite, so their mean is zero."""
    torch.manual_seed(0)
    wish = torch.cat([torch.randn(12, 4) @ torch.randn(4, 10), torch.randn(12, 1) @ torch.randn(1, 10)])
    groups = {}
    for sign, name in ((1, "anna"), (-1, "ben")):
        x = torch.randn(2000, 24)
        groups[name] = [{"x": x, "y": sign * x @ wish}]
    model = get_peft_model(Two(), FrozenCoreConfig(rank_budget=17, target_modules=["wide", "narrow"]))
    loss_fn = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()  # noqa: E731
    found = calibrate(model, groups=groups, loss_fn=loss_fn, progress=False)
    assert {name.rpartition(".")[2]: layer.rank for name, layer in found.layers.items()} == {"wide": 4, "narrow": 1}


def test_until_calibration_ranks_are_equal_and_fit() -> None:
    model = budgeted(65, data=None)
    assert set(ranks_of(model).values()) == {3}
    assert model.peft_config["default"].awaits_ranks
    calibrate(model, TWICE, progress=False)
    assert not model.peft_config["default"].awaits_ranks
    assert len(set(ranks_of(model).values())) > 1


def test_more_values_buy_no_smaller_rank_anywhere_and_no_more_than_the_layers_have() -> None:
    small, large, endless = (allocated(budget) for budget in (12, 30, 10**6))
    assert all(large[name] >= rank for name, rank in small.items())
    assert sum(large.values()) > sum(small.values())
    assert all(rank <= min(SHAPES[name]) for name, rank in endless.items())


def test_saved_and_loaded_it_is_the_same_adapter(trained: PeftModel, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(trained))
    assert loaded.peft_config["default"].rank_pattern == trained.peft_config["default"].rank_pattern
    assert loaded.peft_config["default"].rank_budget == 12
    wrapped = [m.name for m in loaded.modules() if isinstance(m, FrozenCoreLayer)]
    assert wrapped == list(ranks_of(trained))  # the others are the base model's own layers
    assert "values of a budget of 12" in (tmp_path / "README.md").read_text()


def test_under_the_automatic_scale_every_layer_has_that_of_its_own_rank(tmp_path: Path) -> None:
    model = budgeted(30, alpha="auto")
    train_at_random(model, size=0.05)
    scales = {layer.name: layer.frozencore_scale["default"] for layer in cores_of(model)}
    assert scales == {name: 16 / rank for name, rank in adapted_ranks(30).items()}
    model.save_pretrained(tmp_path / "ours")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    assert torch.equal(logits(loaded), logits(model))
    export_lora(tmp_path / "ours", tmp_path / "lora", base=base())
    lora = PeftModel.from_pretrained(base(), tmp_path / "lora").eval()
    torch.testing.assert_close(logits(lora), logits(model), atol=1e-4, rtol=1e-4)


def test_merged_it_gives_the_same_outputs() -> None:
    model = budgeted()
    train_at_random(model, size=0.05)
    before = logits(model)
    merged = model.merge_and_unload()
    assert not any(isinstance(m, FrozenCoreLayer) for m in merged.modules())
    torch.testing.assert_close(logits(merged), before, atol=1e-4, rtol=1e-4)


def test_as_lora_it_gives_the_same_outputs(trained: PeftModel, tmp_path: Path) -> None:
    export_lora(trained, tmp_path / "lora")
    lora = PeftModel.from_pretrained(base(), tmp_path / "lora").eval()
    torch.testing.assert_close(logits(lora), logits(trained), atol=1e-4, rtol=1e-4)
    trained.save_pretrained(tmp_path / "ours")
    export_lora(tmp_path / "ours", tmp_path / "again", base=base())
    again, once = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("again", "lora"))
    assert again == once


def test_cores_on_its_named_basis_are_swapped_and_banked_at_their_own_ranks(tmp_path: Path) -> None:
    first, expected = budgeted(), {}
    save_basis(first, tmp_path / "basis")
    for seed, name in enumerate(("a", "b")):
        train_at_random(first, seed=seed)
        first.save_pretrained(tmp_path / name)
        expected[name] = logits(first)
    second = get_peft_model(base(), FrozenCoreConfig(basis=str(tmp_path / "basis"))).eval()
    assert ranks_of(second) == ranks_of(first)
    bank = CoreBank(second, 2)
    for name in ("a", "b"):
        swap_core(second, tmp_path / name)
        assert torch.equal(logits(second), expected[name])
        bank.put(name, tmp_path / name)
    prompt = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    rows = ["a", "b"] * (len(prompt["input_ids"]) // 2)
    with torch.no_grad(), bank.rows(rows):
        mixed = second(**prompt).logits
    for row, name in enumerate(rows):
        torch.testing.assert_close(mixed[row], expected[name][row], atol=1e-4, rtol=1e-4)


def test_a_basis_that_has_its_ranks_takes_no_budget(tmp_path: Path) -> None:
    save_basis(adapted("random"), tmp_path / "basis")
    with pytest.raises(ConfigError, match="has its ranks already. Leave rank_budget out"):
        FrozenCoreConfig(basis=str(tmp_path / "basis"), rank_budget=64)


@pytest.mark.parametrize("constructor", ["random", "vera", "lora_xs", "milora", "eva", "filora"])
def test_where_no_spectrum_tells_layers_apart_ranks_are_equal(constructor: str) -> None:
    model = budgeted(65, data=None, constructor=constructor)
    assert set(model.peft_config["default"].rank_pattern.values()) == {3}
    if constructor in ("eva", "filora"):
        calibrate(model, BATCHES, progress=False)
    given = adapted(constructor, model=base(), r=3, coordinates="fisher", target_modules="all-linear")
    for mine, theirs in zip(cores_of(model), cores_of(given), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(mine.factors("default"), theirs.factors("default"), strict=True))


def test_a_budget_below_rank_one_everywhere_is_refused_where_it_must_be_and_the_model_is_as_it_was() -> None:
    model = base()
    with pytest.raises(ConfigError, match="Rank 1 in each of the 7 layers takes 7 values, but the rank budget is 6"):
        get_peft_model(model, FrozenCoreConfig(rank_budget=6, constructor="random", target_modules="all-linear"))
    assert not any(isinstance(m, FrozenCoreLayer) for m in model.modules())
    assert num_values(budgeted(3).peft_config["default"].rank_pattern) <= 3


def test_calibrated_again_layers_that_had_nothing_may_come_back() -> None:
    model = budgeted()
    before, layers = ranks_of(model), set(LAYERS)
    left_out = layers - before.keys()
    moments = collect_moments(base(), BATCHES, LAYERS)
    nothing = {name: moments[name] if name in left_out else _without_gradient(moments[name]) for name in LAYERS}
    calibrate(model, moments=(nothing, dict(nothing)), progress=False)
    assert ranks_of(model).keys() <= left_out
    assert all(p.requires_grad and p.dtype == torch.float32 for n, p in model.named_parameters() if "frozencore" in n)
    calibrate(model, TWICE, progress=False)
    assert ranks_of(model) == before


def _without_gradient(moments: Any) -> Any:
    return type(moments)(**{**vars(moments), "cross": torch.zeros_like(moments.cross)})


def test_groups_of_layers_give_the_same_ranks_and_bases() -> None:
    whole = budgeted(30)
    model = budgeted(30, data=None)
    calibrate(model, TWICE, progress=False, options=CalibrationOptions(group_size=3))
    assert ranks_of(model) == ranks_of(whole)
    for mine, theirs in zip(cores_of(model), cores_of(whole), strict=True):
        cosines = principal_cosines(mine.factors("default")[0], theirs.factors("default")[0])
        assert cosines.min() > 0.999


def test_sketches_of_the_halves_give_the_ranks_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 in every layer is looked at up to 12 directions: 8 times that is wider than the layers."""
    exact = budgeted(65)
    monkeypatch.setattr(BasisWork, "plan", lambda work, *_: PassPlan((tuple(work.layers),), streaming=True))
    streamed = budgeted(65)
    assert ranks_of(streamed) == ranks_of(exact)
    for mine, theirs in zip(cores_of(streamed), cores_of(exact), strict=True):
        assert principal_cosines(mine.factors("default")[0], theirs.factors("default")[0]).min() > 0.999


def test_a_memory_budget_counts_both_halves() -> None:
    model = budgeted(30, data=None)
    layers = {layer.name: layer for layer in cores_of(model)}
    config, options = model.peft_config["default"], CalibrationOptions(memory_budget="1GB")
    words = (model, "default", config, layers, dict.fromkeys(layers, 0), lambda *_: None)
    plain, halves = (
        kind(*words, ranks=dict.fromkeys(layers, 2)).costs(TWICE, options) for kind in (BasisWork, GainWork)
    )
    for name, (m, n) in SHAPES.items():
        assert halves[name].sums == 2 * plain[name].sums >= 8 * m * n
    calibrate(model, TWICE, progress=False, memory_budget="200KB")
    assert ranks_of(model) == adapted_ranks(30)


def test_one_batch_is_split_by_its_rows_and_one_row_is_refused() -> None:
    rows = {key: torch.cat([batch[key] for batch in TWICE[:2]])[[0, 4, 1, 5, 2, 6, 3, 7]] for key in TWICE[0]}
    model = budgeted(30, data=[rows])
    assert ranks_of(model) == ranks_of(budgeted(30, data=TWICE[:2]))
    model = budgeted(30, data=None)
    with pytest.raises(CalibrationError, match="two halves of the calibration examples, but there is 1 ex"):
        calibrate(model, [{key: value[:1] for key, value in rows.items()}], progress=False)


def test_moments_must_be_of_two_halves() -> None:
    moments = collect_moments(base(), BATCHES, LAYERS)
    model = budgeted(30, data=None)
    with pytest.raises(CalibrationError, match=r"moments of all of them came\. Pass moments=\(those of one half"):
        calibrate(model, moments=moments, progress=False)
    calibrate(model, moments=[moments, moments], progress=False)
    assert ranks_of(model) == adapted_ranks(30)


def test_halves_that_agree_on_nothing_are_refused_and_the_adapter_is_as_it_was() -> None:
    moments = collect_moments(base(), BATCHES, LAYERS)
    opposite = {name: type(m)(**{**vars(m), "cross": -m.cross}) for name, m in moments.items()}
    model = budgeted(30)
    train_at_random(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CalibrationError, match="agree on no direction of any of the 7 layers"):
        calibrate(model, moments=(moments, opposite), reset=True, progress=False)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("budget", "values"), [(36864, 36864), ("36864", 36864), ("150KB", 37500), ("144 KiB", 36864), ("1MB", 250_000)]
)
def test_bytes_are_those_of_float32_values(budget: int | str, values: int) -> None:
    assert FrozenCoreConfig(rank_budget=budget).rank_budget == values


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"rank_budget": 0}, "A rank budget is a number of trained values such as 36864, .* but 0 came"),
        ({"rank_budget": "many"}, "but 'many' came"),
        ({"rank_budget": "3B"}, "but '3B' came"),
        ({"rank_budget": True}, "but True came"),
        ({"rank_budget": 64, "r": 8}, r"rank_budget chooses the ranks, but r=8 came too\. Leave one of them out\."),
        ({"rank_budget": 64, "rank_pattern": {"q_proj": 3}}, "but rank_pattern came too"),
    ],
)
def test_what_says_two_things_or_nothing_is_refused(options: dict, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        FrozenCoreConfig(**options)


def test_a_pattern_of_rank_zero_leaves_layers_as_they_are() -> None:
    model = adapted("random", rank_pattern={"k_proj": 0})
    assert {name.rsplit(".", 1)[-1] for name in ranks_of(model)} == {"q_proj", "v_proj", "o_proj"}


def test_a_second_adapter_stays_and_peft_knows_where_each_is() -> None:
    model = adapted("random", model=base(), target_modules="all-linear", trained=True)
    before = logits(model)
    model.add_adapter("other", FrozenCoreConfig(rank_budget=12, target_modules="all-linear"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(model, TWICE, adapter_name="other", progress=False)
    assert torch.equal(logits(model), before)
    status = {layer.name.removeprefix("model."): layer.available_adapters for layer in model.get_layer_status()}
    pattern = model.peft_config["other"].rank_pattern
    assert {name for name, there in status.items() if "other" in there} == {n for n, rank in pattern.items() if rank}
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".other." in n)  # "default" is active
    model.set_adapter("other")
    assert trained_values(model) == num_values(pattern)
