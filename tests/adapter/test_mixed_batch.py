"""Mixed batches, by PEFT's adapter names or from a bank: each row is what its own core gives alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
)

from families import make
from frozencore import (
    Core,
    CoreBank,
    FrozenCoreConfig,
    frozen_core_layers,
    get_basis,
    get_core,
    prepare_swap,
    set_basis,
)
from frozencore.adapter.bank import PackedSlots
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.adapter.loaded_adapter import LoadedAdapter
from frozencore.adapter.per_row import adapter_of_each_row
from frozencore.errors import ArtifactError, ConfigError
from tiny import BATCHES, adapted, cores_of, logits, on_one_basis, on_two_bases, tiny_gpt2, tiny_qwen2, train_at_random

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
ROWS = ["a", "__base__", "b", "a"]


def trained_core(model: PeftModel, seed: int) -> Core:
    """A core as a tenant would train it; the model's becomes this one."""
    train_at_random(model, seed=seed)
    return get_core(model)


def own_layers(model: nn.Module) -> dict[str, FrozenCoreLinear]:
    return frozen_core_layers(model, "default")


def filled(model: PeftModel, tenants: dict[str, Core], capacity: int = 4) -> CoreBank:
    bank = CoreBank(model, capacity)
    for name, core in tenants.items():
        bank.put(name, core)
    return bank


def set_core(model: PeftModel, core: Core | None) -> None:
    zero = get_core(model)
    prepare_swap(model, Core(zero.basis_id, 0 * zero.values) if core is None else core).swap_in()


@dataclass
class Rows:
    """A model with the adapters or tenants a and b.

    Attributes:
        mixed: Calls the model, or its ``generate``, with the rows of ``ROWS``.
        wear: The model with one of them alone.
    """

    model: PeftModel
    mixed: Callable[..., Any]
    wear: Callable[[str], AbstractContextManager[object]]


def by_name(model: PeftModel) -> Rows:
    def wear(name: str) -> AbstractContextManager[object]:
        if name == "__base__":
            return model.disable_adapter()
        model.set_adapter(name)
        return nullcontext()

    return Rows(model, lambda call, **options: call(**PROMPT, **options, adapter_names=ROWS), wear)


def by_bank(model: PeftModel) -> Rows:
    tenants = {name: trained_core(model, seed) for seed, name in enumerate("ab")}
    bank = filled(model, tenants)

    def mixed(call: Callable[..., Any], **options: Any) -> Any:
        rows = [None if name == "__base__" else name for name in ROWS]
        with bank.rows(rows, num_beams=options.get("num_beams", 1)):
            return call(**PROMPT, **options)

    return Rows(model, mixed, lambda name: nullcontext(set_core(model, tenants.get(name))))


