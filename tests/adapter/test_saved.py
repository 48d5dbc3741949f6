"""A saved adapter is the same bytes each time, is read once, and fits its basis and its base model."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import struct
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import (
    AutoPeftModelForCausalLM,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frozencore import (
    Core,
    CoreBank,
    FrozenCoreConfig,
    basis_id,
    calibrate,
    export_lora,
    export_tenant,
    get_basis,
    get_core,
    merge_adapters,
    save_basis,
    swap_core,
)
from frozencore.adapter.base_record import differing_layer, record_base, sample_weight
from frozencore.adapter.basis import layer_digest
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.layer import UncalibratedWarning
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.basis import LayerBasis
from frozencore.tune.evaluate import BaseWithAdapter
from tiny import (
    BATCHES,
    adapted,
    all_equal,
    cores_of,
    factors_of,
    logits,
    same_tensors,
    set_values,
    tiny_qwen2,
    train_at_random,
)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A trained adapter."""
    adapted("random", trained=True, coordinates="qr").save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def first(tensors: dict[str, Tensor], part: str) -> str:
    return next(key for key in tensors if f"frozencore_{part}" in key)


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
                whole.append(sorted(own.P.sum().item() for own in read_adapter(tmp_path).find_basis().layers.values()))
            except ArtifactError as error:
                refused.append(str(error))
    finally:
        over.set()
        writer.join()
    sums = [sorted(layer.factors("default")[0].sum().item() for layer in cores_of(model)) for model in adapters]
    assert whole
    assert all(own in sums for own in whole)
    assert not any("\n" in line for line in refused)


def test_an_adapter_in_the_linked_files_of_the_hubs_cache_loads(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for name in (WEIGHTS, CONFIG):
        (tmp_path / "snapshot" / name).symlink_to(saved / name)
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "snapshot"))
    assert torch.equal(logits(loaded), logits(adapted("random", trained=True, coordinates="qr")))
    read_adapter(tmp_path / "snapshot")


class Opened:
    """The files that were opened in a folder, by any library of this process, as Linux counts them (inotify)."""

    IN_OPEN, HEADER = 0x20, struct.Struct("iIII")

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None)
        self.file = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self.file, bytes(folder), self.IN_OPEN) > 0

    def names(self) -> list[str]:
        """The names since the last call."""
        try:
            content = os.read(self.file, 2**16)
        except BlockingIOError:
            return []
        names = []
        while content:
            _, _, _, size = self.HEADER.unpack_from(content)
            names.append(content[self.HEADER.size : self.HEADER.size + size].rstrip(b"\0").decode())
            content = content[self.HEADER.size + size :]
        return names


