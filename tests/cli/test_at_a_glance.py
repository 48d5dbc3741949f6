"""What ``doctor`` finds sound at a glance, the thorough look finds sound too, and says in the same words."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapted import adapted
from frozencore import save_basis
from frozencore.cli import adapter_findings, at_a_glance
from frozencore.cli.findings import Finding

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Look = Callable[[Path], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model = adapted("fcca", trained=True, coordinates="qr")
    model.save_pretrained(str(folder / "adapter"))
    save_basis(model, folder / "cores" / "basis")
    model.save_pretrained(str(folder / "cores"))
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def glance(look: Look, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding] | None:
    """What is found without the thorough look; None where that would be taken."""

    def thorough(_: Path) -> Any:
        raise AssertionError("thorough")

    with monkeypatch.context() as patched:
        for name in ("adapter", "basis", "baseline"):
            patched.setattr(adapter_findings, name, thorough)
        try:
            return list(look(path))
        except AssertionError:
            return None


@pytest.mark.parametrize(("name", "kind"), [("adapter", "adapter"), ("cores", "adapter"), ("cores/basis", "basis")])
def test_of_what_is_sound_both_looks_say_the_same(
    name: str, kind: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = glance(getattr(at_a_glance, kind), made / name, monkeypatch)
    assert found == list(getattr(adapter_findings, kind)(made / name))
    assert found
    assert all(finding.sound for finding in found)


ODD = (None, True, -1, 1.5, "x", ["x", 1], {"x": -1})


@pytest.mark.parametrize("name", [pytest.param("adapter", marks=pytest.mark.slow), "cores"])
def test_no_value_of_a_configuration_is_taken_at_a_glance_that_the_thorough_look_refuses(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied / name
    values = json.loads((folder / CONFIG).read_text())
    taken = 0
    keys = [*(values if name == "adapter" else ("basis", "basis_id")), "basis_revision", "rank_budget", "of_tomorrow"]
    changes = [{key: odd} for key in keys for odd in ODD]
    for change in changes:
        (folder / CONFIG).write_text(json.dumps(values | change))
        found = glance(at_a_glance.adapter, folder, monkeypatch)
        if found is not None:
            taken += 1
            assert found == list(adapter_findings.adapter(folder)), change
    for key in values.keys() - {"basis", "basis_revision"}:
        (folder / CONFIG).write_text(json.dumps({name: value for name, value in values.items() if name != key}))
        assert glance(at_a_glance.adapter, folder, monkeypatch) is None
    assert 0 < taken < len(changes) / 2


def first(tensors: dict[str, Tensor], part: str) -> str:
    return next(key for key in tensors if f"frozencore_{part}" in key)


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for key in list(tensors):
        tensors[key.replace(old, new)] = tensors.pop(key)


EDITS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "NaN": lambda t: t[first(t, "R")].fill_(torch.nan),
    "Inf": lambda t: t[first(t, "Q")][0].fill_(torch.inf),
    "P not orthonormal": lambda t: t[first(t, "P")].mul_(1.02),
    "one basis is zero": lambda t: t[first(t, "P")].zero_(),
    "no core": lambda t: t.pop(first(t, "R")),
    "a vector": lambda t: t.update({first(t, "P"): torch.ones(3)}),
    "a core of another rank": lambda t: t.update({first(t, "R"): torch.ones(2, 2)}),
    "whole numbers": lambda t: t.update({first(t, "R"): torch.ones(3, 3, dtype=torch.int32)}),
    "coarse": lambda t: t.update({key: X.bfloat16() for key, X in t.items()}),
    "names with ../": lambda t: rename(t, "model.layers.0", "../../x"),
    "empty": lambda t: t.clear(),
    "another core": lambda t: t[first(t, "R")].add_(1),
}


@pytest.mark.parametrize("sealed", ["file", "file and tensors"])
@pytest.mark.parametrize("edit", EDITS)
def test_no_tensors_are_taken_at_a_glance_that_the_thorough_look_refuses_whatever_the_seal_says(
    edit: str, sealed: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied / "adapter"
    tensors = load_file(folder / WEIGHTS)
    EDITS[edit](tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = json.loads((folder / CONFIG).read_text())
    values["seal"]["weights_sha256"] = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    if sealed == "file and tensors":
        values["seal"] |= {"bases_sha256": None, "cores_sha256": None}
    (folder / CONFIG).write_text(json.dumps(values))
    found = glance(at_a_glance.adapter, folder, monkeypatch)
    assert (found is not None) == (edit == "another core" and sealed == "file and tensors")
    assert found is None or found == list(adapter_findings.adapter(folder))


def test_what_opens_without_an_end_is_not_opened(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, look in (
        (copied / "adapter", WEIGHTS, at_a_glance.adapter),
        (copied / "cores" / "basis", "basis.safetensors", at_a_glance.basis),
    ):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert glance(look, folder, monkeypatch) is None


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("basis.json", "calibrated_on", "x"), ("basis.json", "format", 99), ("basis.safetensors", "", None)],
)
def test_a_basis_that_is_not_as_it_was_written_is_left_to_the_thorough_look(
    file: str, key: str, value: Any, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    basis = copied / "cores" / "basis"
    if key:
        (basis / file).write_text(json.dumps(json.loads((basis / file).read_text()) | {key: value}))
    else:
        content = bytearray((basis / file).read_bytes())
        content[-5] ^= 1
        (basis / file).write_bytes(content)
    assert glance(at_a_glance.basis, basis, monkeypatch) is None
    assert glance(at_a_glance.adapter, copied / "cores", monkeypatch) is None
