"""``export --to gguf-lora`` held against llama.cpp: its own converter writes the same tensors, its server serves them.

The server computes products with the file's weights of 4 bits, and rounds the other side to 8 bits for them
(``ggml_vec_dot_q4_1_q8_1``); the native adapter multiplies the unpacked weights in float32. That difference is there
without any adapter too, and bounds what may come with one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from adapted import train_at_random
from frozencore import FrozenCoreConfig, export_gguf_lora, export_lora
from frozencore.adapter.export.gguf_lora import ARCHITECTURES
from frozencore.lab.run.loading import load_model
from frozencore.lab.smollm2 import FILE
from llama_server import LlamaServer, convert
from places import SHARED
from served_adapters import Referee

pytest.importorskip("gguf")
import gguf

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
ROUNDING = 0.25  # nats: the largest difference of a token's log-probability seen without an adapter
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


def test_the_file_that_was_trained_on_and_the_lora_answer_as_the_native_adapter(tmp_path: Path) -> None:
    file = SHARED / "models" / "smollm2" / FILE
    if not file.is_file():
        pytest.skip("no ../shared beside this checkout")
    base, tokenizer = load_model(str(file), device="cpu")
    rows = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(row, add_generation_prompt=True)["input_ids"] for row in rows]
    plain = Referee(base)
    with LlamaServer(file, tmp_path / "plain") as server:
        said = server.post("/tokenize", {"content": "a\n\n12 and  3", "add_special": False})
        assert said["tokens"] == tokenizer("a\n\n12 and  3")["input_ids"]
        alone = [server.ask(prompt, NUM_TOKENS) for prompt in prompts]
        rounding = max(plain.error(prompt, answer) for prompt, answer in zip(prompts, alone, strict=True))
    config = FrozenCoreConfig(constructor="random", r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    train_at_random(model, size=0.3)
    model.save_pretrained(tmp_path / "adapter")
    model.unload()
    export_gguf_lora(tmp_path / "adapter", tmp_path / "lora.gguf")
    fresh, _ = load_model(str(file), device="cpu")
    native = Referee(PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).eval())
    plain = Referee(load_model(str(file), device="cpu")[0])
    assert rounding < ROUNDING
    with LlamaServer(file, tmp_path / "log", [tmp_path / "lora.gguf"]) as server:
        for prompt in prompts:
            answer = server.ask(prompt, NUM_TOKENS, tmp_path / "lora.gguf")
            assert native.error(prompt, answer) < 2 * ROUNDING
            assert plain.error(prompt, answer) > 10 * ROUNDING
            own = native.logprobs(prompt, answer.tokens)
            for place, token in enumerate(answer.tokens):  # another token only where the two are as good as level
                assert own[place].max() - own[place, token] < 2 * ROUNDING
