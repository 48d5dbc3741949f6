"""The bank of cores against adapters that are loaded alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

from adapted import BATCHES, adapted, logits, train_at_random
from frozencore import CoreBank, FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.mixed_batch import adapter_of_each_row
from frozencore.errors import ArtifactError, ConfigError
from tiny import tiny_qwen2

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
ROWS = ["a", None, "b", "a"]
Cores = dict[str, torch.Tensor]


def trained_cores(model: PeftModel, seed: int) -> Cores:
    """Cores as a tenant would train them; the model's own become these."""
    train_at_random(model, "default", seed=seed)
    return {name: layer.factors("default")[2].detach().clone() for name, layer in own_layers(model).items()}


def own_layers(model: PeftModel):  # type: ignore[no-untyped-def]
    return frozen_core_layers(model, "default")


def set_core(model: PeftModel, cores: Cores | None) -> None:
    with torch.no_grad():
        for name, layer in own_layers(model).items():
            R = layer.factors("default")[2]
            R.copy_(cores[name]) if cores else R.zero_()


def with_core(model: PeftModel, cores: Cores | None) -> torch.Tensor:
    """Logits of the whole batch with one core."""
    set_core(model, cores)
    return logits(model)


@pytest.fixture
def model() -> PeftModel:
    return adapted("fcca").eval()


@pytest.fixture
def tenants(model: PeftModel) -> dict[str, Cores]:
    return {name: trained_cores(model, seed) for seed, name in enumerate(("a", "b", "c"))}


def filled(model: PeftModel, tenants: dict[str, Cores], capacity: int = 4) -> CoreBank:
    bank = CoreBank(model, capacity)
    for name, cores in tenants.items():
        bank.put(name, cores)
    return bank


def test_each_row_is_its_tenants_own(model: PeftModel, tenants: dict[str, Cores]) -> None:
    bank = filled(model, tenants)
    with bank.rows(ROWS):
        mixed = logits(model)
    for row, name in enumerate(ROWS):
        alone = with_core(model, tenants[name] if name else None)
        torch.testing.assert_close(mixed[row], alone[row], rtol=1e-5, atol=1e-5)


def test_after_the_batch_the_active_adapter_is_back(model: PeftModel, tenants: dict[str, Cores]) -> None:
    before = logits(model)
    with filled(model, tenants).rows(ROWS):
        pass
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_and_beams_keep_the_rows_apart(num_beams: int, model: PeftModel, tenants: dict[str, Cores]) -> None:
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": num_beams}
    bank = filled(model, tenants)
    with bank.rows(ROWS, num_beams=num_beams):
        mixed = model.generate(**PROMPT, **options)
    for name in ("a", "b"):
        with_core(model, tenants[name])
        rows = [row for row, own in enumerate(ROWS) if own == name]
        assert torch.equal(model.generate(**PROMPT, **options)[rows], mixed[rows])


def test_a_saved_adapter_a_state_dict_and_cores_by_layer_are_the_same(
    model: PeftModel, tenants: dict[str, Cores], tmp_path: Path
) -> None:
    from peft import get_peft_model_state_dict

    with_core(model, tenants["b"])
    model.save_pretrained(str(tmp_path))
    bank = CoreBank(model, 3)
    for name, source in (("folder", tmp_path), ("state", get_peft_model_state_dict(model)), ("cores", tenants["b"])):
        bank.put(name, source)
    for name in bank:
        assert all(torch.equal(core, tenants["b"][layer]) for layer, core in bank.get(name).items())


def test_a_core_is_replaced_evicted_and_its_slot_used_again(model: PeftModel, tenants: dict[str, Cores]) -> None:
    bank = filled(model, {"a": tenants["a"], "b": tenants["b"]}, capacity=2)
    bank.put("a", tenants["c"])
    assert all(torch.equal(core, tenants["c"][layer]) for layer, core in bank.get("a").items())
    bank.evict("b")
    assert ("b" in bank, len(bank)) == (False, 1)
    bank.put("d", tenants["b"])
    assert sorted(bank) == ["a", "d"]


def cores_of_rows(layer: FrozenCoreLayer) -> Tensor:
    assert layer.row_cores is not None
    return layer.row_cores.R


