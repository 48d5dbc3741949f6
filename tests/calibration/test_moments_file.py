"""The moments file: what goes in comes out, and whatever does not belong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from frozencore import FrozenCoreConfig
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.moments_file import FORMAT, KEY, MomentsFingerprint, _hash_of, load_moments, save_moments
from frozencore.errors import ArtifactError
from frozencore.files.fingerprint import (
    fingerprint_batches,
    fingerprint_model,
    fingerprint_options,
    fingerprint_tensors,
)
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from tiny import attention_names, batches_of, draw_examples, tiny_qwen2

BATCHES = batches_of(draw_examples(4, seed=1), 2)
WEIGHTINGS = ("token", "token_sum")


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, LayerMoments], MomentsFingerprint]:
    model = tiny_qwen2()
    moments = collect_moments(model, BATCHES, attention_names(model), needs=frozenset(MOMENT_NAMES))
    fingerprint = MomentsFingerprint.of(model, BATCHES)
    path = tmp_path / "deep" / "moments.safetensors"
    save_moments(path, moments, fingerprint)
    return path, moments, fingerprint


def test_a_round_trip_is_bit_equal(written: tuple) -> None:
    path, moments, fingerprint = written
    loaded = load_moments(path, fingerprint)
    assert list(loaded) == list(moments)
    for name, layer in moments.items():
        assert loaded[name].num_tokens == layer.num_tokens
        assert loaded[name].names() == layer.names()
        for moment in layer.names():
            assert torch.equal(getattr(loaded[name], moment), getattr(layer, moment))


def test_only_the_collected_moments_come_back(tmp_path: Path) -> None:
    fingerprint = MomentsFingerprint("a", "b", {})
    save_moments(tmp_path / "m", {"x": LayerMoments(3, input_square=torch.ones(4))}, fingerprint)
    assert load_moments(tmp_path / "m")["x"].names() == ("input_square",)


def test_grouping_and_device_do_not_change_what_moments_are_of() -> None:
    model = tiny_qwen2()
    one = MomentsFingerprint.of(model, BATCHES, CalibrationOptions(group_size=1, stats_device="cpu"))
    assert one == MomentsFingerprint.of(model, BATCHES)


@pytest.mark.parametrize(
    ("part", "message"),
    [("model", "another base model"), ("data", "other calibration data"), ("options", r"other options \(tokens\)")],
)
def test_moments_of_something_else_are_refused(part: str, message: str, written: tuple) -> None:
    path, _, _ = written
    model, batches, options = tiny_qwen2(), BATCHES, CalibrationOptions()
    if part == "model":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    elif part == "data":
        batches = [{key: value.clone() for key, value in batch.items()} for batch in BATCHES]
        batches[1]["labels"][0, -1] = 1
    else:
        options = CalibrationOptions(tokens="completion")
    with pytest.raises(ArtifactError, match=message) as caught:
        load_moments(path, MomentsFingerprint.of(model, batches, options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", ["empirical", "mc"])
def test_a_file_that_names_the_labels_of_the_fisher_loads_if_they_are_the_datas(labels: str, tmp_path: Path) -> None:
    """Earlier versions wrote these two options, and their files still load."""
    model, path = tiny_qwen2(), tmp_path / "moments.safetensors"
    moments = collect_moments(model, BATCHES, attention_names(model))
    now = MomentsFingerprint.of(model, BATCHES)
    save_moments(path, moments, replace(now, options={**now.options, "fisher_labels": labels, "seed": 42}))
    if labels == "empirical":
        assert load_moments(path, now).keys() == moments.keys()
        return
    for expected in (None, now):
        with pytest.raises(ArtifactError, match="Moments are of the data's labels, but .* fisher_labels 'mc'") as error:
            load_moments(path, expected)
        assert "\n" not in str(error.value)


def test_a_weighting_by_its_short_name_is_the_same_moments() -> None:
    one, other = (MomentsFingerprint.of(tiny_qwen2(), BATCHES, CalibrationOptions(weighting=w)) for w in WEIGHTINGS)
    assert one == other
    assert one.options["weighting"] == "token_sum"


@pytest.mark.parametrize("keep", [0, 3, 8, 200, -1])
def test_a_truncated_file_is_refused(keep: int, written: tuple) -> None:
    path, _, fingerprint = written
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=r"is damaged .*Calibrate again"):
        load_moments(path, fingerprint)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(bytes(range(256)) * 9)
    with pytest.raises(ArtifactError, match="is damaged"):
        load_moments(path)


def write_ours(path: Path, tensors: dict[str, torch.Tensor], said: dict) -> None:
    """A file with the right hash, whatever it says."""
    header = {
        "format": FORMAT,
        **said,
        "content_sha256": _hash_of({name: said.get(name) for name in ("fingerprint", "num_tokens")}, tensors),
    }
    save_file(tensors, path, metadata={KEY: json.dumps(header)})


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "frozencore-moments-1"}])
def test_a_file_that_is_not_ours_is_refused(metadata: dict | None, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(ArtifactError, match="is not a moments file of this version"):
        load_moments(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"num_tokens": {}, "fingerprint": "not an object"},
        {"num_tokens": [], "fingerprint": []},
        {"num_tokens": {"x": 3}, "fingerprint": {}},
        {"num_tokens": {"x": "three"}, "fingerprint": {"model": "a", "data": "b", "options": {}}},
        {"num_tokens": {"x": 3}, "fingerprint": []},
        {"num_tokens": {"x": 3}, "fingerprint": {"model": "a", "data": "b", "options": []}},
        {"num_tokens": 3, "fingerprint": {"model": "a", "data": "b", "options": {}}},
    ],
)
def test_a_file_with_broken_metadata_is_refused(metadata: dict, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_ours(path, {"x/input_square": torch.ones(2)}, metadata)
    with pytest.raises(ArtifactError):
        load_moments(path, MomentsFingerprint("a", "b", {}))


@pytest.mark.parametrize("key", ["x/nonsense", "y/input_square", "input_square"])
def test_an_unknown_tensor_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_ours(path, {key: torch.ones(2)}, {"num_tokens": {"x": 3}, "fingerprint": {}})
    with pytest.raises(ArtifactError, match=f"unknown tensor '{key}'"):
        load_moments(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_neither_saved_nor_loaded(value: float, written: tuple) -> None:
    path, moments, fingerprint = written
    before = path.read_bytes()
    next(iter(moments.values())).cross[0, 0] = value
    with pytest.raises(
        ArtifactError, match=r"'model\.layers\.0\.self_attn\.q_proj/cross' holds NaN or Inf.*not written"
    ):
        save_moments(path, moments, fingerprint)
    assert path.read_bytes() == before
    write_ours(path, {"x/input_square": torch.tensor([1.0, value])}, {"num_tokens": {"x": 3}, "fingerprint": {}})
    with pytest.raises(ArtifactError, match="holds NaN or Inf in 'x/input_square'"):
        load_moments(path)


@pytest.mark.parametrize("place", [-5, 400])
def test_a_flipped_bit_is_refused(place: int, written: tuple) -> None:
    path, _, _ = written
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged|not a moments file|unknown tensor"):
        load_moments(path)


def test_changed_token_counts_are_refused(written: tuple) -> None:
    path, _, _ = written
    header = json.loads(safe_open(path, framework="pt").metadata()["frozencore-moments"])
    header["num_tokens"] = {name: count + 1 for name, count in header["num_tokens"].items()}
    save_file(load_file(path), path, metadata={"frozencore-moments": json.dumps(header)})
    with pytest.raises(ArtifactError, match="content has another hash"):
        load_moments(path)


def test_the_same_moments_are_the_same_bytes(written: tuple, tmp_path: Path) -> None:
    path, moments, fingerprint = written
    for name in "abcd":
        save_moments(tmp_path / name, moments, fingerprint)
        assert (tmp_path / name).read_bytes() == path.read_bytes()


def test_a_file_without_its_hash_is_refused(tmp_path: Path) -> None:
    said = {"num_tokens": {"x": 3}, "fingerprint": {}}
    tensors = {"x/input_square": torch.ones(2)}
    write_ours(tmp_path / "whole", tensors, said)
    assert load_moments(tmp_path / "whole")["x"].num_tokens == 3
    save_file(tensors, tmp_path / "m", metadata={KEY: json.dumps({"format": FORMAT, **said})})
    with pytest.raises(ArtifactError, match="content has another hash"):
        load_moments(tmp_path / "m")


def test_a_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    save_file({"x/input_square": torch.ones(2)}, tmp_path / "m", metadata={"frozencore-moments": '{"format": 3}'})
    with pytest.raises(ArtifactError, match="not a moments file of this version"):
        load_moments(tmp_path / "m")


def test_no_file_is_said_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="There is no moments file at .*frozencore calibrate"):
        load_moments(tmp_path / "missing")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], written: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moments, fingerprint = written
    before = path.read_bytes()

    def half(tensors: dict, aside: Path, **_: object) -> None:
        Path(aside).write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(error):
        save_moments(path, moments, fingerprint)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# --------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_of_a_model_sees_every_bit_name_shape_and_dtype() -> None:
    reference = fingerprint_model(tiny_qwen2())
    assert reference == fingerprint_model(tiny_qwen2())
    assert reference != fingerprint_model(tiny_qwen2(seed=1))
    assert reference != fingerprint_model(tiny_qwen2().bfloat16())
    x = torch.arange(6.0)
    prints = {
        fingerprint_tensors([item])
        for item in (("a", x), ("b", x), ("a", x.view(2, 3)), ("a", x.double()), ("a", x + 1e-6))
    }
    assert len(prints) == 5


def test_the_fingerprint_of_a_tensor_without_storage_sees_its_name_shape_and_dtype() -> None:
    x = torch.empty(6, device="meta")
    assert fingerprint_tensors([("a", x)]) == fingerprint_tensors([("a", x.clone())])
    items = (("a", x), ("b", x), ("a", x.view(2, 3)), ("a", x.double()), ("a", torch.zeros(6)))
    assert len({fingerprint_tensors([item]) for item in items}) == 5


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_on_a_model_do_not_change_its_fingerprint(modules_to_save: list[str] | None) -> None:
    reference = fingerprint_model(tiny_qwen2(tie_word_embeddings=False))
    for config in (
        FrozenCoreConfig(r=2, constructor="random", modules_to_save=modules_to_save),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules_to_save),
    ):
        model = get_peft_model(tiny_qwen2(tie_word_embeddings=False), config)
        assert fingerprint_model(model) == reference
        assert fingerprint_model(model.get_base_model()) == reference


def test_a_merged_adapter_changes_the_fingerprint() -> None:
    model = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=2, constructor="random"))
    reference = fingerprint_model(model)
    model.model.model.layers[0].self_attn.q_proj.frozencore_R["default"].weight.data.fill_(0.1)
    assert fingerprint_model(model) == reference
    model.merge_adapter()
    assert fingerprint_model(model) != reference


def test_the_fingerprint_of_batches_sees_order_and_masks_but_not_key_order() -> None:
    reference = fingerprint_batches(BATCHES)
    assert reference == fingerprint_batches(iter(BATCHES))
    assert reference == fingerprint_batches([dict(reversed(batch.items())) for batch in BATCHES])
    assert reference != fingerprint_batches(BATCHES[::-1])
    assert reference != fingerprint_batches(BATCHES[:1])


def test_the_fingerprint_of_options_ignores_key_order_and_refuses_nan() -> None:
    assert fingerprint_options({"a": 1, "b": 2}) == fingerprint_options({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint_options({"a": float("nan")})
