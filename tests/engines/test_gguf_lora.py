"""``export --to gguf-lora`` held against llama.cpp: its own converter writes the same tensors, its server serves them.

For weights of 4 bits the server rounds the other side of a product to 8 bits; the native adapter multiplies the
unpacked weights in float32. That is the whole difference: on the same file with unpacked weights the answers agree to
``IN_FLOAT32``. On the 4-bit file it is there without any adapter too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from adapted import train_at_random
from engine_process import environment_of
from frozencore import FrozenCoreConfig, export_gguf_lora, export_lora
from frozencore.adapter.export.gguf_lora import ARCHITECTURES
from frozencore.tune.run.models import load_model
from frozencore.tune.smollm2 import FILE
from llama_server import LlamaServer, convert
from places import ROOT, SHARED
from served_adapters import Referee

pytest.importorskip("gguf")
import gguf

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
IN_FLOAT32 = 1e-3  # nats; measured with llama.cpp of October 2026: 0.0003
ROUNDING = 0.5  # nats; measured there: 0.22 without an adapter, 0.20 with this one
QUESTIONS = ("What is the capital of France?", "Write a sentence about the sea.", "How much is 3 plus 4?")


def matrices(file: Path) -> dict[str, Any]:
    return {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_llama_cpps_converter_writes_the_same_names_and_values(model_type: str, tmp_path: Path) -> None:
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
    base.save_pretrained(tmp_path / "base")
    ragged = {"rank_pattern": {"o_proj": 5}, "alpha": 7.5, "target_modules": "all-linear"}
    model = get_peft_model(base, FrozenCoreConfig(constructor="random", r=3, task_type="CAUSAL_LM", **ragged))
    train_at_random(model)
    model.save_pretrained(tmp_path / "adapter")
    export_lora(tmp_path / "adapter", tmp_path / "lora", base=tmp_path / "base")
    export_gguf_lora(tmp_path / "adapter", tmp_path / "ours.gguf", base=tmp_path / "base")
    theirs = tmp_path / "theirs.gguf"
    assert convert({}, {theirs: (tmp_path / "lora", tmp_path / "base")}) == {theirs: None}
    ours, found = matrices(tmp_path / "ours.gguf"), matrices(theirs)
    assert ours.keys() == found.keys()
    assert all(torch.equal(ours[name], found[name]) for name in ours)
    told = [gguf.GGUFReader(file).get_field("adapter.lora.alpha") for file in (tmp_path / "ours.gguf", theirs)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0].contents() == told[1].contents()


def unpacked(file: Path, out: Path) -> Path:
    """The same model with every matrix in float32."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_smollm2s_file_with_the_lora_answers_as_the_native_adapter(tmp_path: Path) -> None:
    file, lora = SHARED / "models" / "smollm2" / FILE, tmp_path / "lora.gguf"
    if not file.is_file():
        pytest.skip("no ../shared beside this checkout")
    base, tokenizer = load_model(str(file), device="cpu")
    rows = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(row, add_generation_prompt=True)["input_ids"] for row in rows]
    config = FrozenCoreConfig(constructor="random", r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    train_at_random(model, size=0.3)
    model.save_pretrained(tmp_path / "adapter")
    export_gguf_lora(tmp_path / "adapter", lora)
    native = Referee(model)

    with LlamaServer(unpacked(file, tmp_path / "whole.gguf"), tmp_path / "whole", [lora]) as server:
        for prompt in prompts:
            answer = server.ask(prompt, NUM_TOKENS, lora)
            assert answer.tokens == native.greedy(prompt, answer.tokens)
            assert native.error(prompt, answer) < IN_FLOAT32

    with LlamaServer(file, tmp_path / "log", [lora]) as server:
        text = "a\n\n12 and  3"
        assert server.post("/tokenize", {"content": text})["tokens"] == tokenizer(text)["input_ids"]
        answers = [server.ask(prompt, NUM_TOKENS, lora) for prompt in prompts]
        server.apply()
        alone = [server.ask(prompt, NUM_TOKENS) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert native.error(prompt, answer) < ROUNDING
        own = native.logprobs(prompt, answer.tokens)
        chosen = own.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (own.amax(1) - chosen).max() < ROUNDING  # another token only where the two are nearly level
    with model.disable_adapter():
        assert max(native.error(prompt, answer) for prompt, answer in zip(prompts, alone, strict=True)) < ROUNDING
        assert max(native.error(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)) > 2 * ROUNDING


def test_the_benchmark_of_tenants_in_llama_cpp_runs(tmp_path: Path) -> None:
    environment_of("llama.cpp")
    file, out = SHARED / "models" / "smollm2" / FILE, tmp_path / "found.json"
    if not file.is_file():
        pytest.skip("no ../shared beside this checkout")
    program = ROOT / "benchmarks" / "served_llama_cpp.py"
    subprocess.run([sys.executable, program, "--quick", "--model", file, "--out", out], check=True, cwd=tmp_path)
    found = json.loads(out.read_text())
    assert [row["tenants"] for row in found["rows"]] == ["no adapters", "adapters, none chosen", "1", "2"]
    assert found["answers_of_the_base"] == 0