READS: dict[str, Callable[[Path], object]] = {
    "PeftModel": lambda folder: PeftModel.from_pretrained(tiny_qwen2(), str(folder)),
    "PeftModel, in low memory": lambda folder: PeftModel.from_pretrained(
        tiny_qwen2(), str(folder), low_cpu_mem_usage=True
    ),
    "AutoPeftModel": lambda folder: AutoPeftModelForCausalLM.from_pretrained(str(folder)),
    "a second adapter": lambda folder: adapted("fcca").load_adapter(str(folder), "second"),
    "read_adapter": read_adapter,
    "LoRA": lambda folder: export_lora(folder, folder.parent / "lora"),
    "tenant": lambda folder: export_tenant(folder, folder.parent / "tenant"),
    "merge": lambda folder: merge_adapters([folder], folder.parent / "sum"),
    "bank": lambda folder: CoreBank(adapted("random", coordinates="qr"), 1).put("a", folder),
    "swap": lambda folder: swap_core(adapted("random", coordinates="qr"), folder),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("on_a_saved_basis", [True, False])
def test_every_way_in_opens_the_file_of_an_adapter_once(way: str, on_a_saved_basis: bool, tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model = adapted("random", trained=True, coordinates="qr")
    if on_a_saved_basis:
        save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "adapter"))
    set_values(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"), task_type="CAUSAL_LM")
    opened = Opened(tmp_path / "adapter")
    READS[way](tmp_path / "adapter")
    assert opened.names().count(WEIGHTS) == 1


@pytest.mark.parametrize("changed", ["P", "alpha", "base_record"])
def test_p_and_q_scales_and_base_that_are_not_those_of_the_basis_id_are_refused(changed: str, saved: Path) -> None:
    if changed == "P":
        tensors = load_file(saved / WEIGHTS)
        tensors[first(tensors, "P")][0, 0] += 1
        save_file(tensors, saved / WEIGHTS, metadata={"format": "pt"})
    elif changed == "alpha":
        set_values(saved, alpha=2.0)
    else:
        set_values(saved, base_record=record_base({"x": torch.ones(8)}))
    own = Core.read("", load_file(saved / WEIGHTS)).basis_id
    for read in (read_adapter, lambda folder: PeftModel.from_pretrained(tiny_qwen2(), str(folder))):
        with pytest.raises(ArtifactError, match=f"has a core on the basis {own}, but .* make [0-9a-f]{{32}}"):
            read(saved)


@pytest.mark.parametrize("on_a_saved_basis", [True, False])
def test_a_bfloat16_model_keeps_the_id_of_a_float32_basis(on_a_saved_basis: bool, tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    if on_a_saved_basis:
        save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "whole"))
    half = PeftModel.from_pretrained(tiny_qwen2().bfloat16(), str(tmp_path / "whole"))
    assert basis_id(half) == get_basis(half).id == basis_id(model)
    half.save_pretrained(str(tmp_path / "again"))
    again = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "again"))
    assert basis_id(again) == basis_id(model)
    swap_core(model, tmp_path / "again")


def test_p_and_q_are_hashed_once_when_an_adapter_is_loaded_and_used(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = Counter[str]()
    digest = layer_digest

    def counted(basis: LayerBasis) -> str:
        found = digest(basis)
        hashed[found] += 1
        return found

    for module in ("basis", "layer"):
        monkeypatch.setattr(f"frozencore.adapter.{module}.layer_digest", counted)
    model = PeftModel.from_pretrained(tiny_qwen2(), str(saved))
    swap_core(model, get_core(model))
    assert len(hashed) == len(cores_of(model))
    assert set(hashed.values()) == {1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_not_saved_and_the_earlier_one_stays(value: float, tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.save_pretrained(str(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    with torch.no_grad():
        cores_of(model)[0].core("default")[0, 0] = value
    with pytest.raises(ArtifactError, match="A core is finite, but NaN or Inf was given"):
        model.save_pretrained(str(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in (WEIGHTS, CONFIG)} == before


def test_the_same_adapter_saved_twice_is_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        adapted("fcca", trained=True).save_pretrained(str(tmp_path / name))
    model = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "a"))
    model.save_pretrained(str(tmp_path / "c"))
    for name in "bc":
        assert {p.name for p in (tmp_path / name).iterdir()} == {p.name for p in (tmp_path / "a").iterdir()}
        for path in (tmp_path / "a").iterdir():  # whose card names its folder
            again = (tmp_path / name / path.name).read_bytes().replace(bytes(tmp_path / name), bytes(tmp_path / "a"))
            assert path.read_bytes() == again, path.name


# -------------------------------------------------------------------------------- nothing but the adapter's own tensors


def on_the_head(dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    return adapted("random", model=tiny_qwen2(), dtype=dtype, target_modules=["lm_head"], trained=True, **options)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_on_the_head_holds_no_head_and_leaves_that_of_its_base(tmp_path: Path) -> None:
    """PEFT adds the base model's head to what it saves; from bfloat16 it would come back rounded."""
    on_the_head(torch.bfloat16).save_pretrained(str(tmp_path / "half"))
    held = {key.rpartition("frozencore_")[0] for key in load_file(tmp_path / "half" / WEIGHTS)}
    assert held == {"", "base_model.model.lm_head."}
    for seed in (0, 1):  # its own base in another dtype, and another one
        base, before = tiny_qwen2(seed=seed), logits(tiny_qwen2(seed=seed))
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "half"), allow_other_base=True).eval()
        assert not torch.equal(logits(loaded), before)
        with loaded.disable_adapter():
            assert torch.equal(logits(loaded), before)
        assert torch.equal(logits(loaded.unload()), before)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
def test_a_saved_adapter_on_the_head_is_exported_summed_and_swapped_as_the_one_in_the_model(tmp_path: Path) -> None:
    model = on_the_head()
    model.save_pretrained(str(tmp_path / "saved"))
    expected = logits(model)
    for source, name in ((model, "of the model"), (tmp_path / "saved", "of the folder")):
        export_lora(source, tmp_path / name, base=tiny_qwen2() if name == "of the folder" else None)
    ours, theirs = (load_file(tmp_path / f"of the {name}" / WEIGHTS) for name in ("model", "folder"))
    assert same_tensors(ours, theirs)
    merge_adapters([tmp_path / "saved"] * 2, tmp_path / "mean")
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "mean")).eval()), expected)
    train_at_random(model, seed=9)
    swap_core(model, tmp_path / "saved")
    assert torch.equal(logits(model), expected)


