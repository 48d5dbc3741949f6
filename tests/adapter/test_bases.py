"""Bases taken out, put in, and saved for many adapters of cores alone; cores swapped onto the basis they are of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fixtures import few
from frozencore import (
    CONSTRUCTORS,
    CoreBank,
    FrozenCoreConfig,
    calibrate,
    get_bases,
    load_basis,
    prepare_swap,
    save_basis,
    set_bases,
    swap_core,
)
from frozencore.adapter.per_row import adapter_of_each_row
from frozencore.adapter.saved.tensors import factors_alone
from frozencore.errors import ArtifactError
from tiny import BATCHES, adapted, all_equal, cores_of, factors_of, logits, tiny_qwen2, train_at_random

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "eva", "milora", "random"))
def test_bases_of_a_file_make_the_same_adapter(constructor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = adapted(constructor, dtype=dtype)
    save_file(get_bases(expected), tmp_path / "bases.safetensors")
    model = adapted(constructor, dtype=dtype, calibrated=False)
    set_bases(model, load_file(tmp_path / "bases.safetensors"))
    assert all_equal(factors_of(model), factors_of(expected))
    model.train()(**BATCHES[0]).loss.backward()


def test_bases_are_copies_and_a_new_one_resets_its_own_core_alone() -> None:
    model, bases = adapted("fcca", trained=True), get_bases(adapted("random"))
    before = logits(model)
    model.add_adapter("other", FrozenCoreConfig(r=3, alpha=None, constructor="random", seed=1))
    set_bases(model, bases, adapter_name="other")
    get_bases(model)["model.layers.0.self_attn.q_proj.P"].zero_()
    assert torch.equal(logits(model), before)
    set_bases(model, bases, adapter_name="default", reset=True)
    assert torch.equal(logits(model), logits(tiny_qwen2()))
    assert model.peft_config["default"].calibration_tokens is None  # those of another calibration are not counted
    train_at_random(model)
    assert torch.equal(logits(model), logits(adapted("random", trained=True)))


# ------------------------------------------------------------------------------------------------- a saved basis


@pytest.fixture
def model(tmp_path: Path) -> PeftModel:
    """A calibrated adapter whose basis was saved, with trained cores."""
    model = adapted("fcca", alpha=6.0)
    save_basis(model, tmp_path / "basis")
    train_at_random(model)
    return model


@pytest.fixture
def saved(model: PeftModel, tmp_path: Path) -> Path:
    model.save_pretrained(str(tmp_path / "anna"))
    return tmp_path / "anna"


def on_the_basis(tmp_path: Path) -> PeftModel:
    return get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis=str(tmp_path / "basis"))).eval()


def test_a_saved_basis_holds_what_get_bases_gives_and_its_identity_is_of_its_content(
    model: PeftModel, tmp_path: Path
) -> None:
    basis, bases = load_basis(tmp_path / "basis"), get_bases(model)
    assert basis.tensors.keys() == bases.keys()
    assert all(torch.equal(basis.tensors[name], bases[name]) for name in bases)
    assert {layer.scale for layer in basis.layers.values()} == {2.0}
    assert basis.calibrated_on == f"{model.peft_config['default'].calibration_tokens} tokens"
    assert save_basis(adapted("fcca", alpha=6.0), tmp_path / "again") == basis.identity
    assert save_basis(adapted("fcca", alpha=3.0), tmp_path / "other_scale") != basis.identity
    assert save_basis(adapted("rawgrad", alpha=6.0), tmp_path / "other_basis") != basis.identity


def test_cores_alone_are_small(saved: Path) -> None:
    layers = len(cores_of(adapted("fcca")))
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(saved / WEIGHTS).items()}
    assert shapes == {f"frozencore_cores_{load_basis(saved.parent / 'basis').identity[:32]}": (layers * 9,)}
    assert sum(file.stat().st_size for file in saved.iterdir()) <= 4 * layers * 9 + 8192


def beside(_: PeftModel, saved: Path) -> PeftModel:
    return PeftModel.from_pretrained(tiny_qwen2(), str(saved))


def beside_in_low_memory(_: PeftModel, saved: Path) -> PeftModel:
    return PeftModel.from_pretrained(tiny_qwen2(), str(saved), low_cpu_mem_usage=True)


def in_the_model(model: PeftModel, saved: Path) -> PeftModel:
    shutil.rmtree(saved.parent / "basis")
    train_at_random(model, seed=1)
    model.load_adapter(str(saved), "anna")
    model.set_adapter("anna")
    assert cores_of(model)[0].frozencore_P["anna"] is cores_of(model)[0].frozencore_P["default"]
    return model


def far_away(saved: Path) -> str:
    return str(shutil.copytree(saved, saved.parent / "a" / "b" / "c" / "anna"))


def where_the_configuration_says(_: PeftModel, saved: Path) -> PeftModel:
    return PeftModel.from_pretrained(tiny_qwen2(), far_away(saved))


def where_the_caller_says(_: PeftModel, saved: Path) -> PeftModel:
    basis = shutil.move(saved.parent / "basis", saved.parent / "elsewhere")
    return PeftModel.from_pretrained(tiny_qwen2(), far_away(saved), basis=str(basis))


@pytest.mark.parametrize(
    "load", [beside, beside_in_low_memory, in_the_model, where_the_configuration_says, where_the_caller_says]
)
def test_loading_finds_the_basis(load: Callable[[PeftModel, Path], PeftModel], model: PeftModel, saved: Path) -> None:
    expected = logits(model)
    assert torch.equal(logits(load(model, saved).eval()), expected)


def test_without_its_basis_or_beside_another_one_an_adapter_is_refused(saved: Path, tmp_path: Path) -> None:
    identity = load_basis(tmp_path / "basis").identity
    shutil.rmtree(tmp_path / "basis")
    base = tiny_qwen2()
    with pytest.raises(ArtifactError, match=f"on the basis {identity[:12]}.*Get that basis folder"):
        PeftModel.from_pretrained(base, str(saved))
    assert [name for name, _ in base.named_modules()] == [name for name, _ in tiny_qwen2().named_modules()]
    save_basis(adapted("rawgrad", alpha=6.0), tmp_path / "basis")
    with pytest.raises(ArtifactError, match="is the basis"):
        PeftModel.from_pretrained(tiny_qwen2(), str(saved))


def test_a_new_adapter_takes_everything_from_the_basis(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    new, other = on_the_basis(tmp_path), adapted("random", alpha=6.0)
    set_bases(other, load_basis(tmp_path / "basis"))
    assert torch.equal(logits(new), logits(tiny_qwen2().eval()))
    for one in (new, other):
        assert all(torch.equal(get_bases(one)[name], X) for name, X in get_bases(model).items())
        swap_core(one, saved)
        assert torch.equal(logits(one), logits(model))
    new.train()(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize(
    "rebase",
    [
        lambda model: calibrate(model, BATCHES, progress=False, reset=True),
        lambda model: set_bases(model, get_bases(adapted("rawgrad")), reset=True),
        lambda model: set_peft_model_state_dict(model, get_peft_model_state_dict(adapted("rawgrad", alpha=6.0))),
    ],
    ids=["calibrate", "set_bases", "a state dict"],
)
def test_a_new_basis_has_no_name(rebase: Callable[[nn.Module], object], model: PeftModel, tmp_path: Path) -> None:
    rebase(model)
    model.save_pretrained(str(tmp_path / "own"))
    assert "basis_id" not in json.loads((tmp_path / "own" / CONFIG).read_text())
    assert len(factors_alone(load_file(tmp_path / "own" / WEIGHTS))) == 3 * len(cores_of(model))


def test_modules_to_save_stand_beside_the_cores(tmp_path: Path) -> None:
    model = adapted("fcca", modules_to_save=["lm_head"])
    save_basis(model, tmp_path / "basis")
    train_at_random(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    model.save_pretrained(str(tmp_path / "anna"))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "anna")).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_transformers_own_loading_is_refused_before_it_computes_wherever_a_row_is(saved: Path) -> None:
    model = tiny_qwen2()
    for name in ("first", "second"):
        model.load_adapter(str(saved), adapter_name=name)
    with pytest.raises(ArtifactError, match="were not loaded"):
        logits(model)
    swap_core(model, saved, adapter_name="first")  # this reads the cores alone
    for names in (["first", "second"], ["second", "first"]):
        refused = pytest.raises(ArtifactError, match="cores of the adapter 'second' were not loaded")
        with refused, adapter_of_each_row(model.eval(), names * 2):
            logits(model)
    model.set_adapter("first")
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(tiny_qwen2(), str(saved)).eval()))


# ---------------------------------------------------------------------------------------------------------- cores


def as_one_sees(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """A state dict, and what users make of it: rounded, averaged, subtracted."""
    yield state
    yield {key: value.bfloat16() for key, value in state.items()}
    yield {key: (value + value + value) / 3 for key, value in state.items()}
    yield {key: (value.bfloat16() * 3 + value.bfloat16() * 5) / 8 for key, value in state.items()}
    yield {key: 0.3 * value - 1.7 * value for key, value in state.items()}
    yield {key: 0 * value for key, value in state.items()}


@pytest.mark.parametrize("named", [True, False])
def test_cores_are_refused_on_another_basis(model: PeftModel, saved: Path, tmp_path: Path, named: bool) -> None:
    other = adapted("rawgrad", alpha=6.0)
    if named:
        save_basis(other, tmp_path / "other")
    bank, before = CoreBank(other, 2), {name: X.clone() for name, X in other.state_dict().items()}
    for state in (*as_one_sees(get_peft_model_state_dict(model)), load_file(saved / WEIGHTS)):
        for take in (swap_core, set_peft_model_state_dict, lambda _, state: bank.put("a", state)):
            with pytest.raises(ArtifactError, match="basis"):
                take(other, state)
    assert len(bank) == 0
    assert all(torch.equal(X, before[name]) for name, X in other.state_dict().items())


def test_cores_are_taken_on_their_own_basis(model: PeftModel, tmp_path: Path) -> None:
    state = get_peft_model_state_dict(model)
    same = on_the_basis(tmp_path)
    bank = CoreBank(same, 9)
    for i, one in enumerate(as_one_sees(state)):
        bank.put(str(i), one)
    zero = {layer: 0 * R for layer, R in bank.get("0").items()}
    for one in as_one_sees(state):
        set_peft_model_state_dict(same, one)
    for take in (swap_core, set_peft_model_state_dict):
        swap_core(same, zero)
        take(same, state)
        assert torch.equal(logits(same), logits(model))


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_a_state_dict_and_cores_by_layer_give_one_core_in_the_same_memory(named: bool, tmp_path: Path) -> None:
    model = adapted("fcca", alpha=5.0)
    if named:
        save_basis(model, tmp_path / "basis")
    train_at_random(model, seed=7)
    expected, bank = logits(model), CoreBank(model, 1)
    cores = {layer.name: layer.core("default").detach().clone() for layer in cores_of(model)}
    state = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    places = [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]
    model.save_pretrained(str(tmp_path / "saved"))
    for source in (state, tmp_path / "saved", cores):
        bank.put("a", source)
        assert all(torch.equal(core, cores[layer]) for layer, core in bank.get("a").items())
        ready = prepare_swap(model, source)
        train_at_random(model, seed=1)
        assert not torch.equal(logits(model), expected)
        ready.swap_in()
        assert torch.equal(logits(model), expected)
    assert places == [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]
