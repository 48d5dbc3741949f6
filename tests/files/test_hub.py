"""A hub id with no hub in reach: at once one line, or what the cache holds."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model

from frozencore import FrozenCoreConfig, basis_id, export_lora, load_basis, save_basis
from frozencore.adapter.export.merged import export_merged
from frozencore.errors import ArtifactError, ModelError
from frozencore.files.hub import safe_loading
from frozencore.files.hub_client import HUB_TIMEOUT_S, hub_answers
from frozencore.tune.load import load_config, load_model, load_tokenizer
from frozencore.tune.pocket import pocket_model_path
from tiny import adapted, set_values, tiny_qwen2

NOWHERE = "http://127.0.0.1:9"
COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a hub that refuses connections."""
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    adapted("random", trained=True).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def put_into_cache(cache: Path, model: Path) -> Path:
    """As the hub's client lays out ``org/name``; the folder of its files."""
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(model, repository / "snapshots" / COMMIT))


@pytest.mark.parametrize("name", ["org/name", "name", "a b", "x\ny", "org/..", "-/-"])
@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer, load_basis])
def test_what_is_neither_here_nor_cached_is_one_line_at_once(load: Callable[[str], object], name: str) -> None:
    started = time.monotonic()
    with pytest.raises((ModelError, ArtifactError)):
        load(name)
    assert time.monotonic() - started < HUB_TIMEOUT_S


@pytest.mark.parametrize("form", ["lora", "merged"])
@pytest.mark.parametrize("missing", ["base", "adapter"])
def test_an_export_of_what_is_neither_here_nor_cached_is_one_line_at_once(
    missing: str, form: str, command: Callable[..., tuple[int, str, str]], adapter: Path, tmp_path: Path
) -> None:
    words = [adapter, "--base", "org/name"] if missing == "base" else ["org/name"]
    started = time.monotonic()
    status, _, errors = command("export", *words, "--to", form, "--out", tmp_path / "out")
    assert time.monotonic() - started < HUB_TIMEOUT_S
    assert (status, errors.count("\n")) == (2, 1)
    assert re.search("(Model|No adapter or basis at) org/name.* (nor|not) in the offline cache", errors)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("holds", ["all factors", "cores and their basis"])