def test_a_resized_embedding_is_named_and_not_saved(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.resize_token_embeddings(64)
    with pytest.warns(UserWarning, match=r"'base_model\.model\.model\.embed_tokens\.weight' is not saved"):
        adapted("random", model=model).save_pretrained(str(tmp_path), save_embedding_layers=True)
    assert not [key for key in load_file(tmp_path / WEIGHTS) if "frozencore" not in key]


# --------------------------------------------------------------------------- a configuration that several models share


@pytest.mark.parametrize("of_one_model", [False, True])
def test_one_configuration_for_two_adapters_names_the_basis_of_one(of_one_model: bool, tmp_path: Path) -> None:
    """A usual loop over seeds."""
    config = FrozenCoreConfig(r=3, constructor="fcca", alpha=None, target_modules=["q_proj", "v_proj"])
    first = get_peft_model(tiny_qwen2(), config)
    second, name = (first, "two") if of_one_model else (get_peft_model(tiny_qwen2(), config), "default")
    if of_one_model:
        first.add_adapter("two", config)
    calibrate(first, BATCHES, adapter_name="default", progress=False)
    save_basis(first, tmp_path / "basis", adapter_name="default")
    calibrate(second, BATCHES[:1], adapter_name=name, progress=False)
    train_at_random(second, name, seed=1)
    second.save_pretrained(str(tmp_path / "second"))
    train_at_random(first)
    first.save_pretrained(str(tmp_path / "first"))
    other = tmp_path / "second" / name if of_one_model else tmp_path / "second"
    for model, adapter, folder in ((first, "default", tmp_path / "first"), (second, name, other)):
        model.set_adapter(adapter)
        loaded = PeftModel.from_pretrained(tiny_qwen2(), str(folder)).eval()
        assert torch.equal(logits(loaded), logits(model.eval()))
    assert first.peft_config["default"] is config  # a model keeps the object; the other adapter has a copy
    assert second.peft_config[name] is not config
    with pytest.raises(ArtifactError, match="has a core on the basis"):
        CoreBank(first, 1, adapter_name="default").put("other", other)


@pytest.mark.parametrize("how", ["in place", "in place of its data", "a state dict", "rounded"])
def test_a_basis_that_was_changed_under_its_name_is_saved_with_the_cores(how: str, tmp_path: Path) -> None:
    model = adapted("fcca", trained=True)
    save_basis(model, tmp_path / "basis")
    if how == "in place":
        for layer in cores_of(model):
            layer.frozencore_P["default"].copy_(layer.frozencore_P["default"].flip(1))
    elif how == "in place of its data":  # as averages of weights are written, which torch does not count
        for layer in cores_of(model):
            layer.frozencore_P["default"].data.copy_(layer.frozencore_P["default"].flip(1))
    elif how == "a state dict":
        model.load_state_dict(adapted("rawgrad", trained=True).state_dict())
    else:
        model.half().float()
    model.save_pretrained(str(tmp_path / "saved"))
    assert len(load_file(tmp_path / "saved" / WEIGHTS)) == 1 + 2 * len(cores_of(model))
    loaded = PeftModel.from_pretrained(
        copy.deepcopy(model.get_base_model()), str(tmp_path / "saved"), adapter_name="new"
    )
    assert torch.equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize("place", [".", "../here"])
def test_an_empty_working_folder_is_written_into(
    place: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_lora(saved, place)
    assert Path(CONFIG).is_file()
    with pytest.raises(ArtifactError, match="is there already"):
        export_lora(saved, place)
    export_lora(saved, place, overwrite=True)
    assert Path(WEIGHTS).is_file()
    with pytest.raises(ArtifactError, match="is there already"):
        save_basis(adapted("random"), place)
    save_basis(adapted("random"), place, overwrite=True)
    assert {path.name for path in Path().iterdir()} == {"basis.json", "basis.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "here"}


# ------------------------------------------------------------------------------------------------------ adapter names


def test_adapters_of_any_plain_name_are_saved_and_loaded_whole(tmp_path: Path) -> None:
    names = ["anna", "Anna 2", "日本", "7", "c", "frozencore", "a-b_c", "basis", "adapter_model"]
    model = adapted("random", trained=True)
    for seed, name in enumerate(names, start=1):
        model.add_adapter(name, FrozenCoreConfig(r=3, constructor="random", seed=seed))
    train_at_random(model)
    model.save_pretrained(str(tmp_path))
    for name in names:
        model.set_adapter(name)
        loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / name), adapter_name=name).eval()
        assert torch.equal(logits(loaded), logits(model.eval()))
    for load in (
        lambda: PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path), adapter_name="a/b"),
        lambda: PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path), adapter_name="0"),
        lambda: model.load_adapter(str(tmp_path), adapter_name="/"),
    ):
        with pytest.raises(ConfigError, match="An adapter's name is one plain part of a path"):
            load()


