"""Records are written whole or not at all, and say where they come from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from fixtures import LAB
from frozencore.calibration.calibrate import Calibration, LayerCalibration
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_folder, require_writable, write_json
from frozencore.maths.capture import Capture
from frozencore.tune.calibration_record import Alignment, CalibrationSummary
from frozencore.tune.provenance import Provenance, source_commit
from frozencore.tune.record import Failure, StabilityRecord, read_failure, read_record
from small_runs import RESOURCES, SCORE, made_up_record, record_content


def test_nan_and_infinity_become_null_and_paths_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": [float("inf"), 1.5], "z": Path("p"), 3: (True, None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [None, 1.5], "z": "p", "3": [True, None]}


def test_the_tokens_of_a_calibration_are_the_most_that_a_layer_received() -> None:
    layers = {name: LayerCalibration(2, 2, tokens, (1.0, 0.5), None, None) for name, tokens in (("a", 5), ("b", 9))}
    assert CalibrationSummary.of(Calibration(layers, collect_s=0.1, build_s=0.1)).num_tokens == 9


def test_a_failed_write_leaves_the_earlier_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"kept": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(ArtifactError, match=r"--out .*below cannot be written: .*file is not a writable folder"):
        require_writable(tmp_path / "file" / "below")
    require_writable(tmp_path / "new" / "newer")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f".out.{os.getpid()}.tmp").mkdir()
    with atomic_folder(tmp_path / "out", overwrite=None) as aside:
        (aside / "a").touch()
    assert (tmp_path / "out" / "a").exists()


def test_a_folder_that_is_overwritten_is_there_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def write(text: str, overwrite: bool) -> None:
        with atomic_folder(out, overwrite=overwrite) as aside:
            (aside / "config.json").write_text(text)

    write("old", overwrite=False)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(ArtifactError, match="No space left"):
            write("new", overwrite=True)
    assert ((out / "config.json").read_text(), os.listdir(tmp_path)) == ("old", ["out"])
    write("new", overwrite=True)
    assert ((out / "config.json").read_text(), os.listdir(tmp_path)) == ("new", ["out"])
    (tmp_path / "late").mkdir()
    with pytest.raises(ArtifactError, match="is there already"), atomic_folder(tmp_path / "late", overwrite=False):
        (tmp_path / "late" / "config.json").write_text("another's")
    assert (tmp_path / "late" / "config.json").read_text() == "another's"


def test_provenance_names_versions_machine_and_commit() -> None:
    source = Provenance.here()
    assert source.versions["torch"]
    assert source.num_threads >= 1
    commit = source_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_provenance_names_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Provenance.here("cpu").device
    assert torch.backends.cpu.get_cpu_capability() in processor
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: ["first", "second"][place.index or 0])
    named = {name: Provenance.here(name).device for name in ("auto", "cuda", "cuda:1", "cpu", "no device")}
    assert named == {"auto": "first", "cuda": "first", "cuda:1": "second", "cpu": processor, "no device": processor}
    assert Provenance.here(torch.device("cuda:1")).device == "second"


ALL_RECORDS = sorted((LAB / "results").glob("*/records.jsonl"))


@pytest.mark.parametrize("index", ALL_RECORDS, ids=lambda path: path.parent.name)
def test_records_of_campaigns_are_read_and_written_as_they_were(index: Path) -> None:
    lines = index.read_text().splitlines()
    assert lines
    for line in lines:
        record = read_record(line)
        assert json.loads(json.dumps(record.content())) == json.loads(line)
        assert isinstance(record, StabilityRecord) == ("cosine_P" in json.loads(line))
        assert isinstance(record, StabilityRecord) or len(record.hashes.model) == 64


def test_what_a_later_version_adds_is_kept_and_what_is_not_there_is_not_made_up() -> None:
    values = {"later": [1, {"x": None}], "resources": {**RESOURCES, "step_s": None, "fans": 3}}
    record = made_up_record({"task": "svamp"}, **values)
    assert record.content() == record_content({"task": "svamp"}, **values)
    assert (record.resources.step_s, record.selection) == (None, None)
    assert "selection" not in record.content()


def test_a_number_that_was_not_finite_is_there_and_none() -> None:
    diverged, text = made_up_record({"task": "a"}, held_out_loss=None), made_up_record({"task": "a"}, accuracy=...)
    assert (diverged.has("held_out_loss"), diverged.held_out_loss) == (True, None)
    assert (text.has("accuracy"), text.accuracy) == (False, None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"accuracy": "high"}, "accuracy: input should be a valid number"),
        ({"training": {"num_steps": -1}}, "training.num_steps: input should be greater than or equal to 0"),
        ({"seed": ...}, "seed: field required"),
        ({"score": {**SCORE, "standard_error": None}}, "score.standard_error: input should be a valid number"),
        ({"hashes": {"model": 3, "a\nb": 1}}, "hashes.model: input should be a valid string"),
        ({"cosine_P": 0.5}, "cosine_Q: field required"),
    ],
)
def test_damage_is_named_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        made_up_record({"task": "svamp"}, **wrong)


def test_a_failure_is_read_as_it_was_written() -> None:
    failure = Failure(reason="diverged", message="at step 3", config={"rank": 4}, provenance=Provenance.here("cpu"))
    assert read_failure(json.dumps(failure.content())) == failure
    with pytest.raises(ValueError, match="^reason: field required$"):
        read_failure('{"message": ""}')


LAYERS = {
    "a": Capture(3.0, 5.0, (0.5, 0.4, 0.3, 0.2, 0.1), 1.0, 2.0, 10.0),
    "b": Capture(4.0, 12.0, (0.8, 0.1, 1e-9), 0.75, 4.0, math.inf),
    "silent": Capture(0.0, 0.0, (0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 6.0, math.inf),
}
J = [0.55, 0.65 + 1e-18, 0.0]


@pytest.fixture
def alignment() -> Alignment:
    found = Alignment.of(LAYERS)
    assert found is not None
    return found


def test_the_promised_decrease_adds_up_and_gradients_are_one_norm(alignment: Alignment) -> None:
    assert pytest.approx(sum(J)) == alignment.J
    assert alignment.J_share == pytest.approx(sum(J) / 1.75)
    assert alignment.gradient == pytest.approx(5)
    assert alignment.gradient_share == pytest.approx(5 / 13)
    assert alignment.damping == 1e-3
    assert Alignment.model_validate_json(json.dumps(alignment.content())) == alignment
    assert Alignment.of({}) is None


def test_spectra_ranks_and_spreads_are_medians(alignment: Alignment) -> None:
    assert alignment.leading == pytest.approx((0.5, 0.1, 1e-9))  # as far as every layer goes
    assert alignment.last == pytest.approx(median([0.1, 1e-9, 0.0]))
    assert alignment.effective_rank == 2
    assert alignment.participation == pytest.approx(LAYERS["b"].participation)
    assert (alignment.input_spread, alignment.error_spread) == (4.0, None)


def test_layers_stand_side_by_side_in_few_digits(alignment: Alignment) -> None:
    layers = alignment.layers
    assert layers.name == ("a", "b", "silent")
    assert pytest.approx(J) == layers.J
    assert layers.leading == ((0.5, 0.4, 0.3, 0.2), (0.8, 0.1, 1e-9), (0.0,) * 4)
    assert layers.effective_rank == (5, 2, 0)
    assert layers.error_spread == (10.0, None, None)
    third = Alignment.of({"x": Capture(1 / 3, 1.0, (1 / 3,), 1.0, 1 / 3, 1.0)})
    assert third is not None
    assert (third.layers.gradient, third.gradient) == ((0.333333,), 1 / 3)
    assert {len(column) for column in layers.content().values()} == {3}
