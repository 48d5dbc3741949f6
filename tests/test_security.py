"""The promises of SECURITY.md, checked in the source and on the real code."""

from __future__ import annotations

import ast
import json
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import frozencore
from frozencore.errors import ModelError
from frozencore.files.hub import safe_loading
from frozencore.tune.load import load_config, load_model, load_tokenizer
from frozencore.tune.pocket import pocket_model_path

PACKAGE = Path(frozencore.__file__).parent
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "ctypes", "urllib", "http", "requests",
    "httpx", "ftplib", "smtplib", "wandb", "mlflow", "sentry_sdk", "posthog",
}  # fmt: skip


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]


def test_the_source_neither_evaluates_text_nor_reads_pickles() -> None:
    for path, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called == "torch.load" and "weights_only=True" in map(ast.unparse, node.keywords):
                continue  # a LoRA's .bin: tensors alone
            assert called not in {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load"}, (
                f"{path}:{node.lineno}"
            )


def test_the_source_imports_no_pickle_no_network_client_and_no_telemetry() -> None:
    for path, node in nodes():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if path.name == "cost.py" and names == ["ctypes"]:
            continue  # calls malloc_trim of the C library that Python runs on, and loads no other
        assert not {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES, f"{path}: {names}"


def test_the_source_never_trusts_code_of_a_repository() -> None:
    found = []
    for path, node in nodes():
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) == "False", path
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            found.append(path.name)
    assert set(found) == {"hub.py"}
    assert safe_loading(str(pocket_model_path()))["trust_remote_code"] is False


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer])
def test_code_in_a_model_folder_is_never_run(load: Callable[[str], object], tmp_path: Path) -> None:
    entries = {f"Auto{kind}": f"theirs.Their{kind}" for kind in ("Config", "Model", "ModelForCausalLM", "Tokenizer")}
    config = {"model_type": "theirs", "auto_map": entries, "architectures": ["TheirModelForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}, "tokenizer_class": "TheirTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError):
        load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_run_on_local_files_opens_no_connection(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training, scoring, exporting and inspecting, with every way out of the machine watched."""
    attempts: list[object] = []

    def refuse(*words: object, **_: object) -> None:
        attempts.append(words)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    words = ["--model", pocket_model_path(), "--task", "pocket-sentiment", "--rank", "4", "--calibration-size", "16"]
    few = ["--num-train", "16", "--num-evaluation", "10", "--epochs", "1", "--batch-size", "8"]
    adapter = tmp_path / "run" / "adapter"
    for line in (
        ["tune", *words, *few, "--output", tmp_path / "run"],
        ["evaluate", "--model", pocket_model_path(), "--adapter", adapter, "--task", "pocket-sentiment",
         "--num-evaluation", "10", "--output", tmp_path / "scores"],
        ["export", adapter, "--to", "lora", "--output", tmp_path / "lora"],
        ["export", adapter, "--to", "merged", "--base", pocket_model_path(), "--output", tmp_path / "merged"],
        ["inspect", tmp_path / "run"],
    ):  # fmt: skip
        status, _, errors = command(*line)
        assert (status, attempts) == (0, []), errors
