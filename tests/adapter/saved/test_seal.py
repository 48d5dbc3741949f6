"""A damaged, changed or foreign adapter meets one line, on every way in; a sound one is the same bytes each time."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adapted import adapted, cores_of, logits, train_at_random
from frozencore import FrozenCoreConfig, export_lora, save_basis, swap_core
from frozencore.adapter.export.base_model import export_merged
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.saved.basis import differing_layer, record_base, sample_weight
from frozencore.adapter.saved.state import require_finite
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.tune.evaluation.adapters import BaseWithAdapter
from tiny import tiny_qwen2

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and a trained adapter that names it."""
    folder = tmp_path_factory.mktemp("made")
    tiny_qwen2().save_pretrained(folder / "base")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        adapted("random", model=model, trained=True, coordinates="qr", task_type="CAUSAL_LM").save_pretrained(
            str(folder / "adapter")
        )
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def saved(made: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained adapter that names its base model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapter = Path(shutil.copytree(made / "adapter", tmp_path / "adapter"))
    config = (adapter / CONFIG).read_text()
    (adapter / CONFIG).write_text(config.replace(str(made / "base"), str(base)))
    return adapter


def loaded_beside(folder: Path) -> None:
    model = adapted("lora_xs")
    model.load_adapter(str(folder), "second")


def swapped(folder: Path) -> None:
    swap_core(adapted("random", trained=True), folder)


WAYS_IN: dict[str, Callable[[Path], object]] = {
    "PeftModel.from_pretrained": lambda folder: PeftModel.from_pretrained(tiny_qwen2(), str(folder)),
    "model.load_adapter": loaded_beside,
    "AutoPeftModel": lambda folder: AutoPeftModelForCausalLM.from_pretrained(str(folder)),
    "read_adapter": read_adapter,
    "export_lora": lambda folder: export_lora(folder, folder.parent / "lora"),
    "export_merged": lambda folder: export_merged(folder, folder.parent / "merged", base=folder.parent / "base"),
    "swap_core": swapped,
    "evaluate": lambda folder: BaseWithAdapter(tiny_qwen2()).with_adapter(folder),
}
OURS = ("read_adapter", "export_lora", "export_merged", "swap_core", "evaluate")


def edit_config(folder: Path, **values: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(content | values))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors as someone who does not know of the seal, or takes it out."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    edit_config(folder, seal=None)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def first(tensors: dict[str, Tensor], part: str) -> str:
    return next(key for key in tensors if f"frozencore_{part}" in key)


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def claim_terabytes(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


def leave_a_pickle(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "opened"),)

    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))


def link_to_itself(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def link_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("elsewhere")


def put_a_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def climb_out(tensors: dict[str, Tensor]) -> None:
    for part in "PQR":
        key = first(tensors, part)
        tensors["base_model.model.../../etc/passwd" + key[key.index(".frozencore") :]] = tensors.pop(key)


def put_another_basis(folder: Path) -> None:
    """Orthonormal too, and said to be as it was saved but for the hash of the whole file."""
    tensors = load_file(folder / WEIGHTS)
    key = first(tensors, "P")
    save_file(tensors | {key: tensors[key].flip(0)}, folder / WEIGHTS, metadata={"format": "pt"})
    seal = json.loads((folder / CONFIG).read_text())["seal"]
    edit_config(folder, seal=seal | {"weights_sha256": None})


def write_half(folder: Path) -> None:
    """A newer adapter's weights are there, its configuration is not yet."""
    before = (folder / CONFIG).read_bytes()
    adapted("random", trained=True, seed=3, task_type="CAUSAL_LM").save_pretrained(str(folder))
    (folder / CONFIG).write_bytes(before)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "is damaged"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "is damaged"),
    "garbage": (lambda f: (f / WEIGHTS).write_bytes(bytes(range(256)) * 40), "is damaged"),
    "a flipped bit": (flip_a_bit, "is not the file that was saved"),
    "a header that claims terabytes": (claim_terabytes, "is damaged"),
    "a pickle": (leave_a_pickle, "never opened"),
    "a link to itself": (link_to_itself, f"has no {WEIGHTS}"),
    "a link to nothing": (link_to_nothing, f"has no {WEIGHTS}"),
    "a pipe": (put_a_pipe, f"has no {WEIGHTS}"),
    "written while read": (write_half, "just being written"),
    "a newer format": (lambda f: edit_config(f, seal={"format": 99}), "has format 99"),
    "a malformed seal": (lambda f: edit_config(f, seal=[1]), "seal .* is malformed"),
    "a rank budget that was never spent": (lambda f: edit_config(f, rank_budget=12, rank_pattern={}), "no ranks yet"),
    "a value of a wrong type": (lambda f: edit_config(f, alpha_pattern=7), "wrong type|names to numbers"),
    "NaN": (lambda f: edit_tensors(f, lambda t: t[first(t, "R")].fill_(torch.nan)), "holds NaN or Inf"),
    "Inf": (lambda f: edit_tensors(f, lambda t: t[first(t, "Q")][0].fill_(torch.inf)), "holds NaN or Inf"),
    "P not orthonormal": (lambda f: edit_tensors(f, lambda t: t[first(t, "P")].mul_(1.02)), "orthonormal"),
    "Q not orthonormal": (lambda f: edit_tensors(f, lambda t: t[first(t, "Q")][:, 1].zero_()), "orthonormal"),
    "another basis under the cores": (put_another_basis, "bases in .* are not those that were saved"),
    "no core": (lambda f: edit_tensors(f, lambda t: t.pop(first(t, "R"))), "where P, Q and R are needed"),
    "a vector": (lambda f: edit_tensors(f, lambda t: t.update({first(t, "P"): torch.ones(3)})), "must hold floats"),
    "names with ../": (lambda f: edit_tensors(f, climb_out), "named like a module"),
}
READ_BY_PEFT_BEFORE_US: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated JSON": (lambda f: (f / CONFIG).write_text((f / CONFIG).read_text()[:40]), "is damaged"),
    "nested JSON": (lambda f: (f / CONFIG).write_text("[" * 100_000), "is damaged"),
    "no object": (lambda f: (f / CONFIG).write_text("[1]"), "no JSON object"),
    "unknown type": (lambda f: edit_config(f, peft_type="OF_TOMORROW"), "OF_TOMORROW"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
}


