"""Adapters on one basis: one P and one Q in memory, and rows of a batch through cores of their own."""

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
from transformers import Trainer, TrainingArguments

from adapted import BATCHES, EXAMPLES, adapted, cores_of, logits, train_at_random
from frozencore import FrozenCoreConfig, calibrate, get_bases, set_bases
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.saved.state import UncalibratedWarning
from frozencore.adapter.shared_factors import SharedFactors
from tiny import batch_of, tiny_qwen2

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
ROWS = ["a", "__base__", "b", "a"]


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


def test_adapters_on_one_basis_hold_one_tensor_a_side() -> None:
    assert all(len(held) == 1 for held in holders(on_one_basis("a", "b", "c"), "a", "b", "c"))


@pytest.mark.parametrize("low_memory", [False, True])
def test_adapters_that_were_loaded_share_too(low_memory: bool, tmp_path: Path) -> None:
    model = on_one_basis("a", "b")
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(
        tiny_qwen2(), str(tmp_path / "a"), adapter_name="a", low_cpu_mem_usage=low_memory
    )
    loaded.load_adapter(str(tmp_path / "b"), adapter_name="b", low_cpu_mem_usage=low_memory)
    assert all(len(held) == 1 for held in holders(loaded, "a", "b"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name in ("a", "b"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded.eval()), logits(model))


def test_moving_and_casting_keeps_them_one() -> None:
    model = on_one_basis("a", "b").to(torch.float64)
    assert all(len(held) == 1 for held in holders(model, "a", "b"))


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


def alone(model: PeftModel, name: str) -> torch.Tensor:
    if name == "__base__":
        with model.disable_adapter():
            return logits(model)
    model.set_adapter(name)
    return logits(model)


def test_each_row_goes_through_its_own_core() -> None:
    model = on_one_basis("a", "b")
    mixed = model(**PROMPT, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        torch.testing.assert_close(mixed[row], alone(model, name)[row], rtol=1e-5, atol=1e-5)


def test_rows_of_the_base_model_alone_are_the_base_models_bits() -> None:
    model = on_one_basis("a", "b")
    mixed = model(**PROMPT, adapter_names=["__base__"] * 4).logits
    assert torch.equal(mixed, alone(model, "__base__"))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_keeps_the_rows_apart(num_beams: int) -> None:
    model = on_one_basis("a", "b")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": num_beams}
    mixed = model.generate(**PROMPT, adapter_names=ROWS, **options)
    for name in ("a", "b"):
        model.set_adapter(name)
        rows = [row for row, own in enumerate(ROWS) if own == name]
        assert torch.equal(model.generate(**PROMPT, **options)[rows], mixed[rows])


def test_a_mixed_batch_trains_each_core_on_its_own_rows() -> None:
    model = on_one_basis("a", "b").train()
    for parameter in model.parameters():
        parameter.requires_grad_("frozencore_R" in "".join(n for n, p in model.named_parameters() if p is parameter))
    labels = PROMPT["input_ids"].masked_fill(PROMPT["attention_mask"] == 0, -100)

    def gradients(rows: list[int], names: list[str]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**{key: value[rows] for key, value in PROMPT.items()}, adapter_names=names).logits
        loss = nn.functional.cross_entropy(
            output[:, :-1].flatten(0, 1), labels[rows][:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    together = gradients([0, 1, 2, 3], ROWS)
    for name, rows in (("a", [0, 3]), ("b", [2])):
        for key, gradient in gradients(rows, [name] * len(rows)).items():
            if f"frozencore_R.{name}." in key:
                torch.testing.assert_close(together[key], gradient, rtol=1e-4, atol=1e-6)


def test_a_merged_adapter_refuses_rows_of_their_own() -> None:
    model = on_one_basis("a", "b")
    model.merge_adapter(["a"])
    with pytest.raises(ValueError, match="merged adapters, please call `unmerge_adapter` first"):
        model(**PROMPT, adapter_names=ROWS)
    model.unmerge_adapter()
    model(**PROMPT, adapter_names=ROWS)


def test_a_batch_of_another_size_is_refused_and_nothing_stays() -> None:
    model = on_one_basis("a", "b")
    before = logits(model)
    with pytest.raises(ValueError, match="Length of"):
        model(**PROMPT, adapter_names=["a"] * 3)
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


LOADERS: dict[str, Callable[[PeftModel, PeftModel, Path], object]] = {
    "state dict": lambda model, other, _: other.load_state_dict(model.state_dict()),
    "assigned": lambda model, other, _: other.load_state_dict(model.state_dict(), assign=True),
    "safetensors": lambda model, other, folder: (
        save_model(model, str(folder / "model")), load_model(other, str(folder / "model"), strict=True)
    ),
    "accelerate": lambda model, other, folder: restored_by_accelerate(model, other, folder),
}  # fmt: skip


def restored_by_accelerate(model: PeftModel, other: PeftModel, folder: Path) -> None:
    for each in (model, other):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(each)
        accelerator.save_state(str(folder / "state")) if each is model else accelerator.load_state(
            str(folder / "state")
        )


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


def test_a_trainer_saves_a_module_that_holds_two_adapters_on_one_basis(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model = with_reference(adapted("fcca", model=tiny_qwen2(tie_word_embeddings=False)))
            model.set_adapter("default")
            self.model, self.head = model, nn.Linear(40, 1)

        def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.head(self.model(**inputs).logits).square().mean()}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False,
    )  # fmt: skip
    Trainer(Wrapped(), arguments, train_dataset=EXAMPLES, data_collator=batch_of).train()
    load_model(restored := Wrapped(), str(tmp_path / "checkpoint-1" / "model.safetensors"))
    assert all(len(held) == 1 for held in holders(restored, "default", "ref"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_core_on_a_basis_of_zeros_says_so_once_in_evaluation(compiled: bool) -> None:
    cores = {name: p for name, p in adapted("fcca", trained=True).named_parameters() if p.requires_grad}
    model = adapted("fcca", calibrated=False)
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(input_ids=PROMPT["input_ids"])
        model.load_state_dict(cores, strict=False)
        assert not [one for one in caught if issubclass(one.category, UncalibratedWarning)]
        for _ in range(2):
            call(input_ids=PROMPT["input_ids"])
    (said,) = [str(one.message) for one in caught if issubclass(one.category, UncalibratedWarning)]
    assert "'default' has a trained core and no basis" in said
