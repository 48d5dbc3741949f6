"""The moments file: what goes in comes out, and whatever does not belong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, LayerMoments], MomentsFingerprint]:
    model = tiny_qwen2()
    moments = collect_moments(model, BATCHES, attention_names(model), needs=frozenset(MOMENT_NAMES))
    fingerprint = MomentsFingerprint.of(model, BATCHES)
    path = tmp_path / "deep" / "moments.safetensors"
    save_moments(path, moments, fingerprint)
    return path, moments, fingerprint


def test_grouping_device_and_short_names_do_not_change_what_moments_are_of() -> None:
    def of(**options: Any) -> MomentsFingerprint:
        return MomentsFingerprint.of(tiny_qwen2(), BATCHES, CalibrationOptions(**options))

    assert of(group_size=1, stats_device="cpu") == of()
    assert of(weighting="token_sum") != of()


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
    with pytest.raises(ArtifactError, match=message):
        load_moments(path, MomentsFingerprint.of(model, batches, options))


ORIGIN = {"model": "a", "data": "b", "options": {}}


def write_ours(path: Path, tensors: dict[str, torch.Tensor], said: dict, **changed: Any) -> None:
    """A file with the right hash, whatever it says."""
    content = {name: said.get(name) for name in ("fingerprint", "num_tokens")}
    header = {"format": FORMAT, **said, "content_sha256": _hash_of(content, tensors), **changed}
    save_file(tensors, path, metadata={KEY: json.dumps(header)})


def changed(change: Callable[[bytearray], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(content: bytearray, place: int) -> bytes:
    content[place] ^= 1
    return content


def said(
    tokens: Any, fingerprint: Any = ORIGIN, key: str = "x/input_square", value: float = 1.0, **more: Any
) -> Callable[[Path], object]:
    tensors = {key: torch.tensor([1.0, value])}
    return lambda path: write_ours(path, tensors, {"num_tokens": tokens, "fingerprint": fingerprint}, **more)


def count_one_more(path: Path) -> None:
    header = json.loads(safe_open(path, framework="pt").metadata()[KEY])
    header["num_tokens"] = {name: count + 1 for name, count in header["num_tokens"].items()}
    save_file(load_file(path), path, metadata={KEY: json.dumps(header)})


def metadata(content: dict[str, str] | None) -> Callable[[Path], object]:
    return lambda path: save_file({"weight": torch.ones(2)}, path, metadata=content)


NOT_OURS = "is not a moments file of this version"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda path: path.unlink(), "There is no moments file at .*frozencore calibrate"),
    "empty": (changed(lambda _: b""), "is damaged .*Calibrate again"),
    "cut in the header": (changed(lambda content: content[:200]), "is damaged .*Calibrate again"),
    "cut at the end": (changed(lambda content: content[:-1]), "is damaged .*Calibrate again"),
    "garbage": (changed(lambda _: bytes(range(256)) * 9), "is damaged"),
    "a flipped bit at the end": (changed(lambda content: flipped(content, -5)), "damaged"),
    "a flipped bit in the header": (changed(lambda content: flipped(content, 400)), "damaged|unknown tensor"),
    "other token counts": (count_one_more, "content has another hash"),
    "no hash": (said({"x": 3}, {}, content_sha256=None), "content has another hash"),
    "no metadata": (metadata(None), NOT_OURS),
    "metadata of others": (metadata({"format": "pt"}), NOT_OURS),
    "an older format": (metadata({"format": "frozencore-moments-1"}), NOT_OURS),
    "a newer format": (metadata({KEY: '{"format": 3}'}), NOT_OURS),
    "a header of nothing": (metadata({KEY: "{}"}), NOT_OURS),
    "a fingerprint that is a text": (said({}, "not an object"), "damaged"),
    "token counts that are a list": (said([], {}), "damaged"),
    "a token count in words": (said({"x": "three"}, {}), "damaged"),
    "options that are a list": (said({"x": 3}, {"model": "a", "data": "b", "options": []}), "damaged"),
    "a fingerprint without a model": (said({"x": 3}, {}), "damaged"),
    "an unknown moment": (said({"x": 3}, key="x/nonsense"), "unknown tensor 'x/nonsense'"),
    "an unknown layer": (said({"x": 3}, key="y/cross"), "unknown tensor 'y/cross'"),
    "NaN": (said({"x": 3}, value=float("nan")), "NaN or Inf in 'x/input_square'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_file_of_ours_is_refused_in_one_line(case: str, written: tuple) -> None:
    path, _, _ = written
    craft, message = REFUSED[case]
    craft(path)
    with pytest.raises(ArtifactError, match=message):
        load_moments(path, MomentsFingerprint("a", "b", {}) if "fingerprint" in case or "list" in case else None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_saved_and_the_earlier_file_stays(value: float, written: tuple) -> None:
    path, moments, fingerprint = written
    before = path.read_bytes()
    next(iter(moments.values())).cross[0, 0] = value
    with pytest.raises(ArtifactError, match=r"'model\.layers\.0\.\S+q_proj/cross' holds NaN or Inf.*not written"):
        save_moments(path, moments, fingerprint)
    assert path.read_bytes() == before


def test_the_same_moments_are_the_same_bytes(written: tuple, tmp_path: Path) -> None:
    path, moments, fingerprint = written
    for name in "abcd":
        save_moments(tmp_path / name, moments, fingerprint)
        assert (tmp_path / name).read_bytes() == path.read_bytes()


# --------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_of_a_model_sees_every_bit_name_shape_and_dtype() -> None:
    reference = fingerprint_model(tiny_qwen2())
    assert reference == fingerprint_model(tiny_qwen2())
    assert reference != fingerprint_model(tiny_qwen2(seed=1))
    assert reference != fingerprint_model(tiny_qwen2().bfloat16())
    for x in (torch.arange(6.0), torch.empty(6, device="meta")):
        other = x + 1e-6 if not x.is_meta else torch.zeros(6)
        items = (("a", x), ("b", x), ("a", x.view(2, 3)), ("a", x.double()), ("a", other))
        assert len({fingerprint_tensors([item]) for item in items}) == 5
        assert fingerprint_tensors([("a", x)]) == fingerprint_tensors([("a", x.clone())])


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
        for name, parameter in model.named_parameters():
            if "frozencore_R" in name or "lora_B" in name:
                parameter.data.fill_(0.1)
        assert fingerprint_model(model) == reference
        model.merge_adapter()
        assert fingerprint_model(model) != reference


def test_the_fingerprint_of_batches_and_of_options_ignores_the_order_of_keys_alone() -> None:
    reference = fingerprint_batches(BATCHES)
    assert reference == fingerprint_batches([dict(reversed(batch.items())) for batch in BATCHES])
    assert reference not in (fingerprint_batches(BATCHES[::-1]), fingerprint_batches(BATCHES[:1]))
    assert fingerprint_options({"a": 1, "b": 2}) == fingerprint_options({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint_options({"a": float("nan")})