def refuse(folder: Path, load: Callable[[Path], object], message: str) -> None:
    with pytest.raises(FrozenCoreError, match=f"(?s){message}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "opened").exists()


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_way_in_refuses_every_fault_in_one_line(fault: str, way: str, saved: Path) -> None:
    inject, message = FAULTS[fault]
    inject(saved)
    refuse(saved, WAYS_IN[way], message)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("fault", READ_BY_PEFT_BEFORE_US)
def test_our_own_ways_in_refuse_what_peft_reads_before_us(fault: str, way: str, saved: Path) -> None:
    inject, message = READ_BY_PEFT_BEFORE_US[fault]
    inject(saved)
    refuse(saved, WAYS_IN[way], message)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("fault", FAULTS | READ_BY_PEFT_BEFORE_US)
def test_on_the_command_line_every_fault_is_one_line_and_an_earlier_export_stays(
    fault: str, command: Callable[..., tuple[int, str, str]], base: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject, message = (FAULTS | READ_BY_PEFT_BEFORE_US)[fault]
    out = saved.parent / "out"
    over = [saved, "--base", base, "--out", out, "--overwrite"]
    assert command("export", *over)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    inject(saved)
    for words in (["inspect", saved], ["export", *over], ["export", "--to", "merged", *over]):
        status, _, errors = command(*words)
        assert (status, errors.count("\n"), errors[:12]) == (2, 1, "frozencore: ")
        assert re.search(message, errors)
        assert "Traceback" not in errors
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    monkeypatch.setenv("FROZENCORE_DEBUG", "")  # the option sets it
    with pytest.raises(FrozenCoreError, match=message):  # what Python shows with its traceback
        command("--debug", "inspect", saved)


def test_a_reader_beside_a_writer_gets_one_whole_adapter_or_one_line(tmp_path: Path) -> None:
    adapters = [adapted("random", trained=True, seed=seed) for seed in (1, 2)]
    adapters[0].save_pretrained(str(tmp_path))
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for model in adapters:
                model.save_pretrained(str(tmp_path))

    writer = threading.Thread(target=write)
    writer.start()
    whole, refused = [], []
    try:
        for _ in range(200):
            try:
                config, factors = read_adapter(tmp_path)
                whole.append((config.seed, sorted(f.P.sum().item() for f in factors.values())))
            except ArtifactError as error:
                refused.append(str(error))
    finally:
        over.set()
        writer.join()
    sums = {
        seed: sorted(layer.factors("default")[0].sum().item() for layer in cores_of(model))
        for seed, model in zip((1, 2), adapters, strict=True)
    }
    assert whole
    assert all(own == sums[seed] for seed, own in whole)
    assert not any("\n" in line for line in refused)


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_takes_a_sound_adapter(way: str, saved: Path) -> None:
    WAYS_IN[way](saved)


def test_an_adapter_of_an_earlier_version_has_no_seal_and_loads(saved: Path) -> None:
    content = json.loads((saved / CONFIG).read_text())
    del content["seal"]
    (saved / CONFIG).write_text(json.dumps(content))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(saved))
    assert torch.equal(logits(loaded), logits(adapted("random", trained=True)))


def test_the_hub_cache_links_its_files_and_loads(saved: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in (WEIGHTS, CONFIG):
        (linked / name).symlink_to(saved / name)
    PeftModel.from_pretrained(tiny_qwen2(), str(linked))
    read_adapter(linked)


def test_the_tensors_that_reach_the_model_are_checked_whatever_file_they_came_from(saved: Path) -> None:
    """A folder replaced after the first look, or a hub id: PEFT hands over tensors alone."""
    config = FrozenCoreConfig.from_pretrained(saved)
    tensors = load_file(saved / WEIGHTS)
    tensors[first(tensors, "R")][0, 0] += 1
    save_file(tensors, saved / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="cores .* are not those that were saved"):
        PeftModel.from_pretrained(tiny_qwen2(), str(saved), config=config)


def test_other_weights_may_be_loaded_into_an_adapter_later(saved: Path, tmp_path: Path) -> None:
    """As the Trainer does with its best checkpoint: the seal is that of the first file only."""
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(saved), is_trainable=True)
    train_at_random(loaded, seed=4)
    expected = logits(loaded)
    loaded.save_pretrained(str(tmp_path / "checkpoint"))
    train_at_random(loaded, seed=5)
    loaded.load_adapter(str(tmp_path / "checkpoint"), "default")
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_not_saved_and_the_earlier_one_stays(value: float, tmp_path: Path) -> None:
    model = adapted("random", trained=True, modules_to_save=["norm"])
    model.save_pretrained(str(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    modules = next(m for m in model.modules() if hasattr(m, "modules_to_save") and "default" in m.modules_to_save)
    for weight in (cores_of(model)[0].frozencore_R["default"].weight, modules.modules_to_save["default"].weight):
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.flatten()[0] = value
        with pytest.raises(ArtifactError, match=r"holds NaN or Inf\. It is not saved"):
            model.save_pretrained(str(tmp_path))
        with torch.no_grad():
            weight.copy_(kept)
    assert {name: (tmp_path / name).read_bytes() for name in (WEIGHTS, CONFIG)} == before


def test_the_same_adapter_saved_twice_is_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        adapted("fcca", trained=True).save_pretrained(str(tmp_path / name))
    model = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "a"))
    model.save_pretrained(str(tmp_path / "c"))
    for name in "bc":
        assert {p.name for p in (tmp_path / name).iterdir()} == {p.name for p in (tmp_path / "a").iterdir()}
        for path in (tmp_path / "a").iterdir():
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes(), path.name


# ---------------------------------------------------------------------------------------------------- the base model


@pytest.mark.parametrize("way", ["PeftModel.from_pretrained", "transformers"])
def test_another_base_model_of_the_same_shapes_is_refused_and_left_as_it_was(way: str, saved: Path) -> None:
    other = tiny_qwen2()
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[0, 0] += 1e-3
    before = logits(other)
    with pytest.raises(ArtifactError, match=r"another base model: the weight of layer .*layers\.1\.self_attn\.o_proj"):
        _ = other.load_adapter(str(saved)) if way == "transformers" else PeftModel.from_pretrained(other, str(saved))
    assert not cores_of(other)
    assert torch.equal(logits(other), before)


def test_another_base_model_is_taken_if_the_user_says_so(saved: Path) -> None:
    other = tiny_qwen2(seed=1)
    loaded = PeftModel.from_pretrained(other, str(saved), allow_other_base=True)
    assert not torch.equal(logits(loaded), logits(tiny_qwen2(seed=1)))
    edit_config(saved, allow_other_base=True)  # the file has no say in it
    with pytest.raises(ArtifactError, match="another base model"):
        PeftModel.from_pretrained(tiny_qwen2(seed=1), str(saved))


def test_a_second_adapter_of_another_base_model_leaves_the_first_alone(saved: Path) -> None:
    model = adapted("random", model=tiny_qwen2(seed=1), trained=True)
    before = logits(model)
    with pytest.raises(ArtifactError, match="another base model"):
        model.load_adapter(str(saved), "second")
    assert torch.equal(logits(model), before)
    assert "second" not in model.peft_config


@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded_in", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_model_in_another_dtype_is_the_same(
    made_in: torch.dtype, loaded_in: torch.dtype, tmp_path: Path
) -> None:
    adapted("random", dtype=made_in, trained=True).save_pretrained(str(tmp_path))
    PeftModel.from_pretrained(tiny_qwen2().to(loaded_in), str(tmp_path))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8))
