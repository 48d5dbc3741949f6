"""A basis taken out, put in, and saved for many adapters; its one id; cores swapped onto the basis they are of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from fixtures import few
from frozencore import (
    CONSTRUCTORS,
    Core,
    CoreBank,
    FrozenCoreConfig,
    basis_id,
    calibrate,
    get_basis,
    get_core,
    load_basis,
    prepare_swap,
    save_basis,
    set_basis,
    swap_core,
)
from frozencore.errors import ArtifactError
from tiny import BATCHES, adapted, all_equal, cores_of, factors_of, logits, same_tensors, tiny_qwen2, train_at_random

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "eva", "milora", "random"))
def test_a_basis_of_a_folder_makes_the_same_adapter(constructor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = adapted(constructor, dtype=dtype)
    get_basis(expected).write(tmp_path / "basis")
    model = adapted(constructor, dtype=dtype, calibrated=False)
    set_basis(model, load_basis(tmp_path / "basis"))
    assert all_equal(factors_of(model), factors_of(expected))
    model.train()(**BATCHES[0]).loss.backward()


def test_an_adapter_without_data_has_its_own_basis_beside_one_whose_basis_was_set() -> None:
    model, other = adapted("random"), get_basis(adapted("fcca"))
    built = factors_of(model)
    set_basis(model, other)
    model.add_adapter("own", FrozenCoreConfig(r=3, alpha=None, constructor="random"))
    assert get_basis(model, "own").id == basis_id(adapted("random"))
    assert not all_equal(factors_of(model), built)


def test_a_basis_is_a_copy_and_a_new_one_resets_its_own_core_alone() -> None:
    model, basis = adapted("fcca", trained=True), get_basis(adapted("random"))
    before = logits(model)
    model.add_adapter("other", FrozenCoreConfig(r=3, alpha=None, constructor="random", seed=1))
    set_basis(model, basis, adapter_name="other")
    get_basis(model).layers["model.layers.0.self_attn.q_proj"].P.zero_()
    assert torch.equal(logits(model), before)
    set_basis(model, basis, adapter_name="default", reset=True)
    assert torch.equal(logits(model), logits(tiny_qwen2()))
    assert model.peft_config["default"].calibration_tokens is None  # those of another calibration do not count
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


def test_a_saved_basis_is_what_get_basis_gives_and_its_id_is_of_p_q_scales_and_base_model(
    model: PeftModel, tmp_path: Path
) -> None:
    basis, held = load_basis(tmp_path / "basis"), get_basis(model)
    assert held.id == basis.id
    assert same_tensors(basis.tensors, held.tensors)
    assert set(basis.scales.values()) == {2.0}
    assert basis.calibrated_on == f"{model.peft_config['default'].calibration_tokens} tokens"
    assert save_basis(adapted("fcca", alpha=6.0), tmp_path / "again") == basis.id
    others = {
        "another scale": adapted("fcca", alpha=3.0),
        "other P and Q": adapted("random", alpha=6.0),
        "another base model": adapted("random", model=tiny_qwen2(seed=1), alpha=6.0),
    }
    assert len({basis.id, *map(basis_id, others.values())}) == 4


def test_cores_alone_are_small(saved: Path) -> None:
    layers = len(cores_of(adapted("fcca")))
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(saved / WEIGHTS).items()}
    assert shapes == {f"frozencore_core_{load_basis(saved.parent / 'basis').id}": (layers * 9,)}
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


def where_the_configuration_says_beside_a_damaged_one(_: PeftModel, saved: Path) -> PeftModel:
    far = Path(far_away(saved))
    (far.parent / "basis").mkdir()
    (far.parent / "basis" / "basis.json").write_text('{"format": 4}')
    return PeftModel.from_pretrained(tiny_qwen2(), str(far))


def where_the_caller_says(_: PeftModel, saved: Path) -> PeftModel:
    basis = shutil.move(saved.parent / "basis", saved.parent / "elsewhere")
    return PeftModel.from_pretrained(tiny_qwen2(), far_away(saved), basis=str(basis))


@pytest.mark.parametrize(
    "load",
    [
        beside,
        beside_in_low_memory,
        in_the_model,
        where_the_configuration_says,
        where_the_configuration_says_beside_a_damaged_one,
        where_the_caller_says,
    ],
)
def test_loading_finds_the_basis(load: Callable[[PeftModel, Path], PeftModel], model: PeftModel, saved: Path) -> None:
    expected = logits(model)
    assert torch.equal(logits(load(model, saved).eval()), expected)


def test_without_its_basis_or_beside_another_one_an_adapter_is_refused(saved: Path, tmp_path: Path) -> None:
    own = load_basis(tmp_path / "basis").id
    shutil.rmtree(tmp_path / "basis")
    base = tiny_qwen2()
    with pytest.raises(ArtifactError, match=f"on the basis {own}, which is not beside it.*Get that basis folder"):
        PeftModel.from_pretrained(base, str(saved))
    assert [name for name, _ in base.named_modules()] == [name for name, _ in tiny_qwen2().named_modules()]
    save_basis(adapted("rawgrad", alpha=6.0), tmp_path / "basis")
    with pytest.raises(ArtifactError, match=f"on the basis {own}, but .* is [0-9a-f]{{32}}"):
        PeftModel.from_pretrained(tiny_qwen2(), str(saved))


def test_a_new_adapter_takes_everything_from_the_basis(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    new, other = on_the_basis(tmp_path), adapted("random", alpha=6.0)
    set_basis(other, load_basis(tmp_path / "basis"))
    assert torch.equal(logits(new), logits(tiny_qwen2().eval()))
    for one in (new, other):
        assert basis_id(one) == basis_id(model) == get_basis(one).id
        swap_core(one, saved)
        assert torch.equal(logits(one), logits(model))
    new.train()(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize(
    "rebase",
    [
        lambda model: calibrate(model, BATCHES, progress=False, reset=True),
        lambda model: set_basis(model, get_basis(adapted("rawgrad", alpha=6.0)), reset=True),
        lambda model: set_peft_model_state_dict(model, get_peft_model_state_dict(adapted("rawgrad", alpha=6.0))),
    ],
    ids=["calibrate", "set_basis", "a state dict"],
)
def test_a_new_basis_has_no_folder_and_is_saved_beside_the_core(
    rebase: Callable[[nn.Module], object], model: PeftModel, tmp_path: Path
) -> None:
    rebase(model)
    model.save_pretrained(str(tmp_path / "own"))
    assert "basis" not in json.loads((tmp_path / "own" / CONFIG).read_text())
    assert len(load_file(tmp_path / "own" / WEIGHTS)) == 1 + 2 * len(cores_of(model))


def test_modules_to_save_stand_beside_the_cores(tmp_path: Path) -> None:
    model = adapted("fcca", modules_to_save=["lm_head"])
    save_basis(model, tmp_path / "basis")
    train_at_random(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    model.save_pretrained(str(tmp_path / "anna"))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "anna")).eval()
    assert torch.equal(logits(loaded), logits(model))


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
    assert same_tensors(other.state_dict(), before)


def test_cores_are_taken_on_their_own_basis(model: PeftModel, tmp_path: Path) -> None:
    state = get_peft_model_state_dict(model)
    same = on_the_basis(tmp_path)
    bank = CoreBank(same, 9)
    for i, one in enumerate(as_one_sees(state)):
        bank.put(str(i), one)
    zero = Core(basis_id(same), 0 * bank.get("0").values)
    for one in as_one_sees(state):
        set_peft_model_state_dict(same, one)
    for take in (swap_core, set_peft_model_state_dict):
        swap_core(same, zero)
        take(same, state)
        assert torch.equal(logits(same), logits(model))


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_a_state_dict_and_a_core_give_one_core_in_the_same_memory(named: bool, tmp_path: Path) -> None:
    model = adapted("fcca", alpha=5.0)
    if named:
        save_basis(model, tmp_path / "basis")
    train_at_random(model, seed=7)
    expected, bank = logits(model), CoreBank(model, 1)
    core = get_core(model)
    state = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    places = [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]
    model.save_pretrained(str(tmp_path / "saved"))
    for source in (state, tmp_path / "saved", core):
        bank.put("a", source)
        assert torch.equal(bank.get("a").values, core.values)
        ready = prepare_swap(model, source)
        train_at_random(model, seed=1)
        assert not torch.equal(logits(model), expected)
        ready.swap_in()
        assert torch.equal(logits(model), expected)
    assert places == [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]