# ---------------------------------------------------------------------------------------------------- the base model


@pytest.mark.parametrize("way", ["PEFT", "a second adapter"])
def test_another_base_model_of_the_same_shapes_is_refused_and_left_as_it_was(way: str, saved: Path) -> None:
    other = tiny_qwen2()
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[0, 0] += 1e-3
    if way == "a second adapter":
        other = adapted("random", model=other, trained=True)
    before, names = logits(other), list(dict(other.named_modules()))
    with pytest.raises(ArtifactError, match=r"another base model: the weight of layer .*layers\.1\.self_attn\.o_proj"):
        _ = PeftModel.from_pretrained(other, str(saved)) if way == "PEFT" else other.load_adapter(str(saved), "second")
    assert torch.equal(logits(other), before)
    assert list(dict(other.named_modules())) == names


def loaded_again(model: PeftModel, folder: Path) -> None:
    model.load_adapter(str(folder), "default")


def by_a_state_dict(model: PeftModel, folder: Path) -> None:
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS))


def with_a_configuration(model: PeftModel, folder: Path) -> None:
    config = FrozenCoreConfig(r=3, constructor="random", coordinates="qr", alpha=None)
    PeftModel.from_pretrained(model.unload(), str(folder), config=config)


def swapped(model: PeftModel, folder: Path) -> None:
    swap_core(model, load_file(folder / WEIGHTS))


def into_a_bank(model: PeftModel, folder: Path) -> None:
    CoreBank(model, 1).put("anna", load_file(folder / WEIGHTS))