def test_no_rounding_between_two_dtypes_makes_another_base(values: list[float]) -> None:
    weight = torch.tensor(values)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for written in dtypes:
        recorded = record_base({"x": weight.to(written)})
        assert recorded is not None
        for present in dtypes:
            assert differing_layer(recorded, {"x": weight.to(present)}) is None


def test_merging_does_not_change_what_base_an_adapter_was_made_on(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.merge_adapter()
    model.save_pretrained(str(tmp_path / "merged"))
    model.unmerge_adapter()
    model.save_pretrained(str(tmp_path / "unmerged"))
    for name in ("merged", "unmerged"):
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / name))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 1}, r"the base model lacks 4 of the layers.*layers\.1"),
        ({"num_hidden_layers": 3}, r"it has nothing for 4 of the layers.*layers\.2"),
        ({"hidden_size": 40}, "in this model, but P"),
    ],
)
def test_a_base_model_of_other_layers_is_refused_in_one_line(
    overrides: dict[str, int], message: str, saved: Path
) -> None:
    for seal in (json.loads((saved / CONFIG).read_text())["seal"], None):
        edit_config(saved, seal=seal, allow_other_base=True, base_model_name_or_path="org/base")
        with pytest.raises(ArtifactError, match=message) as caught:
            PeftModel.from_pretrained(tiny_qwen2(**overrides), str(saved), allow_other_base=True)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("Load the base model that it was trained on: org/base.")