def test_a_cached_adapter_is_exported_by_its_hub_id_as_its_folder_is(
    holds: str, cache: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    model, folder = adapted("random", trained=True), tmp_path / "saved"
    if holds != "all factors":
        save_basis(model, folder / "basis")
    model.save_pretrained(str(folder))
    put_into_cache(cache, folder)
    assert command("export", "org/name", "--out", tmp_path / "by id")[0] == 0
    assert command("export", folder, "--out", tmp_path / "by folder")[0] == 0
    weights = "adapter_model.safetensors"
    assert (tmp_path / "by id" / weights).read_bytes() == (tmp_path / "by folder" / weights).read_bytes()


def test_a_basis_beside_an_adapter_is_found_in_the_cache_that_is_given(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    save_basis(model, tmp_path / "saved/basis")
    model.save_pretrained(str(tmp_path / "saved"))
    folder = put_into_cache(tmp_path / "own cache", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    config = FrozenCoreConfig.from_pretrained("org/name", cache_dir=str(tmp_path / "own cache"))
    assert config.basis == str(folder / "basis")


def test_of_an_adapter_on_the_hub_its_files_alone_are_asked_for(
    adapter: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(adapter)

    monkeypatch.setattr("frozencore.files.hub_client.hub_answers", lambda *_: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert command("export", "org/name", "--out", tmp_path / "out")[0] == 0
    assert (asked["name"], asked["local_files_only"]) == ("org/name", False)
    patterns = asked["allow_patterns"]
    assert {"adapter_config.json", "adapter_model.safetensors", "basis/basis.json"} <= set(patterns)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(patterns)
    assert not any("*" in pattern or pattern.endswith(".bin") for pattern in patterns)


def test_a_cached_model_needs_no_hub(cache: Path, adapter: Path, tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    put_into_cache(cache, tmp_path / "base")
    export_lora(adapter, tmp_path / "lora", base="org/name")
    export_merged(adapter, tmp_path / "merged", base="org/name")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize("export", [export_lora, export_merged])
def test_an_adapter_is_exported_on_the_revision_of_its_base_model(
    export: Callable[..., object], cache: Path, adapter: Path, tmp_path: Path
) -> None:
    for revision, size in (("main", {"hidden_size": 48}), ("v2", {})):
        tiny_qwen2(**size).save_pretrained(tmp_path / revision)
    files = put_into_cache(cache, tmp_path / "main")
    shutil.copytree(tmp_path / "v2", files.with_name("1" * 40))
    (files.parents[1] / "refs" / "v2").write_text("1" * 40)
    set_values(adapter, base_model_name_or_path="org/name", revision="v2")
    export(adapter, tmp_path / "out")
    with pytest.raises((ArtifactError, ModelError)):
        export(adapter, tmp_path / "other", base="org/name")


def test_a_merged_model_whose_base_has_no_tokenizer_is_written_with_a_warning(
    cache: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError("Can't load tokenizer for 'org/name'.")  # as transformers raises it, without a number

    tiny_qwen2().save_pretrained(tmp_path / "base")
    put_into_cache(cache, tmp_path / "base")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.warns(UserWarning, match="The export has no tokenizer, because that of org/name cannot be read"):
        export_merged(adapter, tmp_path / "merged", base="org/name")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.fixture
def hub_without_repositories(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that answers 404 to everything; the paths it was asked for."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked
        server.shutdown()


def test_a_hub_that_answers_is_the_loaders_to_ask_whatever_it_says(hub_without_repositories: list[str]) -> None:
    """The loader then reports the hub's answer (no such model, no access) in the hub's words."""
    where = {"pretrained_model_name_or_path": "org/name", "revision": "main"}
    assert safe_loading("org/name") == {**where, "local_files_only": False, "trust_remote_code": False}
    assert hub_answers("dataset", "org/rows")
    assert ["/api/models/org/name" in path for path in hub_without_repositories] == [True, False]


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_cached_model_that_lacks_a_file_is_one_line_at_once(missing: str, cache: Path) -> None:
    (put_into_cache(cache, Path(pocket_model_path())) / missing).unlink()
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model("org/name", device="cpu")
    assert time.monotonic() - started < HUB_TIMEOUT_S
    assert "org/name" in str(caught.value)


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer])
def test_code_in_a_hub_repository_is_never_run(load: Callable[[str], object], cache: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(pocket_model_path(), theirs)
    (theirs / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    entries = {f"Auto{kind}": f"theirs.Their{kind}" for kind in ("Config", "Model", "ModelForCausalLM")}
    (theirs / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": entries}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}, "tokenizer_class": "TheirTokenizer"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    put_into_cache(cache, theirs)
    with pytest.raises(ModelError):
        load("org/name")
    assert not (tmp_path / "ran").exists()


def test_a_basis_of_a_hub_id_is_taken_from_the_cache_and_its_cores_name_it(cache: Path, tmp_path: Path) -> None:
    model = adapted("random")
    own = save_basis(model, tmp_path / "basis")
    put_into_cache(cache, tmp_path / "basis")
    assert load_basis("org/name").id == own
    on_it = get_peft_model(tiny_qwen2(), FrozenCoreConfig(basis="org/name", basis_revision="main"))
    on_it.save_pretrained(str(tmp_path / "cores"))
    shutil.rmtree(tmp_path / "basis")
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "cores"))
    assert (loaded.peft_config["default"].basis, loaded.peft_config["default"].basis_id) == ("org/name", own)
    assert basis_id(loaded) == basis_id(model) == own


def test_a_cached_adapter_is_loaded_with_the_basis_beside_it(cache: Path, tmp_path: Path) -> None:
    model = adapted("random")
    save_basis(model, tmp_path / "saved" / "basis")
    model.save_pretrained(str(tmp_path / "saved"))
    files = put_into_cache(cache, tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")  # where its configuration says that the basis is
    assert FrozenCoreConfig.from_pretrained("org/name").basis == str(files / "basis")


def test_what_the_hub_says_of_a_basis_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("It is not there, " * 20 + "and that is all")

    monkeypatch.setattr("frozencore.files.hub_client.hub_answers", lambda *_: False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ArtifactError, match=r"and that is all\). Give the folder of a saved one"):
        load_basis("org/absent")


def test_a_name_that_is_no_folder_is_told_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants/run.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("frozencore.files.hub_client.hub_answers", lambda *_, **__: False)
    with pytest.raises(ArtifactError, match=r"at tenants/anna: it is neither a folder \(tenants holds run.yaml\) nor"):
        load_basis("tenants/anna")
    with pytest.raises(ArtifactError, match=r"at somebody/anna: it is neither a folder nor"):
        load_basis("somebody/anna")


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer])
def test_an_adapter_beside_a_model_is_not_loaded_with_it_in_silence(
    load: Callable[[str], object], adapter: Path, tmp_path: Path
) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "both")
    for file in adapter.iterdir():
        shutil.copy(file, tmp_path / "both")
    with pytest.raises(ModelError, match=r"both holds one \(adapter_config.json\), which transformers would add to it"):
        load(str(tmp_path / "both"))