def test_batches_of_all_sizes_are_at_the_place_of_the_largest(model: PeftModel, tenants: dict[str, Cores]) -> None:
    bank = filled(model, tenants)
    before = {name: cores.data_ptr() for name, cores in bank._cores.items()}
    with bank.rows(ROWS):
        first = [cores_of_rows(layer).data_ptr() for layer in own_layers(model).values()]
    bank.evict("b")
    bank.put("e", tenants["a"])
    for names in (["e", "c", None, None], ["a"], ["c", "e"]):
        with bank.rows(names):
            assert [cores_of_rows(layer).data_ptr() for layer in own_layers(model).values()] == first
            held = {cores_of_rows(layer).untyped_storage().nbytes() for layer in own_layers(model).values()}
    assert held == {len(ROWS) * 3 * 3 * 4}
    assert {name: cores.data_ptr() for name, cores in bank._cores.items()} == before


def test_a_batch_inside_another_has_its_own_rows_and_the_outer_one_goes_on(
    model: PeftModel, tenants: dict[str, Cores]
) -> None:
    bank, second = filled(model, tenants), filled(model, tenants)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random", target_modules=["q_proj"], seed=5))
    model.set_adapter("default")
    with bank.rows(ROWS):
        outer = logits(model)
    with bank.rows(["b"] * 4):
        inner = logits(model)
    with torch.no_grad():
        named = model(**PROMPT, adapter_names=["other"] * 4).logits
    own = logits(model)
    for same in (bank, second):
        with bank.rows(ROWS):
            with same.rows(["b"] * 4):
                assert torch.equal(logits(model), inner)
            with same.rows(["b"]), pytest.raises(ConfigError, match="no core 'd'"), same.rows(["d"]):
                pass
            assert torch.equal(logits(model), outer)
            with torch.no_grad():
                assert torch.equal(model(**PROMPT, adapter_names=["other"] * 4).logits, named)
            assert torch.equal(logits(model), outer)
    with adapter_of_each_row(model.base_model, ["other", "default", "other", "__base__"]):
        between = logits(model)
        with bank.rows(["b"] * 4):
            assert torch.equal(logits(model), inner)
        assert torch.equal(logits(model), between)
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("modules", [None, ["lm_head"]])
def test_rows_of_a_bank_are_the_base_models_where_only_another_adapter_is(modules: list[str] | None) -> None:
    model = adapted("random", target_modules=["q_proj"]).eval()
    bank = filled(model, {"a": trained_cores(model, 1)})
    with bank.rows(["a", None, "a", None]):
        expected = logits(model)
    options = {"r": 3, "constructor": "random", "target_modules": ["q_proj", "v_proj"]}
    model.add_adapter("wide", FrozenCoreConfig(**options, modules_to_save=modules))
    train_at_random(model, "wide", seed=3)
    for copy in (p for name, p in model.named_parameters() if "modules_to_save.wide" in name):
        copy.data.add_(1)
    model.set_adapter("wide")
    wide = logits(model)
    assert not torch.equal(wide, expected)
    with bank.rows(["a", None, "a", None]):
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), wide)


def test_a_batch_that_runs_keeps_the_cores_it_began_with(model: PeftModel, tenants: dict[str, Cores]) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=2)
    with bank.rows(["a"] * 4):
        bank.put("a", tenants["b"])
        bank.put("c", tenants["c"])
        bank.evict("c")
        inside = logits(model)
    assert torch.equal(inside, _rows(model, bank, tenants["a"]))
    with bank.rows(["a"] * 4):
        after = logits(model)
    assert torch.equal(after, _rows(model, bank, tenants["b"]))
    bank.put("c", tenants["c"])


def _rows(model: PeftModel, bank: CoreBank, cores: Cores) -> torch.Tensor:
    fresh = CoreBank(model, 1)
    fresh.put("x", cores)
    with fresh.rows(["x"] * 4):
        return logits(model)


