"""The moments file: what goes in comes out, and moments of another origin are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ArtifactError
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from frozencore_lab.campaign.moments_file import MomentsFingerprint, fingerprint_batches, load_moments, save_moments
from tiny import attention_names, batches_of, draw_examples, tiny_qwen2

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
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


def test_the_fingerprint_of_batches_ignores_the_order_of_keys_alone() -> None:
    reference = fingerprint_batches(BATCHES)
    assert reference == fingerprint_batches([dict(reversed(batch.items())) for batch in BATCHES])
    assert reference not in (fingerprint_batches(BATCHES[::-1]), fingerprint_batches(BATCHES[:1]))


@pytest.mark.parametrize(
    "part",
    ["model", "data", "options"],
)
def test_moments_of_something_else_are_refused(part: str, written: tuple) -> None:
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
    with pytest.raises(ArtifactError, match=f"differ from the run's in {part}"):
        load_moments(path, MomentsFingerprint.of(model, batches, options))


@pytest.mark.parametrize("damage", [lambda _: b"", lambda content: content[:200], lambda content: content[:-1]])
def test_what_is_no_whole_file_of_moments_is_refused(damage: Callable[[bytes], bytes], written: tuple) -> None:
    path, _, _ = written
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtifactError, match="is damaged"):
        load_moments(path)


@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.integers(0, 2**40), st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1)),
        max_size=4,
    ),
    NAMES,
)
def test_moments_come_back_as_they_were_under_any_layer_names(layers: dict[str, Any], data: str) -> None:
    moments = {
        name: LayerMoments(count, input_square=torch.tensor(values, dtype=torch.float32))
        for name, (count, values) in layers.items()
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        fingerprint = MomentsFingerprint("model", data, {"tokens": "all"})
        save_moments(path, moments, fingerprint)
        loaded = load_moments(path, fingerprint)
    assert list(loaded) == list(moments)
    for name, layer in moments.items():
        assert loaded[name].num_tokens == layer.num_tokens
        assert torch.equal(loaded[name].input_square, layer.input_square)


def test_the_same_moments_are_the_same_bytes(written: tuple, tmp_path: Path) -> None:
    path, moments, fingerprint = written
    for name in "abcd":
        save_moments(tmp_path / name, moments, fingerprint)
        assert (tmp_path / name).read_bytes() == path.read_bytes()
