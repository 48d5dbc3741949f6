"""The commands of docs/serving.md and of many tenants: the engines know each flag and request."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fixtures import ROOT
from serving import ENGINES, SETTINGS, EngineProcess, LlamaServer, VllmServer, convert, environment_of

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace("\\\n", "")
VLLM = PAGE.partition("\n## vLLM\n")[2].partition("\n## ")[0]


def _blocks(text: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


def _commands(part: str, text: str = PAGE) -> list[list[str]]:
    """The lines of a text's blocks that hold a word, as a shell would split them."""
    lines = [line.removeprefix("$ ") for block in _blocks(text) for line in block.splitlines()]
    return [shlex.split(line) for line in lines if part in line]


def _requests(port: int) -> list[tuple[str, dict[str, object] | list[object]]]:
    """Path and body of every request of the page to a server."""
    words = _commands(f"curl -s localhost:{port}")
    return [(word[2].partition(str(port))[2], json.loads(word[word.index("-d") + 1])) for word in words if "-d" in word]


def test_the_programs_of_llama_cpp_know_the_pages_flags() -> None:
    home = environment_of("llama.cpp")
    found = [words for words in _commands("$LLAMA/bin/") if words]
    programs = [words[: 1 + words[0].endswith("python")] for words in found]
    names = {Path(program[-1]).name for program in programs}
    assert names == {"convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "llama-server"}
    for words, program in zip(found, programs, strict=True):
        program = [word.replace("$LLAMA", str(home)) for word in program]
        help_ = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"{flag}\b", help_), flag


def test_vllm_knows_the_pages_flags(tmp_path: Path) -> None:
    (words,) = _commands("vllm.entrypoints.openai.api_server", VLLM)
    python = environment_of("vllm") / "bin" / "python"
    assert words[0] == str(python.relative_to(ENGINES.parent))
    command = [str(python), *words[1:3], "--help=all"]
    help_ = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", help_), flag


def test_vllm_takes_the_pages_requests(vllm: VllmServer, adapters: Path) -> None:
    vllm.load("mine", adapters / "attention-lora")
    requests = _requests(8000)
    assert requests
    for path, body in requests:
        here = {"lora_path": str(adapters / "attention-lora")} if "lora_path" in body else {}
        vllm.post(path, body | here)


def test_llama_server_takes_the_pages_requests(base: Path, adapters: Path, tmp_path: Path) -> None:
    convert({tmp_path / "base.gguf": base}, {tmp_path / "mine.gguf": (adapters / "attention-lora", base)})
    with LlamaServer(tmp_path / "base.gguf", tmp_path / "log", [tmp_path / "mine.gguf"]) as server:
        requests = _requests(8090)
        assert requests
        for path, body in requests:
            server.post(path, body)


def test_the_pages_tenants_are_calibrated_trained_and_served(  # type: ignore[no-untyped-def]
    tiny1m: Path, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    for name, answer in {"rows/anna": "red", "rows/ben": "green", "dora": "blue"}.items():
        rows = [json.dumps({"prompt": f"Colour {i}?", "completion": f" {answer}"}) + "\n" for i in range(24)]
        Path(f"{name}.jsonl").write_text("".join(rows))
    page = (ROOT / "docs" / "many-tenants.md").read_text(encoding="utf-8").replace("\\\n", "")
    part = page.partition("\n## Train and serve\n")[2].partition("\nOr serve")[0]
    texts = "\n".join(re.findall(r"^```bash\n(.*?)^```$", part, flags=re.DOTALL | re.MULTILINE)).splitlines()
    *lines, serve = [shlex.split(re.sub(r"\bMODEL\b", str(tiny1m), line)) for line in texts if line]
    settings = dict(word.split("=") for words in lines if words[0] == "export" for word in words[1:])
    for words in lines:
        if words[0] == "export":
            continue
        status, _, err = command(*words[1:])
        assert status == 0, err

    python = environment_of("vllm") / "bin" / "python"
    as_on_a_cpu = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    with EngineProcess([python, *serve[1:], *as_on_a_cpu], tmp_path / "log", SETTINGS | settings) as server:
        for name in ("anna", "dora"):
            asked = {"model": name, "prompt": "Colour 3?", "max_tokens": 4, "temperature": 0}
            said = server.post("/v1/completions", asked)["choices"][0]["text"]
            assert said.strip().startswith({"anna": "red", "dora": "blue"}[name]), (name, said)