@pytest.mark.parametrize("other", ["scale", "base model"])
@pytest.mark.parametrize("onto", [loaded_again, by_a_state_dict, with_a_configuration, swapped, into_a_bank])
def test_tensors_alone_onto_an_adapter_of_another_scale_or_base_are_refused(
    onto: Callable[[PeftModel, Path], None], other: str, tmp_path: Path
) -> None:
    """PEFT reads no configuration for a name that is there. Bases of `random` are the same on all models of a shape."""
    own = {"base": tiny_qwen2(seed=1)} if other == "base model" else {"alpha": 2.0}
    adapted("random", trained=True, model=own.pop("base", None), **own).save_pretrained(str(tmp_path / "other"))
    adapted("random", trained=True).save_pretrained(str(tmp_path / "own"))
    model = adapted("random")
    before = logits(model)
    with pytest.raises(ArtifactError, match="has a core on the basis"):
        onto(model, tmp_path / "other")
    assert torch.equal(logits(model), before)
    onto(model, tmp_path / "own")


def test_averaged_and_rounded_state_dicts_are_taken_and_other_factors_refused() -> None:
    state = get_peft_model_state_dict(adapted("random", trained=True, alpha=5.0))
    averaged = {key: 0.3 * X + 0.7 * X for key, X in state.items()}
    halves = {dtype: {key: X.to(dtype) for key, X in state.items()} for dtype in (torch.bfloat16, torch.float16)}
    model = adapted("random", alpha=5.0)
    for one in (averaged, *halves.values()):
        set_peft_model_state_dict(model, one)
        assert torch.equal(get_core(model).values, Core.read("", one).values)
    for one in (state, averaged, halves[torch.bfloat16]):
        other = adapted("fcca", alpha=5.0)
        set_peft_model_state_dict(other, one)
        assert basis_id(other) == basis_id(model)
    with pytest.raises(ArtifactError, match="P and Q beside it"):  # float16 rounds in other places
        set_peft_model_state_dict(adapted("fcca", alpha=5.0), halves[torch.float16])


def test_another_base_model_is_taken_if_the_user_says_so(saved: Path) -> None:
    loaded = PeftModel.from_pretrained(tiny_qwen2(seed=1), str(saved), allow_other_base=True)
    assert not torch.equal(logits(loaded), logits(tiny_qwen2(seed=1)))
    loaded.save_pretrained(str(saved.parent / "again"))  # now a core of that base model
    again = PeftModel.from_pretrained(tiny_qwen2(seed=1), str(saved.parent / "again"))
    assert torch.equal(logits(again.eval()), logits(loaded.eval()))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8))
def test_no_rounding_between_two_dtypes_makes_another_base(values: list[float]) -> None:
    weight = torch.tensor(values)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for written in dtypes:
        recorded = record_base({"x": weight.to(written)})
        assert recorded is not None
        for present in dtypes:
            assert differing_layer(recorded, {"x": weight.to(present)}) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 1}, r"of rank 3 at scale 1 for layer .*layers\.1.*, and this model nothing \(4 layers"),
        ({"num_hidden_layers": 3}, r"has nothing for layer .*layers\.2.*, and this model 16 x 32.*\(4 layers"),
        ({"hidden_size": 40}, "has 16 x 32 of rank 3 .*, and this model 20 x 40"),
    ],
)
def test_a_base_model_of_other_layers_is_refused_in_one_line(
    overrides: dict[str, int], message: str, saved: Path
) -> None:
    set_values(saved, base_model_name_or_path="org/base")
    with pytest.raises(ArtifactError, match=message) as caught:
        PeftModel.from_pretrained(tiny_qwen2(**overrides), str(saved), allow_other_base=True)
    assert str(caught.value).endswith("model org/base in the class that it was trained in (for a command, save it so).")


def test_a_core_of_another_rank_says_so_and_not_that_the_base_model_is_another(saved: Path) -> None:
    model = adapted("fcca", r=2, calibrated=False)
    with pytest.raises(ArtifactError, match="Make the adapter with the rank and scale of the saved one"):
        set_peft_model_state_dict(model, load_file(saved / "adapter_model.safetensors"))


