"""Stand-ins of models: known without hub or cache, of the same kind, and made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from frozencore.errors import ModelError
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.models import load_model
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.rehearsal.models import find_original, make_stand_in
from places import LAB

TEXTS = [f"Question: the {i} rivers of the north have {i * i} bridges. Answer: {i}" for i in range(50)]
QWEN = [f"Qwen/Qwen2.5-{size}-Instruct" for size in ("1.5B", "3B", "7B")]
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"


@pytest.fixture(autouse=True)
def _nothing_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def stand_in(name: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    make_stand_in(find_original(name), TEXTS, folder)
    return load_model(str(folder))


def test_every_model_of_a_shipped_campaign_is_known_without_hub_and_cache() -> None:
    campaigns = [read_campaign(path) for path in sorted((LAB / "campaigns").glob("*.yaml"))]
    names = {location for campaign in campaigns for location in campaign.models.values()}
    assert {*QWEN, LLAMA} < names
    for name in names:
        assert find_original(name).config.num_hidden_layers > 1


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [(QWEN[0], 1_543_714_304), (QWEN[1], 3_085_938_688), (QWEN[2], 7_615_616_512), (LLAMA, 1_235_814_400),
     ("tiny1m", 935_040), ("tiny1m-spread-2", 935_040)],
)  # fmt: skip
def test_known_models_have_as_many_values_as_their_cards_say(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(find_original(name).config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", [QWEN[1], QWEN[2], LLAMA, "tiny1m", "pocket"])
def test_a_stand_in_is_of_the_same_kind_and_small(name: str, tmp_path: Path) -> None:
    original = find_original(name)
    model, tokenizer = stand_in(name, tmp_path / "one")
    assert model.config.model_type == original.config.model_type
    assert model.config.tie_word_embeddings == original.config.tie_word_embeddings
    grouped = [c.num_attention_heads > c.num_key_value_heads for c in (model.config, original.config)]
    assert grouped[0] == grouped[1]
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.bias is not None) == (model.config.model_type == "qwen2")
    assert min(min(layer.weight.shape) for layer in (attention.q_proj, attention.k_proj, attention.o_proj)) >= 64
    assert sum(p.numel() for p in model.parameters()) < 500_000
    blank = original.load_tokenizer()
    assert type(tokenizer) is type(blank)
    assert tokenizer.chat_template == blank.chat_template
    assert tokenizer.special_tokens_map == blank.special_tokens_map
    assert tokenizer.decode(tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]).strip() == TEXTS[3]
    again, _ = stand_in(name, tmp_path / "two")
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_conversations_are_rendered_as_the_real_templates_do(tmp_path: Path) -> None:
    example = [{"role": "user", "content": "How many?"}]
    _, qwen = stand_in(QWEN[0], tmp_path / "qwen")
    assert qwen.apply_chat_template(example, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    _, llama = stand_in(LLAMA, tmp_path / "llama")
    encoder = PromptEncoder(llama)
    text = encoder.render_messages([*example, {"role": "assistant", "content": "3"}], "row").context
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: "
    )
    assert text.endswith(
        "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert (qwen.eos_token, llama.eos_token, llama.pad_token) == ("<|im_end|>", "<|eot_id|>", None)


def test_an_unknown_model_is_one_line_with_the_way_out() -> None:
    with pytest.raises(ModelError, match=r"'org/name' is not known here: .* --model-path NAME=DIR\.") as error:
        find_original("org/name")
    assert "\n" not in str(error.value)


def test_a_folder_or_cached_configuration_comes_before_what_is_known(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-3B-Instruct" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    config = json.loads((pocket_model_path() / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7, "layer_types": None}))
    original = find_original(QWEN[1])
    assert original.config.num_hidden_layers == 7
    assert original.load_tokenizer().eos_token == "<|im_end|>"  # the configuration alone is cached
    assert find_original(str(pocket_model_path())).config.num_hidden_layers == 4
