"""Adapters on one basis: one P and one Q in memory, whatever sets, casts, saves, loads or deletes them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_model, save_model
from torch import nn

from adapted import BATCHES, adapted, cores_of, logits, train_at_random
from frozencore import FrozenCoreConfig, calibrate, get_bases, set_bases
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.saved.state import UncalibratedWarning
from frozencore.adapter.shared_factors import SharedFactors
from tiny import tiny_qwen2


def on_one_basis(*names: str) -> PeftModel:
    """Adapters of trained cores on the bases of the first."""
    model = adapted("fcca")
    first = model.peft_config["default"]
    bases = get_bases(model)
    for seed, name in enumerate(names):
        model.add_adapter(name, copy.deepcopy(first))
        set_bases(model, bases, adapter_name=name)
        train_at_random(model, name, seed=seed)
    model.delete_adapter("default")
    model.set_adapter(names[0])
    return model.eval()


def holders(model: nn.Module, *names: str) -> list[set[int]]:
    """The storage of P, and of Q, under each name, layer by layer."""
    pointers = []
    for layer in frozen_core_layers(model, names[0]).values():
        for side in (layer.frozencore_P, layer.frozencore_Q):
            pointers.append({side[name].data_ptr() for name in names})
    return pointers


@pytest.mark.parametrize("low_memory", [False, True])
def test_adapters_that_are_cast_and_loaded_share_too_and_no_factor_is_rounded(low_memory: bool, tmp_path: Path) -> None:
    model = on_one_basis("a", "b", "c").to(torch.bfloat16)
    for name in "abc":  # the whole model was cast, the cores too
        model.base_model._cast_adapter_dtype(name)
    train_at_random(model, "b", seed=4)
    assert all(len(held) == 1 for held in holders(model, "a", "b", "c"))
    model.save_pretrained(str(tmp_path))
    base = tiny_qwen2().to(torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "a"), adapter_name="a", low_cpu_mem_usage=low_memory)
    loaded.load_adapter(str(tmp_path / "b"), adapter_name="b", low_cpu_mem_usage=low_memory)
    assert all(len(held) == 1 for held in holders(loaded, "a", "b"))
    for name in ("a", "b"):
        for layer, other in zip(cores_of(model, name), cores_of(loaded, name), strict=True):
            for mine, theirs in zip(layer.factors(name), other.factors(name), strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)


def test_a_new_basis_for_one_leaves_the_other_its_own() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    others = get_bases(adapted("random"))
    set_bases(model, others, adapter_name="a", reset=True)
    assert torch.equal(logits(model), before)
    assert all(len(held) == 2 for held in holders(model, "a", "b"))
    assert all(torch.equal(got, others[name]) for name, got in get_bases(model, "a").items())


def test_loading_a_state_into_one_leaves_the_other_its_own() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    state = model.state_dict()
    changed = {key: torch.randn_like(value) for key, value in state.items() if "frozencore_P.a" in key}
    model.load_state_dict(changed, strict=False)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in changed.items())


def test_deleting_one_leaves_the_other() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    model.delete_adapter("a")
    assert torch.equal(logits(model), before)


def with_reference(model: PeftModel, *more: str) -> PeftModel:
    """Another adapter of the same configuration, as TRL adds its reference."""
    for name in ("ref", *more):
        model.add_adapter(name, model.peft_config["default"])
        train_at_random(model, name, seed=len(name))
    return model


def same_outputs(one: PeftModel, other: PeftModel, *names: str) -> bool:
    found = []
    for model in (one, other):
        for name in names:
            model.set_adapter(name)
            found.append(logits(model.eval()))
    return all(map(torch.equal, found[: len(names)], found[len(names) :]))


def test_an_adapter_beside_one_of_the_same_configuration_gets_its_basis() -> None:
    model = with_reference(adapted("fcca", trained=True))
    assert all(len(held) == 1 for held in holders(model, "default", "ref"))
    for other in ({"damping": 0.5}, {"r": 2}, {"alpha": 8.0}, {"constructor": "rawgrad"}):
        options = {"r": 3, "constructor": "fcca", "alpha": None, "coordinates": "qr", **other}
        model.add_adapter("another", FrozenCoreConfig(**options))
        assert not any(layer.frozencore_P["another"].any() for layer in cores_of(model, "another"))
        model.delete_adapter("another")


def test_adapters_added_before_calibration_get_the_basis_too_and_a_second_calibration_leaves_it() -> None:
    model = with_reference(adapted("fcca", calibrated=False))
    calibrate(model, BATCHES, adapter_name="default", progress=False)
    assert all(len(held) == 1 for held in holders(model, "default", "ref"))
    before = get_bases(model, "default")
    calibrate(model, BATCHES[:1], adapter_name="ref", reset=True, progress=False)
    assert all(len(held) == 2 for held in holders(model, "default", "ref"))
    assert all(torch.equal(basis, before[name]) for name, basis in get_bases(model, "default").items())


def test_a_state_dict_holds_each_basis_once_and_the_adapter_is_saved_whole(tmp_path: Path) -> None:
    model = with_reference(adapted("fcca", trained=True))
    assert not any(".ref" in name for name in model.state_dict() if "frozencore_R" not in name)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "ref"), adapter_name="ref")
    assert same_outputs(loaded, model, "ref")


def fresh() -> PeftModel:
    return with_reference(adapted("fcca", calibrated=False))


def on_two_bases() -> PeftModel:
    model = adapted("fcca")
    model.add_adapter("ref", FrozenCoreConfig(r=3, constructor="rawgrad", alpha=None, coordinates="qr"))
    calibrate(model, BATCHES, adapter_name="ref", progress=False)
    return model


def restored_by_accelerate(model: PeftModel, other: PeftModel, folder: Path) -> None:
    for each, transfer in ((model, Accelerator.save_state), (other, Accelerator.load_state)):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(each)
        transfer(accelerator, str(folder / "state"))


LOADERS: dict[str, Callable[[PeftModel, PeftModel, Path], object]] = {
    "state dict": lambda model, other, _: other.load_state_dict(model.state_dict()),
    "assigned": lambda model, other, _: other.load_state_dict(model.state_dict(), assign=True),
    "safetensors": lambda model, other, folder: (
        save_model(model, str(folder / "model")), load_model(other, str(folder / "model"), strict=True)
    ),
    "accelerate": restored_by_accelerate,
}  # fmt: skip


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("into", [fresh, on_two_bases])
def test_a_shared_basis_comes_back_by_every_loader(way: str, into: Callable[[], PeftModel], tmp_path: Path) -> None:
    model, other = with_reference(adapted("fcca", trained=True)), into()
    LOADERS[way](model, other, tmp_path)
    assert same_outputs(model, other, "default", "ref")
    assert all(len(held) == 1 for held in holders(other, "default", "ref"))


def test_a_state_dict_with_a_basis_for_each_adapter_loads_too() -> None:
    model = on_two_bases()
    train_at_random(model, "ref")
    other = fresh()
    other.load_state_dict(model.state_dict())
    assert same_outputs(model, other, "default", "ref")


def test_a_state_that_cannot_be_loaded_leaves_a_shared_basis_as_it_was() -> None:
    shared = SharedFactors()
    shared["one"], shared["two"] = torch.ones(3, 2), torch.ones(3, 2)
    shared.share("two")
    shared.make_room(["one"], ["one"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        shared.load_state_dict({"one": torch.ones(4, 2)}, strict=False)
    assert all(torch.equal(shared[name], torch.ones(3, 2)) for name in ("one", "two"))


def test_a_basis_that_cannot_be_known_is_missing_and_never_guessed() -> None:
    model = with_reference(adapted("fcca", trained=True), "third")
    set_bases(model, get_bases(adapted("random")), adapter_name="third", reset=True)
    other = with_reference(adapted("fcca", calibrated=False), "third")
    with pytest.raises(RuntimeError, match="Missing key.*frozencore_P.ref"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_core_on_a_basis_of_zeros_says_so_once_in_evaluation(compiled: bool) -> None:
    cores = {name: p for name, p in adapted("fcca", trained=True).named_parameters() if p.requires_grad}
    model = adapted("fcca", calibrated=False)
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(input_ids=BATCHES[0]["input_ids"])
        model.load_state_dict(cores, strict=False)
        assert not [one for one in caught if issubclass(one.category, UncalibratedWarning)]
        for _ in range(2):
            call(input_ids=BATCHES[0]["input_ids"])
    (said,) = [str(one.message) for one in caught if issubclass(one.category, UncalibratedWarning)]
    assert "'default' has a trained core and no basis" in said