def test_a_quantised_base_is_neither_recorded_nor_compared() -> None:
    class Quantised(nn.Parameter):
        pass

    layer = nn.Linear(4, 4)
    layer.weight = Quantised(layer.weight.detach())
    assert get_peft_model(nn.Sequential(layer), FrozenCoreConfig(r=2, constructor="random", target_modules=["0"]))
    assert record_base({"x": None, "y": torch.ones(8)}) is None
    recorded = record_base({"x": torch.ones(8)})
    assert recorded is not None
    assert differing_layer(recorded, {"x": None}) is None


def test_a_lora_that_is_a_pickle_or_not_finite_is_not_scored(tmp_path: Path) -> None:
    model = get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "pickle"), safe_serialization=False)
    refuse(tmp_path / "pickle", WAYS_IN["evaluate"], "never opened")
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(torch.nan)
    model.save_pretrained(str(tmp_path / "nan"))
    refuse(tmp_path / "nan", WAYS_IN["evaluate"], "holds NaN or Inf")


def test_a_weight_of_few_values_and_a_base_of_other_layers_are_not_compared() -> None:
    """Eight values are compared of each layer; that the layers are others is said of their names."""
    assert sample_weight(nn.Linear(7, 1).weight) is None
    assert sample_weight(nn.Linear(8, 1).weight) is not None
    recorded = record_base({"x": torch.ones(8)})
    assert recorded is not None
    assert differing_layer(recorded, {"x": torch.zeros(8)}) == "x"
    assert differing_layer(recorded, {"x": torch.zeros(8), "y": torch.zeros(8)}) is None


def test_whole_numbers_and_tensors_without_storage_are_finite() -> None:
    sound = {"ids": torch.tensor([1, 2]), "planned": torch.empty(2, device="meta"), "R": torch.ones(2, 2)}
    require_finite("this file", sound, "")
    with pytest.raises(ArtifactError, match="'Q' of this file holds NaN or Inf"):
        require_finite("this file", {**sound, "Q": torch.tensor([1.0, torch.nan])}, "")


def test_the_state_of_an_adapter_without_storage_has_names_and_shapes_but_no_seal() -> None:
    """Its hash would be that of nothing, and whatever is loaded later would seem to have been changed."""
    with torch.device("meta"):
        base = tiny_qwen2()
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random"))
    state, expected = (get_peft_model_state_dict(each) for each in (model, adapted("random")))
    assert {name: X.shape for name, X in state.items()} == {name: X.shape for name, X in expected.items()}
    assert all(X.is_meta for X in state.values())
    assert model.peft_config["default"].to_dict()["seal"] is None


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_an_adapter_is_the_users_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        model = adapted("random", trained=True)
        model.save_pretrained(str(tmp_path / "adapter"))
        save_basis(model, tmp_path / "basis")
        export_lora(tmp_path / "adapter", tmp_path / "lora")
    finally:
        os.umask(before)
    for folder in ("adapter", "basis", "lora"):
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / folder).iterdir()}
        assert set(modes.values()) == {mode}, modes