def in_four_bits(folder: Path) -> PeftModel:
    pytest.importorskip("bitsandbytes")
    tiny_qwen2(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return adapted("random", model=AutoModelForCausalLM.from_pretrained(folder, quantization_config=config), dtype=None)


MODELS: dict[str, Callable[[Path], Rows]] = {
    "names, two bases": lambda _: by_name(on_two_bases(tiny_qwen2(), {"target_modules": ["q_proj", "up_proj"]})),
    "names, one basis": lambda _: by_name(on_one_basis("a", "b")),
    "names, conv1d": lambda _: by_name(on_two_bases(tiny_gpt2(), {}, target_modules=["c_attn", "c_proj"])),
    "names, encoder-decoder": lambda _: by_name(on_two_bases(make("t5"), {}, target_modules=["q", "v"])),
    "bank": lambda _: by_bank(adapted("fcca")),
    "bank, in four bits": lambda folder: by_bank(in_four_bits(folder)),
    "bank, encoder-decoder": lambda _: by_bank(
        get_peft_model(make("t5"), FrozenCoreConfig(r=3, constructor="random", target_modules=["q", "v"])).eval()
    ),
}
GENERATING = {name: made for name, made in MODELS.items() if name not in ("names, conv1d", "bank, in four bits")}


@pytest.mark.parametrize("kind", [name for name in MODELS if "encoder" not in name])
def test_each_row_is_its_own_adapters(kind: str, tmp_path: Path) -> None:
    found = MODELS[kind](tmp_path)
    with torch.no_grad():
        mixed = found.mixed(found.model).logits
    for row, name in enumerate(ROWS):
        with found.wear(name):
            torch.testing.assert_close(mixed[row], logits(found.model)[row], rtol=1e-4, atol=1e-4)
    with found.wear("a"):  # the next batch is plain again
        assert not torch.equal(logits(found.model)[1], mixed[1])


@pytest.mark.parametrize(("num_beams", "num_texts"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("kind", GENERATING)
def test_generation_and_beams_keep_the_rows_apart(kind: str, num_beams: int, num_texts: int, tmp_path: Path) -> None:
    found = GENERATING[kind](tmp_path)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": num_beams}
    options["num_return_sequences"] = num_texts
    mixed, alone = found.mixed(found.model.generate, **options), {}
    for name in dict.fromkeys(ROWS):
        with found.wear(name):
            alone[name] = found.model.generate(**PROMPT, **options)
    assert not torch.equal(alone["a"], alone["b"])
    for row, name in enumerate(ROWS):
        own = slice(num_texts * row, num_texts * (row + 1))
        assert torch.equal(mixed[own], alone[name][own])


def test_rows_of_the_base_model_alone_are_the_base_models_bits() -> None:
    model = on_one_basis("a", "b")
    with model.disable_adapter():
        base = logits(model)
    assert torch.equal(model(**PROMPT, adapter_names=["__base__"] * 4).logits, base)


def test_a_mixed_batch_trains_each_core_on_its_own_rows() -> None:
    model = on_one_basis("a", "b").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("frozencore_R" in name)
    labels = PROMPT["input_ids"].masked_fill(PROMPT["attention_mask"] == 0, -100)

    def gradients(rows: list[int], names: list[str]) -> dict[str, Tensor]:
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


def shared() -> PeftModel:
    return on_one_basis("a", "b")


def merged(model: PeftModel) -> PeftModel:
    model.merge_adapter(["a"])  # a merged update would be added to every row
    return model


REFUSED: dict[str, tuple[Callable[[], PeftModel], list[str], str]] = {
    "unknown": (shared, ["a", "aa", "b", "b"], "non-existing adapter.*aa"),
    "another size": (shared, ["a"] * 3, "Length of"),
    "another size, the base model alone": (shared, ["__base__"] * 3, "Length of"),
    "merged": (lambda: merged(shared()), ROWS, "merged adapters, please call `unmerge_adapter` first"),
    "unknown, two bases": (lambda: MODELS["names, two bases"](Path()).model, ["aa"] * 4, "non-existing adapter.*aa"),
    "another size, two bases": (lambda: MODELS["names, two bases"](Path()).model, ["b"] * 3, "Length of"),
    "merged, two bases": (lambda: merged(MODELS["names, two bases"](Path()).model), ROWS, "merged adapters, please"),
    "training on two bases": (lambda: MODELS["names, two bases"](Path()).model.train(), ROWS, "training mode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_mixed_batch_is_refused_and_leaves_nothing_behind(case: str) -> None:
    made, names, message = REFUSED[case]
    model = made()
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        model(**PROMPT, adapter_names=names)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model), before)


def test_rows_of_an_adapter_without_trained_tokens_have_the_base_models() -> None:
    model = adapted("random", trained=True, trainable_token_indices=[1, 2, 3])
    model.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"].data += 1
    model.add_adapter("b", FrozenCoreConfig(r=2, constructor="random"))
    train_at_random(model, "b", seed=3)
    alone = {}
    for name in ("default", "b"):
        model.set_adapter(name)
        alone[name] = logits(model)
    with torch.no_grad():
        mixed = model(**PROMPT, adapter_names=["b", "default", "b", "default"]).logits
    torch.testing.assert_close(mixed[::2], alone["b"][::2])
    torch.testing.assert_close(mixed[1::2], alone["default"][1::2])


# ------------------------------------------------------------------------------------------------------- the bank


@pytest.fixture
def model() -> PeftModel:
    return adapted("fcca")


@pytest.fixture
def tenants(model: PeftModel) -> dict[str, Core]:
    return {name: trained_core(model, seed) for seed, name in enumerate("abc")}


def test_a_core_is_replaced_evicted_and_its_slot_used_again(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank = filled(model, {"a": tenants["a"], "b": tenants["b"]}, capacity=2)
    bank.put("a", tenants["c"])
    assert torch.equal(bank.get("a").values, tenants["c"].values)
    bank.evict("b")
    assert ("b" in bank, len(bank)) == (False, 1)
    bank.put("d", tenants["b"])
    assert sorted(bank) == ["a", "d"]


def cores_of_rows(layer: FrozenCoreLinear) -> Tensor:
    assert layer.per_row is not None
    return layer.per_row.parts[0].R


def test_batches_of_all_sizes_are_at_the_place_of_the_largest(model: PeftModel, tenants: dict[str, Core]) -> None:
    """So that CUDA graphs stay valid."""
    bank = filled(model, tenants)
    with bank.rows(["a", None, "b", "a"]):
        first = [cores_of_rows(layer).data_ptr() for layer in own_layers(model).values()]
    bank.evict("b")
    bank.put("e", tenants["a"])
    for names in (["e", "c", None, None], ["a"], ["c", "e"]):
        with bank.rows(names):
            assert [cores_of_rows(layer).data_ptr() for layer in own_layers(model).values()] == first
            held = {cores_of_rows(layer).untyped_storage().nbytes() for layer in own_layers(model).values()}
    assert held == {4 * 3 * 3 * 4}


def test_a_batch_inside_another_has_its_own_rows_and_the_outer_one_goes_on(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    rows = ["a", None, "b", "a"]
    bank, second = filled(model, tenants), filled(model, tenants)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random", target_modules=["q_proj"], seed=5))
    model.set_adapter("default")
    with bank.rows(rows):
        outer = logits(model)
    with bank.rows(["b"] * 4):
        inner = logits(model)
    with torch.no_grad():
        named_rows = model(**PROMPT, adapter_names=["other"] * 4).logits
    own = logits(model)
    for same in (bank, second):
        with bank.rows(rows):
            with same.rows(["b"] * 4):
                assert torch.equal(logits(model), inner)
            with same.rows(["b"]), pytest.raises(ConfigError, match="no core 'd'"), same.rows(["d"]):
                pass
            assert torch.equal(logits(model), outer)
            with torch.no_grad():
                assert torch.equal(model(**PROMPT, adapter_names=["other"] * 4).logits, named_rows)
            assert torch.equal(logits(model), outer)
    with adapter_of_each_row(model.base_model, ["other", "default", "other", "__base__"]):
        between = logits(model)
        with bank.rows(["b"] * 4):
            assert torch.equal(logits(model), inner)
        assert torch.equal(logits(model), between)
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("modules", [None, ["lm_head"]])
def test_rows_of_a_bank_are_the_base_models_where_only_another_adapter_is(modules: list[str] | None) -> None:
    model = adapted("random", target_modules=["q_proj"])
    bank = filled(model, {"a": trained_core(model, 1)})
    with bank.rows(["a", None, "a", None]):
        expected = logits(model)
    options = {"r": 3, "constructor": "random", "target_modules": ["q_proj", "v_proj"]}
    model.add_adapter("wide", FrozenCoreConfig(**options, modules_to_save=modules))
    train_at_random(model, "wide", seed=3)
    for copied in (p for name, p in model.named_parameters() if "modules_to_save.wide" in name):
        copied.data.add_(1)
    model.set_adapter("wide")
    wide = logits(model)
    assert not torch.equal(wide, expected)
    with bank.rows(["a", None, "a", None]):
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), wide)


@pytest.mark.parametrize("added_again", [False, True])
def test_cores_of_a_deleted_adapter_are_refused_also_where_its_name_has_another_scale(added_again: bool) -> None:
    model = on_one_basis("first", "other")
    core = get_core(model, "other")
    bank, ready = CoreBank(model, 1, adapter_name="other"), prepare_swap(model, core, adapter_name="other")
    bank.put("x", core)
    config, basis = model.peft_config["other"], get_basis(model, "other")
    model.delete_adapter("other")
    if added_again:
        model.add_adapter("other", dataclasses.replace(config, alpha=99.0))
        set_basis(model, basis.layers, adapter_name="other")
    for use in (ready.swap_in, lambda: bank.put("x", core), lambda: bank.rows(["x"]).__enter__()):
        with pytest.raises(ArtifactError, match="but the adapter 'other' now has"):
            use()


def rows_of(model: PeftModel, core: Core) -> Tensor:
    with filled(model, {"x": core}).rows(["x"] * 4):
        return logits(model)


def test_a_batch_that_runs_keeps_the_cores_it_began_with(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=2)
    with bank.rows(["a"] * 4):
        bank.put("a", tenants["b"])
        bank.put("c", tenants["c"])
        bank.evict("c")
        inside = logits(model)
    assert torch.equal(inside, rows_of(model, tenants["a"]))
    with bank.rows(["a"] * 4):
        assert torch.equal(logits(model), rows_of(model, tenants["b"]))


def test_threads_put_and_evict_while_batches_run(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=6)
    wanted = rows_of(model, tenants["a"])

    def change(number: int) -> None:
        for _ in range(40):
            bank.put(f"other-{number}", tenants["bc"[number % 2]])
            bank.evict(f"other-{number}")

    with ThreadPoolExecutor(4) as others:
        changes = others.map(change, range(4))
        for _ in range(5):
            with bank.rows(["a"] * 4):
                assert torch.equal(logits(model), wanted)
        list(changes)  # raises what a thread raised
    assert list(bank) == ["a"]


def test_cores_in_16_bits_take_half_the_memory_and_multiply_in_float32(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    full, half = CoreBank(model, 8), CoreBank(model, 8, dtype=torch.bfloat16)
    sizes = [sum(values.nbytes for values in bank.blocks.values()) for bank in (full, half)]
    assert sizes[0] == 2 * sizes[1] == 9 * 4 * len(tenants["a"].values)
    half.put("a", tenants["a"])
    with half.rows(["a"] * 4):
        found = logits(model)
    set_core(model, Core(tenants["a"].basis_id, tenants["a"].values.bfloat16()))
    torch.testing.assert_close(found, logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("as_a_user")
def test_what_cannot_be_put_is_one_line_and_leaves_the_bank_as_it_was(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=1)
    for call, kind, message in (
        (lambda: bank.put(None, tenants["b"]), ConfigError, "None was given, which is the base model"),
        (lambda: bank.put("b", tenants["b"]), ConfigError, "full: it holds 1 of 1"),
        (lambda: bank.put("a", Core(tenants["a"].basis_id, tenants["a"].values * torch.nan)), ArtifactError, "NaN"),
        (lambda: bank.rows(["b"]).__enter__(), ConfigError, "no core 'b'"),
        (lambda: CoreBank(model, 1, adapter_name="other"), ConfigError, "no frozen-core adapter 'other'"),
        (lambda: CoreBank(adapted("random", modules_to_save=["lm_head"]), 1), ConfigError, "trains other modules too"),
    ):
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert list(bank) == ["a"]
    assert torch.equal(bank.get("a").values, tenants["a"].values)


def test_a_bank_that_was_made_on_another_device_is_one_line(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank = filled(model, tenants)
    bank.blocks = {torch.device("meta"): block for block in bank.blocks.values()}
    with pytest.raises(ConfigError, match="the model is on cpu now. Move the model first"), bank.rows(["a"]):
        pass


@pytest.mark.parametrize("bits", [2, 4])  # at 2 bits the second layer begins within a byte of the file
def test_a_core_of_few_bits_goes_to_the_device_as_a_whole(
    model: PeftModel, tenants: dict[str, Core], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = PackedSlots(1, {name: R.to("meta") for name, R in LoadedAdapter.of(model).cores.items()}, bits)
    copied: list[Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda _, sources: copied.extend(sources))
    slots.fill(0, tenants["a"])
    assert len(copied) == 2 * len(slots.ranks)
    assert all(X.is_meta for X in copied)


def test_a_core_that_a_bank_refuses_takes_no_slot(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank, core = CoreBank(model, 1, bits=4), tenants["a"]
    with pytest.raises(ConfigError, match="with 32 bits"):
        bank.put("a", Core(core.basis_id, core.values * 1e9))
    bank.put("a", core)
    assert list(bank) == ["a"]
    with bank.rows([]):  # a batch without rows
        pass
    with pytest.raises(ConfigError, match="one core at least, but capacity=-1"):
        CoreBank(model, -1)


def test_a_compiled_model_serves_batches_of_other_sizes_without_a_graph_for_each(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    torch._dynamo.reset()
    counter, bank = CompileCounter(), filled(model, tenants)
    compiled = torch.compile(model, backend=counter)
    for size in (1, 2, 3, 4):
        with torch.no_grad(), bank.rows(["a"] * size):
            compiled(**{name: tensor[:size] for name, tensor in PROMPT.items()})
    assert counter.frame_count == 2  # of a fixed size, and of any


def test_two_banks_of_one_model_in_two_threads_do_not_mix_their_rows(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    banks = {name: filled(model, {"x": tenants[name]}) for name in "ab"}
    expected = {name: rows_of(model, tenants[name]) for name in "ab"}

    def run(name: str) -> list[bool]:
        found = []
        for _ in range(15):
            with banks[name].rows(["x"] * 4):
                found.append(torch.equal(logits(model), expected[name]))
        return found

    with ThreadPoolExecutor(2) as threads:
        assert all(chain(*threads.map(run, "ab")))


def test_a_plain_pass_of_another_thread_is_refused_meanwhile(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank, plain, expected = filled(model, tenants), logits(model), rows_of(model, tenants["a"])

    def of_the_base() -> Tensor:
        with bank.rows([None] * 4):
            return logits(model)

    with ThreadPoolExecutor(2) as others:
        with bank.rows(["a"] * 4):
            waits = others.submit(of_the_base)
            with pytest.raises(ConfigError, match="but another one called layer"):
                others.submit(logits, model).result()
            assert torch.equal(logits(model), expected)
        assert torch.equal(waits.result(), logits(tiny_qwen2()))
        assert torch.equal(others.submit(logits, model).result(), plain)


def test_a_batch_of_an_asyncio_task_is_no_other_tasks(model: PeftModel, tenants: dict[str, Core]) -> None:
    bank, plain, expected = filled(model, tenants), logits(model), rows_of(model, tenants["a"])

    async def answer(tenant: str | None) -> list[Tensor]:
        found = []
        with nullcontext() if tenant is None else bank.rows([tenant] * 4):
            for _ in range(3):
                found.append(logits(model))
                await asyncio.sleep(0)
        return found

    async def together() -> list[Any]:
        return await asyncio.gather(answer("a"), answer("b"), answer(None), return_exceptions=True)

    mine, *others = asyncio.run(together())
    assert all(torch.equal(one, expected) for one in mine)
    assert all(isinstance(one, ConfigError) and "one asyncio task" in str(one) for one in others)
    assert torch.equal(logits(model), plain)
    with bank.rows(["a"] * 4):  # a task of its own inside
        (one,) = asyncio.run(asyncio.wait_for(answer("a"), None))[:1]
        assert torch.equal(one, expected)


def test_generators_whose_batches_overlap_are_told_and_leave_no_rows(
    model: PeftModel, tenants: dict[str, Core]
) -> None:
    bank, plain = filled(model, tenants), logits(model)

    def answers(tenant: str) -> Iterator[Tensor]:
        with bank.rows([tenant] * 4):
            yield logits(model)

    a, b = answers("a"), answers("b")
    next(a), next(b)
    for generator in (a, b):
        with pytest.raises(ConfigError, match="these two overlapped"):
            next(generator)
    assert torch.equal(logits(model), plain)
    assert torch.equal(next(answers("a")), rows_of(model, tenants["a"]))


def test_a_block_that_autograd_computes_again_in_a_thread_of_its_own_has_its_batchs_rows() -> None:
    """As on a GPU."""
    gradients = []
    for in_a_thread in (False, True):
        model = on_one_basis("a", "b").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        core = cores_of(model, "a")[0].core("a").requires_grad_()
        with ThreadPoolExecutor(1) as other, adapter_of_each_row(model, ROWS):
            loss = model(**BATCHES[0]).loss
            other.submit(loss.backward).result() if in_a_thread else loss.backward()
        gradients.append(core.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_bank_of_few_bits_made_in_inference_mode_is_filled_outside(
    model: PeftModel, tenants: dict[str, Core], made_inside: bool
) -> None:
    with torch.inference_mode(made_inside):
        bank = CoreBank(model, 4, bits=4)
    for inside in (False, True):
        with torch.inference_mode(inside):
            bank.put("x", tenants["a"])
    assert list(bank) == ["x"]


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_bank_works_in_and_after_inference_mode(
    model: PeftModel, tenants: dict[str, Core], made_inside: bool
) -> None:
    expected = [rows_of(model, tenants[name]) for name in "ab"]
    with torch.inference_mode(made_inside):
        bank = CoreBank(model, 4)
    for inside in (True, False, True):
        with torch.inference_mode(inside), torch.no_grad():
            bank.put("x", tenants["a"])
            for names in (["x"] * 4, [None, "x", "x", "x"]):
                with bank.rows(names):
                    torch.testing.assert_close(logits(model)[1:], expected[0][1:], rtol=1e-5, atol=1e-5)
            bank.put("x", tenants["b"])
            with bank.rows(["x"] * 4):
                assert torch.equal(logits(model), expected[1])
