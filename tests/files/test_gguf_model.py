"""A GGUF file wherever a model is named: what is read is what was written, and what cannot be read is one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from frozencore.errors import ModelError
from frozencore.files import gguf_model
from frozencore.files.fingerprint import fingerprint_model
from frozencore.tune.load import load_config, load_model, load_tokenizer

pytest.importorskip("gguf")
from input_files import pocket_tokenizer, tiny_model, write_gguf

KINDS = ("llama", "qwen2", "gemma3")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_tokens_are_those_that_were_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tiny_model(kind)
    file = write_gguf(written, tmp_path / "tiny.gguf")
    model, tokenizer = load_model(str(file), device="cpu")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(model(ids).logits, written(ids).logits)
    text = "Tom has 17 books.\n\nHe  buys 4."
    assert tokenizer(text)["input_ids"] == pocket_tokenizer()(text)["input_ids"]
    assert fingerprint_model(model) == fingerprint_model(written)
    assert load_config(str(tmp_path)).hidden_size == 32  # the folder of one file stands for it
    assert load_tokenizer(str(file)).chat_template == pocket_tokenizer().chat_template
    assert capsys.readouterr().err == ""
    model.save_pretrained(tmp_path / "saved")
    halved, _ = load_model(str(file), dtype="bfloat16", device="cpu")
    assert torch.equal(halved.lm_head.weight, written.lm_head.weight.bfloat16())


def test_digits_are_cut_as_the_vocabulary_was_learned(tmp_path: Path) -> None:
    """SmolLM2's own tokenizer.json puts ``Digits(individual_digits=True)`` first; a GGUF file names that ``smollm``."""
    file = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", pre="smollm")
    backend = load_tokenizer(str(file)).backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a\n\n12 b")]
    assert pieces == ["a", "ĊĊ", "1", "2", "Ġb"]


def test_every_damage_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "several").mkdir()
    for name in ("a", "b"):
        (tmp_path / "several" / f"{name}.gguf").write_bytes(whole)
    (tmp_path / "not.gguf").write_bytes(b"PK" + whole)
    for length in (30, 3000, len(whole) // 2, len(whole) - 40):
        (tmp_path / f"cut{length}.gguf").write_bytes(whole[:length])
        for load in (load_model, load_config, load_tokenizer):
            with pytest.raises(ModelError, match=rf"its {length:,} bytes are not a whole GGUF file. Download it again"):
                load(str(tmp_path / f"cut{length}.gguf"))
    with pytest.raises(ModelError, match="holds a.gguf, b.gguf. Name the file"):
        load_model(str(tmp_path / "several"))
    with pytest.raises(ModelError, match="begins with the letters GGUF, but .*not.gguf does not"):
        load_model(str(tmp_path / "not.gguf"))
    with pytest.raises(FileNotFoundError):  # a line of the command already
        load_model(str(tmp_path / "no.gguf"))
    unknown = write_gguf(tiny_model("llama"), tmp_path / "unknown.gguf", architecture="nobody")
    with pytest.raises(ModelError, match="transformers reads no such GGUF file: .*nobody"):
        load_model(str(unknown))
    monkeypatch.setattr("frozencore.files.gguf_file.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'frozencore\[gguf\]'"):
        load_model(str(tmp_path / "tiny.gguf"))


def test_a_file_is_unpacked_once_and_an_adapter_goes_on_it_in_each_dtype(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tiny_model("llama")
    file = write_gguf(written, tmp_path / "tiny.gguf", quantised=True)
    with pytest.warns(UserWarning, match=r"tiny.gguf is unpacked, once .*rm -r .*cache"):
        first, _ = load_model(str(file), device="cpu")
    (folder,) = (cache / "frozencore/gguf").iterdir()
    of_folder, _ = load_model(str(folder), device="cpu")
    assert first.dtype == of_folder.dtype
    assert first.config.dtype == of_folder.config.dtype == torch.bfloat16
    assert load_config(str(file)).dtype == torch.bfloat16  # by which a dry run estimates the memory
    copied = file.with_name("copied.gguf")
    copied.write_bytes(file.read_bytes())
    with monkeypatch.context() as patched, warnings.catch_warnings(action="error"):
        patched.setattr(gguf_model, "unpack", Mock(side_effect=AssertionError))
        second, tokenizer = load_model(str(copied), device="cpu")
    assert (first.name_or_path, second.name_or_path) == (str(file), str(copied))
    assert tokenizer("Tom has 17 books.")["input_ids"] == pocket_tokenizer()("Tom has 17 books.")["input_ids"]
    whole, _ = load_model(str(file), dtype="float32", device="cpu")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, written.state_dict()[name], rtol=0.02, atol=0.02)
        for other in (first, second, of_folder):
            assert torch.equal(other.state_dict()[name].float(), value)


def test_where_the_cache_cannot_be_written_the_file_is_unpacked_and_that_is_said(tmp_path: Path, cache: Path) -> None:
    cache.write_text("no folder")
    file = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", quantised=True)
    with pytest.warns(UserWarning, match="unpacked at each start, because .*cannot be written"):
        assert load_model(str(file), device="cpu")[0].name_or_path == str(file)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_run_on_a_gguf_file_is_quiet_scored_again_and_exported(
    kind: str, command: Command, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tiny_model(kind), tmp_path / "tiny.gguf")
    said = re.compile(r"Warning: tiny.gguf is unpacked, once .*\n")  # and nothing of other libraries
    few = ("--num-train", "16", "--num-evaluation", "4", "--calibration-size", "8", "--epochs", "1", "--device", "cpu")
    status, _, err = command(
        "tune", "--model", file, "--task", "pocket-sentiment", "--rank", "2", *few, "--out", tmp_path / "run"
    )
    assert status == 0, err
    assert said.fullmatch(err), err
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert fingerprint_model(tiny_model(kind)) in json.dumps(record)
    shutil.rmtree(cache)
    status, _, err = command("export", tmp_path / "run", "--out", tmp_path / "first")  # which reads no weights
    assert status == 0, err
    assert said.fullmatch(err), err
    fresh = (
        "--task",
        "pocket-sentiment",
        "--rank",
        "2",
        "--num-train",
        "16",
        "--num-evaluation",
        "4",
        "--calibration-size",
        "8",
    )
    status, out, err = command("calibrate", "--model", file, *fresh, "--device", "cpu", "--out", tmp_path / "basis")
    assert status == 0, err
    assert "config file" not in out + err
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    scored = ("--task", "pocket-sentiment", "--num-evaluation", "4", "--device", "cpu", "--out", tmp_path / "scores")
    status, _, err = command("evaluate", "--model", file, "--adapter", adapter, *scored)
    assert status == 0, err
    status, _, err = command("export", adapter, "--to", "merged", "--out", tmp_path / "merged")
    assert status == 0, err
    merged, _ = load_model(str(tmp_path / "merged"), device="cpu")
    assert fingerprint_model(merged) != fingerprint_model(tiny_model(kind))
    status, out, err = command("export", adapter, "--to", "lora", "--out", tmp_path / "lora")
    assert status == 0, err
    assert "vLLM: --enable-lora" in out


def test_of_several_processes_one_unpacks_and_what_a_killed_one_left_is_removed(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    left = cache / "frozencore/gguf/.0123456789abcdef.00ff00ff.tmp"
    left.mkdir(parents=True)
    program = "import sys; from frozencore.files.hub import safe_loading; safe_loading(sys.argv[1])"
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(file)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "".join(said).count("tiny.gguf is unpacked, once") == 1
    assert len([*left.parent.iterdir()]) == 1
