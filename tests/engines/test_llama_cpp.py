"""Our exports, converted by llama.cpp's own scripts and served by ``llama-server``, against float64 answers.

The server computes in float32 with a float32 cache. Tolerances as in ``test_vllm.py``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frozencore import export_lora, export_merged
from serving import (
    ADAPTERS,
    NUM_TOKENS,
    PROMPTS,
    TOLERANCE,
    LlamaServer,
    Referee,
    convert,
    environment_of,
    load_base,
    native,
    peft_of,
    worst_error,
)
from tiny import adapted, tiny_gpt2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(base: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of gguf files: ``base``, ``merged``, and every export of an adapter."""
    folder = tmp_path_factory.mktemp("gguf")
    merged = export_merged(adapters / "ragged", folder / "merged")
    models = {folder / "base.gguf": base, folder / "merged.gguf": merged}
    loras = {_file(folder, name): (adapters / name, base) for name in _exports()}
    assert set(convert(models, loras).values()) == {None}
    return folder


def _exports() -> list[str]:
    return [f"{name}-{form}" for name in ADAPTERS for form in ("lora", "bfloat16")]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.gguf"


@pytest.fixture(scope="module")
def server(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    loras = [_file(files, name) for name in _exports()]
    with LlamaServer(files / "base.gguf", tmp_path_factory.mktemp("llama.cpp") / "log", loras) as server:
        server.apply()
        yield server


def _error(server: LlamaServer, lora: Path | None, referee: Referee) -> float:
    return worst_error(lambda prompt: server.ask(prompt, NUM_TOKENS, lora), referee)


def test_the_base_model_is_served_as_transformers_computes_it(server: LlamaServer, base: Path) -> None:
    assert _error(server, None, Referee(load_base(base).double())) < TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_lora_export_answers_as_the_native_adapter(
    name: str, server: LlamaServer, files: Path, base: Path, adapters: Path
) -> None:
    lora = _file(files, f"{name}-lora")
    assert _error(server, lora, native(base, adapters / name)) < TOLERANCE
    plain = Referee(load_base(base).double())
    moved = max(plain.error(prompt, server.ask(prompt, NUM_TOKENS, lora)) for prompt in PROMPTS)
    assert moved > 1000 * TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_bfloat16_export_is_served_as_rounded_and_not_further(
    name: str, server: LlamaServer, files: Path, base: Path, adapters: Path
) -> None:
    lora = _file(files, f"{name}-bfloat16")
    rounded = peft_of(base, adapters / f"{name}-bfloat16")
    assert rounded is not None
    assert _error(server, lora, rounded) < TOLERANCE
    assert _error(server, lora, native(base, adapters / name)) < 0.03


def test_requests_at_one_time_each_get_the_adapter_that_they_name(
    server: LlamaServer, files: Path, base: Path, adapters: Path
) -> None:
    names = ("attention", "ragged")
    jobs = [(name, prompt) for prompt in PROMPTS for name in names]
    with ThreadPoolExecutor(len(jobs)) as threads:
        answers = list(threads.map(lambda job: server.ask(job[1], NUM_TOKENS, _file(files, f"{job[0]}-lora")), jobs))
    referees = {name: native(base, adapters / name) for name in names}
    for (name, prompt), answer in zip(jobs, answers, strict=True):
        assert answer.tokens == referees[name].greedy(prompt, answer.tokens)
        assert referees[name].error(prompt, answer) < TOLERANCE


def test_the_server_is_turned_from_one_adapter_to_another_while_it_runs(
    server: LlamaServer, files: Path, base: Path, adapters: Path
) -> None:
    for name in ("q and v", "attention"):
        server.apply(_file(files, f"{name}-lora"))
        assert _error(server, None, native(base, adapters / name)) < TOLERANCE
    server.apply()
    assert _error(server, None, Referee(load_base(base).double())) < TOLERANCE


def test_adapters_are_applied_at_the_start_even_if_told_not_to_be(
    files: Path, base: Path, adapters: Path, tmp_path: Path
) -> None:
    """Why docs/serving.md sets the scales instead."""
    lora = _file(files, "attention-lora")
    with LlamaServer(files / "base.gguf", tmp_path / "log", [lora], "--lora-init-without-apply") as server:
        assert _error(server, None, native(base, adapters / "attention")) < TOLERANCE
        server.apply()
        assert _error(server, None, Referee(load_base(base).double())) < TOLERANCE


def test_the_merged_export_answers_as_the_native_adapter(
    files: Path, base: Path, adapters: Path, tmp_path: Path
) -> None:
    with LlamaServer(files / "merged.gguf", tmp_path / "log") as server:
        assert _error(server, None, native(base, adapters / "ragged")) < TOLERANCE


READ = """
import json, sys
sys.path.insert(0, sys.prefix + "/src/gguf-py")
from gguf import GGUFReader
print(json.dumps({tensor.name: tensor.data.tolist() for tensor in GGUFReader(sys.argv[1]).tensors}))
"""


def test_a_square_conv1d_layer_is_converted_to_its_transpose_without_a_word(tmp_path: Path) -> None:
    """Why the export of such a layer says that it is for PEFT alone."""
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    model = adapted("random", model=tiny_gpt2(), trained=True, target_modules=["attn.c_proj"])
    assert export_lora(model, tmp_path / "lora").fan_in_fan_out
    out = tmp_path / "lora.gguf"
    assert convert({}, {out: (tmp_path / "lora", tmp_path / "gpt2")}) == {out: None}
    read = [environment_of("llama.cpp") / "bin" / "python", "-c", READ, out]
    done = subprocess.run(read, capture_output=True, text=True, check=True)
    found = {name: torch.tensor(values) for name, values in json.loads(done.stdout).items()}
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    name = "base_model.model.transformer.h.0.attn.c_proj.lora_{}.weight"
    update = written[name.format("B")] @ written[name.format("A")]
    served = found["blk.0.attn_output.weight.lora_b"] @ found["blk.0.attn_output.weight.lora_a"]
    torch.testing.assert_close(served, update.mT)
    assert (update - update.mT).abs().max() > 0.01
