"""Encoder-decoder and encoder-only models: each layer's moments count the tokens of its own side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    BertConfig,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from adapted import train_at_random
from frozencore import CalibrationOptions, FrozenCoreConfig, calibrate, collect_moments, frozen_core_layers
from frozencore.errors import ConfigError
from frozencore.maths.moments import LayerMoments

NEEDS = frozenset({"cross", "input_square", "error_square"})
# Source and target of each example. Batch 0 has longest source = longest target: shapes cannot tell the sides apart.
EXAMPLES = [((5, 6, 7, 8, 9, 3), (11, 12, 3)), ((4, 9, 3), (13, 14, 15, 16, 17, 3)), ((21, 3), (22, 23, 3))]
PADDING = 7  # a real token, so that padding has x ≠ 0


def tiny_bart() -> nn.Module:
    torch.manual_seed(0)
    sides = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    config = BartConfig(vocab_size=40, d_model=16, max_position_embeddings=32, init_std=0.3, dropout=0.0, **sizes)
    return BartForConditionalGeneration(config).double()


def tiny_t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).double()


def batch_of(examples: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Tensor]:
    longest = [max(len(example[side]) for example in examples) for side in (0, 1)]
    pads = [[longest[side] - len(example[side]) for example in examples] for side in (0, 1)]
    return {
        "input_ids": torch.tensor([[*e[0], *[PADDING] * p] for e, p in zip(examples, pads[0], strict=True)]),
        "attention_mask": torch.tensor([[*[1] * len(e[0]), *[0] * p] for e, p in zip(examples, pads[0], strict=True)]),
        "labels": torch.tensor([[*e[1], *[-100] * p] for e, p in zip(examples, pads[1], strict=True)]),
    }


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]


def assert_same(one: dict[str, LayerMoments], other: dict[str, LayerMoments]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].num_tokens == other[name].num_tokens, name
        for moment in NEEDS:
            left, right = getattr(one[name], moment), getattr(other[name], moment)
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, msg=f"{moment} of {name}")


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("make", [tiny_bart, tiny_t5])
def test_padding_on_either_side_changes_no_moment(make: Callable[[], nn.Module], checkpointing: bool | None) -> None:
    """A padded batch sums to what its examples give one by one, without padding."""
    model = make()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    layers = linear_layers(model)
    padded = collect_moments(model, [batch_of(EXAMPLES)], layers, needs=NEEDS)
    single = collect_moments(make(), [batch_of([example]) for example in EXAMPLES], layers, needs=NEEDS)
    assert_same(padded, single)


@pytest.mark.parametrize("make", [tiny_bart, tiny_t5])
def test_each_layer_counts_the_tokens_of_its_own_side(make: Callable[[], nn.Module]) -> None:
    model = make()
    moments = collect_moments(model, [batch_of(EXAMPLES)], linear_layers(model), needs=NEEDS)
    source, target = (sum(len(example[side]) for example in EXAMPLES) for side in (0, 1))
    assert source != target
    for name, found in moments.items():
        cross_attention = "EncDecAttention" in name or "encoder_attn" in name
        reads_source = "encoder." in name.replace("decoder.", "") or (
            cross_attention and name.split(".")[-1] in ("k", "v", "k_proj", "v_proj")
        )
        assert found.num_tokens == (source if reads_source else target), name


def test_the_loss_weighs_examples_equally_and_labels_are_not_shifted_twice() -> None:
    """The gradient of Σ_e mean_t -log p(label_t) with respect to a weight is the cross moment of its layer."""
    model = tiny_bart()
    batch = batch_of(EXAMPLES)
    name = "model.decoder.layers.0.fc1"
    moments = collect_moments(model, [batch], [name], needs=NEEDS)[name]
    log_p = model(**batch).logits.log_softmax(-1)
    for row, (_, target) in enumerate(EXAMPLES):
        picked = [log_p[row, place, token] for place, token in enumerate(target)]
        (-sum(picked) / len(target)).backward(retain_graph=True)
    torch.testing.assert_close(moments.cross, model.get_submodule(name).weight.grad, rtol=1e-9, atol=1e-12)


def test_completion_tokens_are_those_that_carry_a_label() -> None:
    batch = batch_of(EXAMPLES)
    batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
    model = tiny_bart()
    layers = ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"]
    found = [
        [
            m.num_tokens
            for m in collect_moments(model, [batch], layers, options=CalibrationOptions(tokens=tokens)).values()
        ]
        for tokens in ("nonpad", "completion")
    ]
    assert found == [[11, 18], [11, 12]]


@pytest.mark.parametrize("constructor", ["fcca", "eva"])
@pytest.mark.parametrize("make", [tiny_bart, tiny_t5])
def test_an_encoder_decoder_adapter_calibrates_trains_and_reloads(
    make: Callable[[], nn.Module], constructor: str, tmp_path: object
) -> None:
    model = get_peft_model(make().float(), FrozenCoreConfig(r=4, constructor=constructor, task_type="SEQ_2_SEQ_LM"))
    batch = batch_of(EXAMPLES)
    calibrate(model, [batch], progress=False)
    model.train()(**batch).loss.backward()
    with torch.no_grad():
        for layer in frozen_core_layers(model, "default").values():
            R = layer.factors("default")[2]
            assert bool(R.grad.any()), layer.name
            R -= R.grad
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(make().float(), str(tmp_path)).eval()
    assert torch.equal(loaded(**batch).logits, model.eval()(**batch).logits)


def test_a_classifier_with_a_decoder_counts_its_source_twice() -> None:
    model = BartForSequenceClassification(tiny_bart().config)
    batch = batch_of(EXAMPLES)
    batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 1)
    batch["input_ids"][batch["input_ids"].eq(3)] = 2  # one end token in each row, as the head wants
    batch["labels"] = torch.tensor([0, 1, 0])
    layers = ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"]
    assert {m.num_tokens for m in collect_moments(model, [batch], layers).values()} == {11}


def test_an_encoder_calibrates_on_labels_of_its_own_task() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                        num_labels=3, max_position_embeddings=32, initializer_range=0.3)  # fmt: skip
    model = BertForTokenClassification(config)
    batch = batch_of(EXAMPLES)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    adapted = get_peft_model(
        model, FrozenCoreConfig(r=4, target_modules=["query", "value", "dense"], task_type="TOKEN_CLS")
    )
    report = calibrate(adapted, [batch], progress=False)
    assert {layer.num_tokens for layer in report.layers.values()} == {11}


def test_options_about_completions_are_refused_of_a_model_that_completes_nothing() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                        num_labels=3, max_position_embeddings=32)  # fmt: skip
    model, batch = BertForTokenClassification(config), batch_of(EXAMPLES)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    layers = ["bert.encoder.layer.0.attention.self.query"]
    for options in ({"tokens": "completion"}, {"weighting": "token_sum"}):
        with pytest.raises(ConfigError, match="this BertForTokenClassification is no language model") as caught:
            collect_moments(model, [batch], layers, options=CalibrationOptions(**options))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [tiny_bart, tiny_t5])
def test_rows_of_several_adapters_stay_apart_while_beams_multiply_them_behind_the_encoder(
    make: Callable[[], nn.Module],
) -> None:
    model = get_peft_model(make().float(), FrozenCoreConfig(r=4, constructor="random", task_type="SEQ_2_SEQ_LM"))
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random", task_type="SEQ_2_SEQ_LM", seed=1))
    for name in ("default", "other"):
        train_at_random(model, name, size=2.0)
    prompt = {key: value for key, value in batch_of(EXAMPLES).items() if key != "labels"}
    options = {"num_beams": 3, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = ["other", "default", "other"]
    mixed = model.eval().generate(**prompt, **options, adapter_names=rows)
    alone = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = model.generate(**prompt, **options)
    assert not torch.equal(alone["default"], alone["other"])
    for row, name in enumerate(rows):
        assert torch.equal(mixed[row], alone[name][row])