def test_threads_put_and_evict_while_batches_run(model: PeftModel, tenants: dict[str, Cores]) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=6)
    wanted = _rows(model, bank, tenants["a"])
    failures: list[BaseException] = []

    def change(number: int) -> None:
        try:
            for _ in range(40):
                bank.put(f"other-{number}", tenants["bc"[number % 2]])
                bank.evict(f"other-{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with bank.rows(["a"] * 4):
            assert torch.equal(logits(model), wanted)
    for thread in threads:
        thread.join()
    assert not failures
    assert list(bank) == ["a"]


def test_cores_in_16_bits_take_half_the_memory_and_multiply_in_float32(
    model: PeftModel, tenants: dict[str, Cores]
) -> None:
    full, half = CoreBank(model, 8), CoreBank(model, 8, dtype=torch.bfloat16)
    sizes = [sum(values.nbytes for values in bank._values.values()) for bank in (full, half)]
    assert sizes[0] == 2 * sizes[1] == 9 * 4 * sum(len(R) ** 2 for R in tenants["a"].values())
    half.put("a", tenants["a"])
    rounded = {name: R.bfloat16().float() for name, R in tenants["a"].items()}
    with half.rows(["a"] * 4):
        torch.testing.assert_close(logits(model), with_core(model, rounded), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("as_a_user")
def test_what_cannot_be_put_is_one_line_and_leaves_the_bank_as_it_was(
    model: PeftModel, tenants: dict[str, Cores], tmp_path: Path
) -> None:
    bank = filled(model, {"a": tenants["a"]}, capacity=1)
    other = adapted("random", trained=True)
    other.save_pretrained(str(tmp_path / "other"))
    narrow = {name: R[:1, :1] for name, R in tenants["a"].items()}
    sick = {name: R * float("nan") for name, R in tenants["a"].items()}
    some = dict(list(tenants["a"].items())[:-1])
    for source, message in (
        (tmp_path / "other", "basis only"), (narrow, "shape"), (sick, "NaN"), (some, "on one side only"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=message):
            bank.put("a", source)
    for name, source, message in ((None, tenants["b"], "None is the base model"), ("b", None, "a NoneType came")):
        with pytest.raises(ConfigError, match=message):
            bank.put(name, source)
    with pytest.raises(ConfigError, match="full: it holds 1 of 1"):
        bank.put("b", tenants["b"])
    with pytest.raises(ConfigError, match="no core 'b'"), bank.rows(["b"]):
        pass
    with pytest.raises(ConfigError, match="for each of its rows, but none"), bank.rows([]):
        pass
    assert list(bank) == ["a"]
    assert all(torch.equal(core, tenants["a"][layer]) for layer, core in bank.get("a").items())


def test_a_bank_needs_a_basis_and_room() -> None:
    with pytest.raises(ConfigError, match="at least one core"):
        CoreBank(adapted("random"), 0)
    with pytest.raises(ConfigError, match="none called 'other'"):
        CoreBank(adapted("random"), 1, adapter_name="other")
    with pytest.raises(ConfigError, match="trains other modules too"):
        CoreBank(adapted("random", modules_to_save=["lm_head"]), 1)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_rows_of_an_encoder_decoder_model_generate_as_alone(num_beams: int) -> None:
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    torch.manual_seed(0)
    base = T5ForConditionalGeneration(config).eval()
    torch.nn.init.normal_(base.lm_head.weight)
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random", target_modules=["q", "v"])).eval()
    tenants = {name: trained_cores(model, seed) for seed, name in enumerate("ab")}
    bank = filled(model, tenants)
    options = {"max_new_tokens": 5, "num_beams": num_beams, "do_sample": False}
    with torch.no_grad(), bank.rows(ROWS, num_beams=num_beams):
        together = model.generate(**PROMPT, **options)
    for row, name in enumerate(ROWS):
        set_core(model, tenants.get(name or ""))
        alone = model.generate(**{key: X[row : row + 1] for key, X in PROMPT.items()}, **options)
        assert together[row, : alone.shape[1]].tolist() == alone[0].tolist()


def test_rows_of_a_quantised_base_are_their_tenants_own(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    tiny_qwen2(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    in_four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=in_four_bits)
    model = adapted("random", model=base, dtype=None)
    tenants = {name: trained_cores(model, seed) for seed, name in enumerate("ab")}
    with filled(model, tenants).rows(ROWS):
        together = logits(model)
    for row, name in enumerate(ROWS):
        alone = with_core(model, tenants.get(name or ""))
        torch.testing.assert_close(together[row], alone[row], rtol=1e-4, atol=1e-4)
