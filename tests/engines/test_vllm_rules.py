"""``frozencore check`` and vLLM agree: what it says of a directory is what vLLM does with it.

vLLM takes a directory if it loads it and answers as PEFT does in float64.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures import ROOT
from frozencore.adapter.export.serving import RUN, VLLM_MAX_RANKS
from serving import DIRECTORIES, ForeignLora, RefusedError, VllmServer, environment_of, serves_right
from tiny import tiny_gpt2

pytestmark = pytest.mark.slow

RANKS = """
import json, typing
from vllm.config.lora import MaxLoRARanks
print(json.dumps(typing.get_args(MaxLoRARanks)))
"""


@pytest.mark.parametrize("name", DIRECTORIES)
def test_vllm_takes_what_the_check_says_it_takes_and_nothing_else(
    name: str, vllm: VllmServer, foreign: dict[str, ForeignLora]
) -> None:
    lora = foreign[name]
    try:
        vllm.load(name, lora.folder)
        served = serves_right(lambda prompt: vllm.ask(name, prompt, 16), lora)
        vllm.unload(name)
    except RefusedError:
        served = False
    assert ("vLLM" in lora.report.engines) == served


def test_vllm_has_no_lora_for_conv1d_models(base: Path, tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "gpt2")
    server = VllmServer(tmp_path / "gpt2", tmp_path / "log", "--enable-lora")
    with pytest.raises(RefusedError, match="ended with 1"), server:
        pass
    assert "GPT2LMHeadModel does not support LoRA" in server.log.read_text()


def test_the_maximum_ranks_are_vllms_own() -> None:
    python = environment_of("vllm") / "bin" / "python"
    done = subprocess.run([python, "-c", RANKS], capture_output=True, text=True, check=True)
    assert tuple(json.loads(done.stdout.splitlines()[-1])) == VLLM_MAX_RANKS


@pytest.mark.parametrize("engine", ["vLLM", "llama.cpp"])
def test_the_version_that_the_rules_name_is_the_one_that_is_run(engine: str) -> None:
    assert RUN[engine] in (ROOT / "engines" / f"{engine.lower()}.txt").read_text().split()