def test_a_pickle_is_refused_where_it_is_written(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    for older in (None, b"of another training"):  # which would be loaded in place of the pickle
        if older is not None:
            (tmp_path / "adapter_model.safetensors").write_bytes(older)
        with pytest.raises(ArtifactError, match="Save without safe_serialization=False"):
            model.save_pretrained(tmp_path, safe_serialization=False)
    assert not (tmp_path / "adapter_config.json").exists()


def test_weights_that_show_no_values_and_bases_of_other_layers_are_not_compared() -> None:
    """Quantised weights, and those of fewer than eight values; that the layers are others is said of their names."""

    class Quantised(nn.Parameter):
        pass

    assert sample_weight(Quantised(torch.ones(4, 4))) is None
    assert sample_weight(nn.Linear(7, 1).weight) is None
    assert sample_weight(nn.Linear(8, 1).weight) is not None
    assert record_base({"x": None, "y": torch.ones(8)}) is None
    recorded = record_base({"x": torch.ones(8)})
    assert recorded is not None
    for samples, expected in (
        ({"x": torch.zeros(8)}, "x"), ({"x": None}, None), ({"x": torch.zeros(8), "y": torch.zeros(8)}, None),
    ):  # fmt: skip
        assert differing_layer(recorded, samples) == expected


def test_a_frozen_core_that_is_a_pickle_is_not_opened(saved: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(saved / "opened"),)

    (saved / WEIGHTS).unlink()
    (saved / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    for read in (read_adapter, lambda folder: PeftModel.from_pretrained(tiny_qwen2(), str(folder))):
        with pytest.raises(ArtifactError, match="never opened"):
            read(saved)
    assert not (saved / "opened").exists()


def test_the_state_of_an_adapter_without_storage_has_the_shape_of_its_core() -> None:
    with torch.device("meta"):
        base = tiny_qwen2()
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random"))
    ((_, values),) = get_peft_model_state_dict(model).items()
    assert (values.is_meta, values.shape) == (True, (8 * 9,))


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


# ----------------------------------------------------------------------------------- finite in the dtype of its use

BEYOND_FLOAT16 = 1e5


def test_cores_that_a_bank_in_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = adapted("random")
    train_at_random(model, size=BEYOND_FLOAT16)
    model.save_pretrained(str(tmp_path))
    CoreBank(adapted("random"), 1).put("a", tmp_path)
    with pytest.raises(ArtifactError, match=r"beyond the range of torch\.float16"):
        CoreBank(adapted("random"), 1, dtype=torch.float16).put("a", tmp_path)


def test_an_adapter_that_was_never_calibrated_is_named_wherever_it_comes_or_leaves(tmp_path: Path) -> None:
    def said() -> Any:
        return pytest.warns(UncalibratedWarning, match="was never calibrated: its bases are zero.*frozencore.calibrate")

    with said():
        adapted("fcca", calibrated=False).save_pretrained(str(tmp_path))
    with said():
        model = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path))
    with said():
        model.load_adapter(str(tmp_path), adapter_name="second")
    with said():
        BaseWithAdapter(tiny_qwen2()).with_adapter(tmp_path)
    for way in ("merge_adapter", "merge_and_unload"):
        with said():
            getattr(adapted("fcca", calibrated=False), way)()


def test_nothing_is_said_of_a_calibrated_adapter(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        for constructor in ("fcca", "random"):
            adapted(constructor).save_pretrained(str(tmp_path))
            PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).merge_and_unload()
        adapted("fcca", calibrated=False).unload()


def test_a_saved_model_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    model = adapted("random")
    model.save_pretrained(tmp_path)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_core_that_is_cut_short_changes_nothing() -> None:
    model = adapted(trained=True)
    before, config = (basis_id(model), factors_of(model)), model.peft_config["default"].to_dict()
    cut = dict(get_peft_model_state_dict(adapted("random", trained=True)))
    (core,) = (name for name in cut if "frozencore_core_" in name)
    cut[core] = cut[core][:-1]
    with pytest.raises(ArtifactError, match="has 72 values, but 71 were given"):
        set_peft_model_state_dict(model, cut)
    assert basis_id(model) == before[0]
    assert all_equal(factors_of(model), before[1])
    assert model.peft_config["default"].to_dict() == config
