"""A basis as a folder of its own, and adapters of cores alone beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from adapted import BATCHES, adapted, cores_of, logits, train_at_random
from frozencore import (
    CoreBank,
    FrozenCoreConfig,
    calibrate,
    export_lora,
    get_bases,
    load_basis,
    save_basis,
    set_bases,
    swap_core,
)
from frozencore.adapter.export.base_model import export_merged
from frozencore.adapter.folders import pack_adapter, read_adapter, unpack_adapter
from frozencore.adapter.mixed_batch import adapter_of_each_row
from frozencore.adapter.saved.basis import write_basis
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from tiny import tiny_qwen2

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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


def test_a_saved_basis_holds_what_get_bases_gives(model: PeftModel, tmp_path: Path) -> None:
    basis, bases = load_basis(tmp_path / "basis"), get_bases(model)
    assert basis.tensors.keys() == bases.keys()
    assert all(torch.equal(basis.tensors[name], bases[name]) for name in bases)
    assert set(basis.scales.values()) == {2.0}
    assert basis.options["constructor"] == "fcca" if "constructor" in basis.options else True
    assert basis.calibrated_on == f"{model.peft_config['default'].calibration_tokens} tokens"


def test_the_identity_is_that_of_the_content(model: PeftModel, tmp_path: Path) -> None:
    here = load_basis(tmp_path / "basis").identity
    again = adapted("fcca", alpha=6.0)
    assert save_basis(again, tmp_path / "again") == here
    assert save_basis(adapted("fcca", alpha=3.0), tmp_path / "other_scale") != here
    assert save_basis(adapted("rawgrad", alpha=6.0), tmp_path / "other_basis") != here


def test_cores_alone_are_small(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    layers = len(cores_of(adapted("fcca")))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"frozencore_cores": (layers * 9,), "frozencore_basis": (32,)}
    assert sum(file.stat().st_size for file in saved.iterdir()) <= 4 * layers * 9 + 8192


@pytest.mark.parametrize("low_memory", [False, True])
def test_loading_finds_the_basis_beside_the_folder(model: PeftModel, saved: Path, low_memory: bool) -> None:
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(saved), low_cpu_mem_usage=low_memory).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_loading_finds_the_basis_in_the_model(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    expected = logits(model)
    shutil.rmtree(tmp_path / "basis")
    train_at_random(model, seed=1)
    model.load_adapter(str(saved), "anna")
    model.set_adapter("anna")
    assert torch.equal(logits(model), expected)
    first = cores_of(model)[0]
    assert first.frozencore_P["anna"] is first.frozencore_P["default"]


def test_loading_finds_the_basis_where_the_configuration_says(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    far = tmp_path / "a" / "b" / "c" / "anna"
    shutil.copytree(saved, far)
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(far)).eval()), logits(model))


def test_loading_finds_the_basis_where_the_caller_says(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    far = tmp_path / "a" / "b" / "c" / "anna"
    shutil.copytree(saved, far)
    shutil.move(tmp_path / "basis", tmp_path / "elsewhere")
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(far), basis=str(tmp_path / "elsewhere"))
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_the_ranks_that_a_rank_budget_chose_load_as_a_rank_pattern(tmp_path: Path) -> None:
    """An earlier version chose ranks for a budget, and wrote both: here into an adapter, a basis and cores on it."""
    own = adapted("fcca", rank_pattern={"q_proj": 0, "v_proj": 3, "o_proj": 1}, trained=True)
    expected = logits(own)
    own.save_pretrained(tmp_path / "whole")
    save_basis(own, tmp_path / "new")
    new = load_basis(tmp_path / "new")
    options = {**new.options, "rank_budget": 28}
    write_basis(
        tmp_path / "basis", new.tensors, scales=new.scales, options=options, calibrated_on=None, base=new.base,
        base_model=None,
    )  # fmt: skip
    pack_adapter(tmp_path / "whole", tmp_path / "basis", tmp_path / "cores")
    for name in ("whole", "cores"):
        values = json.loads((tmp_path / name / CONFIG).read_text())
        (tmp_path / name / CONFIG).write_text(json.dumps({**values, "rank_budget": 28}))
        loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / name)).eval()
        assert torch.equal(logits(loaded), expected)
        assert len(cores_of(loaded)) == len(cores_of(own)) == 6  # rank 0 leaves a layer as it is
    assert "rank_budget" not in loaded.peft_config["default"].to_dict()
    bank = CoreBank(get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis=str(tmp_path / "basis"))).eval(), 2)
    bank.put("anna", tmp_path / "cores")
    prompt = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad(), bank.rows(["anna"] * len(prompt["input_ids"])):
        torch.testing.assert_close(bank.model(**prompt).logits, own(**prompt).logits, atol=1e-4, rtol=1e-4)


def test_without_the_basis_one_line_says_what_to_get(saved: Path, tmp_path: Path) -> None:
    identity = load_basis(tmp_path / "basis").identity
    shutil.rmtree(tmp_path / "basis")
    base = tiny_qwen2()
    before = {name for name, _ in base.named_modules()}
    with pytest.raises(ArtifactError, match=f"on the basis {identity[:12]}.*Get that basis folder"):
        PeftModel.from_pretrained(base, str(saved))
    assert {name for name, _ in base.named_modules()} == before


def test_another_basis_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "basis")
    save_basis(adapted("rawgrad", alpha=6.0), tmp_path / "basis")
    with pytest.raises(ArtifactError, match="is the basis"):
        PeftModel.from_pretrained(tiny_qwen2(), str(saved))


def test_another_base_model_is_refused_unless_allowed(saved: Path) -> None:
    with pytest.raises(ArtifactError, match="another base model"):
        PeftModel.from_pretrained(tiny_qwen2(seed=1), str(saved))
    PeftModel.from_pretrained(tiny_qwen2(seed=1), str(saved), allow_other_base=True)


def test_cores_at_another_scale_than_the_basis_are_refused_by_every_reader(saved: Path) -> None:
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(saved))
    values = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps({**values, "alpha": 30.0}))
    for read in (
        lambda: PeftModel.from_pretrained(tiny_qwen2(), str(saved)),
        lambda: loaded.load_adapter(str(saved), adapter_name="second"),
        lambda: swap_core(loaded, saved),
        lambda: CoreBank(loaded, 1).put("anna", saved),
    ):
        with pytest.raises(ArtifactError, match="scale 10"):
            read()


def test_a_new_adapter_takes_everything_from_the_basis(model: PeftModel, tmp_path: Path) -> None:
    new = get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis=str(tmp_path / "basis"))).eval()
    assert torch.equal(logits(new), logits(tiny_qwen2().eval()))
    assert all(torch.equal(get_bases(new)[name], X) for name, X in get_bases(model).items())
    set_peft_model_state_dict(new, get_peft_model_state_dict(model))
    assert torch.equal(logits(new), logits(model))
    new.train()(**BATCHES[0]).loss.backward()


def test_options_that_contradict_the_basis_are_refused(model: PeftModel, tmp_path: Path) -> None:
    for options, name in (({"r": 4}, "r"), ({"constructor": "eva"}, "constructor"), ({"alpha": 1.0}, "alpha")):
        with pytest.raises(ConfigError, match=f"Leave {name} out"):
            FrozenCoreConfig(basis=str(tmp_path / "basis"), **options)


def test_set_bases_takes_a_saved_basis_and_its_name(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    other = adapted("random", alpha=6.0)
    set_bases(other, load_basis(tmp_path / "basis"))
    swap_core(other, saved)
    assert torch.equal(logits(other), logits(model))
    with pytest.raises(ArtifactError, match="scale"):
        set_bases(adapted("random"), load_basis(tmp_path / "basis"))
    with pytest.raises(CalibrationError, match="reset=True"):
        set_bases(other, load_basis(tmp_path / "basis"))


@pytest.mark.parametrize(
    "rebase",
    [
        lambda model: calibrate(model, BATCHES, progress=False, reset=True),
        lambda model: set_bases(model, get_bases(adapted("rawgrad")), reset=True),
    ],
    ids=["calibrate", "set_bases"],
)
def test_a_new_basis_has_no_name(rebase: Callable[[nn.Module], object], model: PeftModel, tmp_path: Path) -> None:
    rebase(model)
    model.save_pretrained(str(tmp_path / "own"))
    assert "basis_id" not in json.loads((tmp_path / "own" / CONFIG).read_text())
    assert len(load_file(tmp_path / "own" / WEIGHTS)) == 3 * len(cores_of(model))


def as_one_sees(state: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """A state dict, and what users make of it: rounded, averaged, subtracted."""
    yield state
    yield {key: value.bfloat16() for key, value in state.items()}
    yield {key: (value + value + value) / 3 for key, value in state.items()}
    yield {key: (value.bfloat16() * 3 + value.bfloat16() * 5) / 8 for key, value in state.items()}
    yield {key: 0.3 * value - 1.7 * value for key, value in state.items()}


@pytest.mark.parametrize("named", [True, False])
def test_cores_are_refused_on_another_basis(model: PeftModel, saved: Path, tmp_path: Path, named: bool) -> None:
    other = adapted("rawgrad", alpha=6.0)
    if named:
        save_basis(other, tmp_path / "other")
    bank, before = CoreBank(other, 2), {name: X.clone() for name, X in other.state_dict().items()}
    for state in (*as_one_sees(get_peft_model_state_dict(model)), load_file(saved / WEIGHTS)):
        for take in (swap_core, set_peft_model_state_dict, lambda _, state: bank.put("a", state)):
            with pytest.raises(ArtifactError, match="basis") as refused:
                take(other, state)
            assert "\n" not in str(refused.value)
    assert len(bank) == 0
    assert all(torch.equal(X, before[name]) for name, X in other.state_dict().items())


def test_cores_are_taken_on_their_own_basis_with_and_without_its_mark(
    model: PeftModel, saved: Path, tmp_path: Path
) -> None:
    state = get_peft_model_state_dict(model)
    same = get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis=str(tmp_path / "basis"))).eval()
    bank = CoreBank(same, 9)
    for i, one in enumerate(as_one_sees(state)):
        bank.put(str(i), one)
    zero = {layer: 0 * R for layer, R in bank.get("0").items()}
    for one in as_one_sees(state):
        set_peft_model_state_dict(same, one)
    earlier = {"frozencore_cores": state["frozencore_cores"]}  # as files of earlier versions
    for take in (swap_core, set_peft_model_state_dict):
        swap_core(same, zero)
        take(same, earlier)
        assert torch.equal(logits(same), logits(model))
    save_file(earlier, saved / WEIGHTS)
    config = json.loads((saved / CONFIG).read_text())
    del config["seal"]["weights_sha256"]
    (saved / CONFIG).write_text(json.dumps(config))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(saved)).eval()
    assert torch.equal(logits(loaded), logits(model))
    swap_core(same, saved)


def test_factors_of_another_basis_take_the_name_away(model: PeftModel, tmp_path: Path) -> None:
    set_peft_model_state_dict(model, get_peft_model_state_dict(adapted("rawgrad", alpha=6.0)))
    assert model.peft_config["default"].basis_id is None


def test_packed_and_unpacked_is_the_same_folder(tmp_path: Path) -> None:
    model = adapted("fcca")
    train_at_random(model)
    model.save_pretrained(str(tmp_path / "whole"))
    save_basis(model, tmp_path / "basis")
    pack_adapter(tmp_path / "whole", tmp_path / "basis", tmp_path / "packed")
    unpack_adapter(tmp_path / "packed", tmp_path / "again")
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    model.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "packed" / WEIGHTS).read_bytes() == (tmp_path / "saved" / WEIGHTS).read_bytes()
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "packed")).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_a_basis_that_was_not_saved_is_written_beside_the_cores_and_shared(tmp_path: Path) -> None:
    model = adapted("fcca")
    for name in ("anna", "ben"):
        train_at_random(model)
        model.save_pretrained(str(tmp_path / name))
        pack_adapter(tmp_path / name, None, tmp_path / "shared" / name)
        unpack_adapter(tmp_path / "shared" / name, tmp_path / f"{name}-again")
        for file in (WEIGHTS, CONFIG):
            assert (tmp_path / f"{name}-again" / file).read_bytes() == (tmp_path / name / file).read_bytes()
    assert load_basis(tmp_path / "shared" / "basis").identity == save_basis(model, tmp_path / "by hand")
    adapted("rawgrad", trained=True).save_pretrained(str(tmp_path / "other"))
    with pytest.raises(ArtifactError, match="not those of"):
        pack_adapter(tmp_path / "other", None, tmp_path / "shared" / "other")
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "shared" / "ben")).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_cores_in_16_bits_are_half_the_size(model: PeftModel, tmp_path: Path) -> None:
    unpack_adapter(saved_as(model, tmp_path / "named"), tmp_path / "whole")
    pack_adapter(tmp_path / "whole", tmp_path / "basis", tmp_path / "half", dtype=torch.bfloat16)
    flat = load_file(tmp_path / "half" / WEIGHTS)["frozencore_cores"]
    assert flat.dtype == torch.bfloat16
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "half"))
    R = cores_of(loaded)[0].factors("default")[2]
    assert R.dtype == torch.float32
    assert torch.equal(R, cores_of(model)[0].factors("default")[2].bfloat16().float())


def saved_as(model: PeftModel, folder: Path) -> Path:
    model.save_pretrained(str(folder))
    return folder


def test_another_basis_does_not_pack(tmp_path: Path) -> None:
    model = adapted("fcca", trained=True)
    model.save_pretrained(str(tmp_path / "whole"))
    save_basis(adapted("rawgrad"), tmp_path / "basis")
    with pytest.raises(ArtifactError, match="not those of"):
        pack_adapter(tmp_path / "whole", tmp_path / "basis", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_readers_of_folders_read_cores_alone(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    _, factors = read_adapter(saved)
    for layer in cores_of(model):
        P, Q, R = layer.factors("default")
        own = factors[layer.name]
        assert all(torch.equal(X, Y) for X, Y in zip((own.P, own.Q, own.R), (P, Q, R), strict=True))
    export_lora(saved, tmp_path / "lora")
    assert torch.allclose(
        logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "lora"))), logits(model), atol=1e-4
    )


def test_a_merged_export_reads_cores_alone(tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model = adapted("fcca", model=AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    save_basis(model, tmp_path / "basis")
    train_at_random(model)
    model.save_pretrained(str(tmp_path / "anna"))
    export_merged(tmp_path / "anna", tmp_path / "merged", base=tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(model), atol=1e-4)


def test_a_bank_reads_cores_alone(model: PeftModel, saved: Path, tmp_path: Path) -> None:
    bank = CoreBank(model, 2)
    bank.put("anna", saved)
    for layer in cores_of(model):
        assert torch.equal(bank.get("anna")[layer.name], layer.factors("default")[2])


def test_modules_to_save_stand_beside_the_cores(tmp_path: Path) -> None:
    model = adapted("fcca", modules_to_save=["lm_head"])
    save_basis(model, tmp_path / "basis")
    train_at_random(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    model.save_pretrained(str(tmp_path / "anna"))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "anna")).eval()
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ArtifactError, match="Only cores can be swapped"):
        swap_core(model, tmp_path / "anna")


def test_transformers_own_loading_is_refused_before_it_computes(saved: Path, tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.load_adapter(str(saved))
    with pytest.raises(ArtifactError, match="were not loaded"):
        logits(model)
    swap_core(model, saved)  # this reads the cores alone
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(tiny_qwen2(), str(saved)).eval()))


def test_a_row_of_an_adapter_without_its_core_is_refused_in_every_place_of_a_batch(saved: Path) -> None:
    model = tiny_qwen2()
    for name in ("first", "second"):
        model.load_adapter(str(saved), adapter_name=name)
    swap_core(model, saved, adapter_name="first")
    for names in (["first", "second"], ["second", "first"]):
        refused = pytest.raises(ArtifactError, match="cores of the adapter 'second' were not loaded")
        with refused, adapter_of_each_row(model.eval(), names * 2):
            logits(model)
