"""Our exports, served by vLLM: greedy tokens and log-probabilities are the native adapter's in float64.

A float32 engine cannot be nearer than float32's own rounding, which the native adapter in float32 shows: up to 4e-5 on
these logits. The tolerance is three times that; the adapters move the log-probabilities by 0.2 and more.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frozencore import export_merged
from frozencore.adapter.export.serving import VLLM_MAX_RANKS
from serving import (
    ADAPTERS,
    NUM_TOKENS,
    PROMPTS,
    TOLERANCE,
    Answer,
    Referee,
    RefusedError,
    VllmServer,
    environment_of,
    load_base,
    native,
    peft_of,
    worst_error,
)
from tiny import tiny_gpt2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(base: Path) -> Referee:
    return Referee(load_base(base).double())


@pytest.fixture(scope="module")
def zeros(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA that changes nothing."""
    folder = tmp_path_factory.mktemp("zeros") / "lora"
    shutil.copytree(adapters / "attention-lora", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({key: torch.zeros_like(X) for key, X in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def _error(server: VllmServer, name: str, referee: Referee) -> float:
    return worst_error(lambda prompt: server.ask(name, prompt, NUM_TOKENS), referee)


def test_the_base_model_is_served_as_transformers_computes_it(vllm: VllmServer, plain: Referee) -> None:
    assert _error(vllm, "base", plain) < TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_lora_export_answers_as_the_native_adapter(
    name: str, vllm: VllmServer, base: Path, adapters: Path, plain: Referee
) -> None:
    vllm.load(name, adapters / f"{name}-lora")
    referee = native(base, adapters / name)
    assert _error(vllm, name, referee) < TOLERANCE
    in_float32 = native(base, adapters / name, torch.float32)
    answers = [vllm.ask(name, prompt, NUM_TOKENS) for prompt in PROMPTS]
    asked = list(zip(PROMPTS, answers, strict=True))
    assert max(in_float32.distance(referee, prompt, answer.tokens) for prompt, answer in asked) < TOLERANCE
    assert max(plain.error(prompt, answer) for prompt, answer in asked) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_bfloat16_export_is_served_as_rounded_and_not_further(
    name: str, vllm: VllmServer, base: Path, adapters: Path
) -> None:
    vllm.load(f"{name}-bfloat16", adapters / f"{name}-bfloat16")
    rounded = peft_of(base, adapters / f"{name}-bfloat16")
    assert rounded is not None
    assert _error(vllm, f"{name}-bfloat16", rounded) < TOLERANCE
    assert _error(vllm, f"{name}-bfloat16", native(base, adapters / name)) < 0.03


def _ask_at_once(server: VllmServer, jobs: list[tuple[str, list[int]]]) -> list[Answer]:
    """Their answers, of which most steps were shared: alone, each token would be a step."""
    before = server.num_steps()
    with ThreadPoolExecutor(len(jobs)) as threads:
        answers = list(threads.map(lambda job: server.ask(*job, NUM_TOKENS), jobs))
    assert server.num_steps() - before < len(jobs) * NUM_TOKENS / 2
    return answers


def test_adapters_share_a_batch_and_each_row_has_its_own(
    vllm: VllmServer, base: Path, adapters: Path, zeros: Path, plain: Referee
) -> None:
    """A LoRA of zeros stands for the base model: see the next test."""
    referees = {"zeros": plain}
    vllm.load("zeros", zeros)
    for name in ("attention", "ragged"):
        vllm.load(f"{name} of a batch", adapters / f"{name}-lora")
        referees[f"{name} of a batch"] = native(base, adapters / name)
    jobs = [(name, prompt) for prompt in PROMPTS for name in referees]
    for (name, prompt), answer in zip(jobs, _ask_at_once(vllm, jobs), strict=True):
        assert answer.tokens == referees[name].greedy(prompt, answer.tokens)
        assert referees[name].error(prompt, answer) < TOLERANCE


def test_on_a_cpu_a_row_of_the_base_model_among_adapters_gets_one_of_them(
    vllm: VllmServer, adapters: Path, plain: Referee
) -> None:
    """Why docs/serving.md says so: ``lora/ops/torch_ops/lora_ops.py`` takes the slot -1 of a row without an adapter for
    the last one. Alone, the base model is right."""
    names = ("all-linear", "attention", "ragged")
    for name in names:
        vllm.load(f"{name} beside the base", adapters / f"{name}-lora")
    jobs = [(name, prompt) for prompt in PROMPTS for name in ("base", *(f"{name} beside the base" for name in names))]
    answers = _ask_at_once(vllm, jobs)
    errors = [plain.error(jobs[i][1], answer) for i, answer in enumerate(answers) if jobs[i][0] == "base"]
    assert max(errors) > 100 * TOLERANCE
    assert _error(vllm, "base", plain) < TOLERANCE


def test_an_adapter_is_swapped_for_another_and_removed_while_the_server_runs(
    vllm: VllmServer, base: Path, adapters: Path
) -> None:
    for adapter in ("q and v", "attention"):
        vllm.load("tenant", adapters / f"{adapter}-lora", in_place=True)
        assert _error(vllm, "tenant", native(base, adapters / adapter)) < TOLERANCE
    with pytest.raises(RefusedError, match="already been loaded"):
        vllm.load("tenant", adapters / "ragged-lora")
    vllm.unload("tenant")
    with pytest.raises(RefusedError, match="404"):
        vllm.ask("tenant", PROMPTS[0], 1)


def test_the_same_path_with_other_weights_keeps_what_was_cached_of_a_prompt(
    vllm: VllmServer, base: Path, adapters: Path, tmp_path: Path
) -> None:
    """Why docs/serving.md asks for a new path: vLLM's prefix cache knows an adapter by its name and path."""
    long = (PROMPTS[2] * 5)[:200]
    folder = tmp_path / "lora"
    shutil.copytree(adapters / "q and v-lora", folder)
    vllm.load("renewed", folder)
    vllm.ask("renewed", long, 1)
    shutil.rmtree(folder)
    shutil.copytree(adapters / "attention-lora", folder)
    vllm.load("renewed", folder, in_place=True)
    new = native(base, adapters / "attention")
    assert new.error(long, vllm.ask("renewed", long, 1)) > 10 * TOLERANCE
    moved = folder.rename(tmp_path / "another")
    vllm.load("renewed", moved, in_place=True)
    assert new.error(long, vllm.ask("renewed", long, 1)) < TOLERANCE


def test_the_merged_export_answers_as_the_native_adapter(base: Path, adapters: Path, tmp_path: Path) -> None:
    merged = export_merged(adapters / "ragged", tmp_path / "merged")
    with VllmServer(merged, tmp_path / "log", "--max-model-len", "256") as server:
        assert _error(server, "base", native(base, adapters / "ragged")) < TOLERANCE


def test_vllm_has_no_lora_for_conv1d_models(base: Path, tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "gpt2")
    server = VllmServer(tmp_path / "gpt2", tmp_path / "log", "--enable-lora")
    with pytest.raises(RefusedError, match="ended with 1"), server:
        pass
    assert "GPT2LMHeadModel does not support LoRA" in server.log.read_text()


RANKS = """
import json, typing
from vllm.config.lora import MaxLoRARanks
print(json.dumps(typing.get_args(MaxLoRARanks)))
"""


def test_the_maximum_ranks_are_vllms_own() -> None:
    python = environment_of("vllm") / "bin" / "python"
    done = subprocess.run([python, "-c", RANKS], capture_output=True, text=True, check=True)
    assert tuple(json.loads(done.stdout.splitlines()[-1])) == VLLM_MAX_RANKS
