"""Folders of adapters: read, summed and reported on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from frozencore import FrozenCoreConfig, export_lora, load_basis, merge_adapters, save_basis, set_basis
from frozencore.adapter.basis import Basis
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.report import LayerReport, inspect_adapter
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.maths.basis import known_basis
from frozencore.maths.quantise import default_bits
from tiny import adapted, cores_of, logits, on_one_basis, tiny_qwen2

WEIGHTS_FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMES, WEIGHTS = ["a", "b", "d"], [0.5, 0.75, -0.25]


def with_three(tmp_path: Path, *, named: bool = True) -> PeftModel:
    """Three adapters on one basis, saved too."""
    model = on_one_basis(*NAMES, place=tmp_path / "basis" if named else None, alpha=6.0)
    model.save_pretrained(str(tmp_path / "out"))
    return model


def deltas(model: PeftModel, name: str) -> list[Tensor]:
    return [layer.get_delta_weight(name).detach().double() for layer in cores_of(model, name)]


def weighted(model: PeftModel, _: Path, weights: list[float]) -> str:
    model.add_weighted_adapter(NAMES, weights, "sum", combination_type="linear")
    assert cores_of(model, "sum")[0].frozencore_P["sum"] is cores_of(model, "sum")[0].frozencore_P["a"]
    return "sum"


def by_folders(model: PeftModel, tmp_path: Path, weights: list[float]) -> str:
    folders = [tmp_path / "out" / name for name in NAMES]
    merge_adapters(folders, tmp_path / "out" / "sum", weights=None if weights == [1 / 3] * 3 else weights)
    model.load_adapter(str(tmp_path / "out" / "sum"), "sum")
    return "sum"


def by_state_dicts(model: PeftModel, _: Path, weights: list[float]) -> str:
    states = [get_peft_model_state_dict(model, adapter_name=name) for name in NAMES]
    average = {key: sum(w * state[key] for w, state in zip(weights, states, strict=True)) for key in states[0]}
    set_peft_model_state_dict(model, average, adapter_name="b")
    return "b"


@pytest.mark.parametrize("weights", [WEIGHTS, [1 / 3] * 3], ids=["weights", "mean"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", [weighted, by_folders, by_state_dicts])
def test_a_sum_of_cores_on_one_basis_is_the_sum_of_their_updates(
    way: Callable[[PeftModel, Path, list[float]], str], named: bool, weights: list[float], tmp_path: Path
) -> None:
    model = with_three(tmp_path, named=named)
    before, updates = logits(model), [deltas(model, name) for name in NAMES]
    found = deltas(model, way(model, tmp_path, weights))
    for own, *each in zip(found, *updates, strict=True):
        expected = sum(w * delta for w, delta in zip(weights, each, strict=True))
        assert float((own - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    assert torch.equal(logits(model), before)  # the sum is there, not active


def test_the_command_writes_the_sum(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with_three(tmp_path)
    folders = [tmp_path / "out" / name for name in NAMES]
    status, out, err = command("merge", *folders, "--weights=0.5,0.75,-0.25", "--output", tmp_path / "sum")
    assert status == 0, err
    assert "bytes" in out
    merge_adapters(folders, tmp_path / "same", weights=WEIGHTS, bits=default_bits(4))
    assert (tmp_path / "sum" / WEIGHTS_FILE).read_bytes() == (tmp_path / "same" / WEIGHTS_FILE).read_bytes()


def test_a_sum_elsewhere_finds_the_basis_that_moved_with_its_adapters(tmp_path: Path) -> None:
    model = with_three(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    folders = [tmp_path / "moved" / "out" / name for name in NAMES]
    merge_adapters(folders, tmp_path / "far" / "away" / "sum", weights=WEIGHTS)
    again = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "far" / "away" / "sum"))
    assert torch.equal(
        torch.cat(deltas(again, "default")), torch.cat(deltas(model, weighted(model, tmp_path, WEIGHTS)))
    )


# ------------------------------------------------------------------------------------------------------- reading


def test_a_folder_has_the_factors_of_the_model_beside_a_basis_too(tmp_path: Path) -> None:
    model = adapted("fcca", dtype=torch.bfloat16, trained=True)
    model.save_pretrained(str(tmp_path / "whole"))
    tensors = load_file(tmp_path / "whole" / WEIGHTS_FILE)
    assert len(tensors) == 1 + 2 * 8
    save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "core"))
    for saved in (read_adapter(tmp_path / name) for name in ("whole", "core")):
        assert (saved.config.r, saved.config.constructor, saved.config.coordinates) == (3, "fcca", "qr")
        basis = saved.find_basis()
        cores = saved.core.by_layer(basis.ranks)
        assert (saved.basis is None) == (saved.folder.name == "core")
        assert basis.id == saved.core.basis_id == load_basis(tmp_path / "basis").id
        for layer in cores_of(model):
            P, Q, R = layer.factors("default")
            key = f"base_model.model.{layer.name}.frozencore_"
            for side, X, mine in (("P", P, basis.layers[layer.name].P), ("Q", Q, basis.layers[layer.name].Q)):
                assert mine.dtype == X.dtype
                assert torch.equal(mine, X)
                assert torch.equal(mine, tensors[key + side])
            assert torch.equal(cores[layer.name], R)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank_pattern", [3]), ("alpha_pattern", "text"), ("base_record", []), ("base_model_name_or_path", 7),
     ("calibration_tokens", "x"), ("modules_to_save", 7)],
)  # fmt: skip
def test_a_configuration_of_other_types_is_refused_in_one_line(name: str, value: object, tmp_path: Path) -> None:
    with_three(tmp_path, named=False)
    file = tmp_path / "out" / "a" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(FrozenCoreError, match=f"{name}|is damaged"):
        read_adapter(file.parent)


def test_a_file_with_one_factor_of_a_layer_or_one_of_another_form_is_damaged(tmp_path: Path) -> None:
    with_three(tmp_path, named=False)
    file = tmp_path / "out" / "a" / WEIGHTS_FILE
    whole = load_file(file)
    P = next(key for key in whole if key.endswith("frozencore_P"))
    for tensors, why in (({**whole, P: whole[P][:, 0].clone()}, "is damaged"), ({**whole}, "has one of them")):
        if why == "has one of them":
            del tensors[P]
        save_file(tensors, file)
        with pytest.raises(ArtifactError, match=why):
            read_adapter(file.parent)


def test_no_adapters_and_cores_of_other_sizes_have_no_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one core at least"):
        merge_adapters([], tmp_path / "sum")
    with_three(tmp_path)
    file = tmp_path / "out" / "b" / WEIGHTS_FILE
    save_file({key: X[:-1].clone() for key, X in load_file(file).items()}, file)
    with pytest.raises(ArtifactError, match="A core on this basis has"):
        merge_adapters([tmp_path / "out" / "a", file.parent], tmp_path / "sum")


def test_a_basis_named_by_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, given = adapted("random"), adapted("random")
    save_basis(saved, "shop/basis")
    set_basis(given, load_basis("shop/basis"))
    configured = get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis="shop/basis", task_type="CAUSAL_LM"))
    for name, model in (("saved", saved), ("given", given), ("configured", configured)):
        model.save_pretrained(f"some/where/else/{name}")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for name in ("saved", "given", "configured"):
        folder = tmp_path / "some/where/else" / name
        assert read_adapter(folder).find_basis().id == load_basis(tmp_path / "shop/basis").id


def test_a_report_has_the_sizes_and_the_length_of_the_core() -> None:
    basis = Basis({"a": known_basis(torch.eye(12)[:, :4], torch.eye(20)[:, :4])}, options={})
    (report,) = inspect_adapter(basis, {"a": 3 * torch.eye(4)}).values()
    assert report == LayerReport((12, 20), 4, 16, 4 * 4 * 32, 0, 6)


def test_a_tokenizer_beside_an_adapter_goes_with_it_into_a_sum_an_export_and_fewer_bits(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    with_three(tmp_path)
    folders = [tmp_path / "out" / name for name in NAMES]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folders[0])
    merge_adapters(folders, tmp_path / "sum")
    saved = read_adapter(folders[0])
    saved.write(tmp_path / "few", saved.core.in_bits(4, saved.ranks))
    export_lora(folders[0], tmp_path / "lora", base=tiny_qwen2())
    for name in ("sum", "few", "lora"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == tokenizer.chat_template
    merge_adapters(folders[1:], tmp_path / "others")
    assert not (tmp_path / "others/tokenizer_config.json").exists()
