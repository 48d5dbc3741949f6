"""Gradients of each row equal those of a loop over the rows, however the batch is laid out and the base is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from adapted import EXAMPLES, adapted, cores_of, train_at_random
from frozencore import FrozenCoreConfig, per_example_gradients
from frozencore.adapter.per_example import losses_and_gradients
from frozencore.errors import CalibrationError, ConfigError, DataError
from tiny import Example, batch_of, tiny_gpt2, tiny_qwen2, with_positions

CLOSE = 3e-6  # of the length of a row's gradient: a loop over batches of other shapes rounds otherwise in float32
EXACT = 1e-6  # what is left in float64, and where the loop goes through the same batch


def cores(model: nn.Module) -> list[Tensor]:
    return [layer.core("default") for layer in cores_of(model)]


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """The gradient of a loss with respect to the adapter's cores, by autograd alone."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, cores(model))]).float()


def loop(model: nn.Module, examples: list[Example] = EXAMPLES) -> Tensor:
    """Each row in a batch of its own, with the loss that transformers computes for it."""
    return torch.stack([gradient(model(**batch_of([example])).loss, model) for example in examples])


def loop_in_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each row's loss in the same batch, one backward pass a row: kernels of low precision round as in the batch."""
    found = []
    for row in range(len(batch["labels"])):
        targets = batch["labels"][row, 1:]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[row, :-1]
        found.append(gradient(cross_entropy(logits.float(), targets), model))
    return torch.stack(found)


def assert_rows_equal(found: Tensor, expected: Tensor, close: float = CLOSE) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    away = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(away.max()) <= close, away
    others = (found - expected.roll(1, 0)).norm(dim=1) / expected.norm(dim=1)
    assert float(others.min()) > 0.1  # the rows differ, so equality says something


def end_to_end(examples: list[Example]) -> dict[str, Tensor]:
    """As transformers' DataCollatorWithFlattening."""
    labels = [[-100] * e.num_prompt + list(e.ids[e.num_prompt :]) for e in examples]
    return {
        "input_ids": torch.tensor([[token for e in examples for token in e.ids]]),
        "position_ids": torch.tensor([[place for e in examples for place in range(len(e.ids))]]),
        "labels": torch.tensor([[label for row in labels for label in row]]),
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradients_of_padded_rows_are_those_of_rows_alone(side: Any) -> None:
    model = adapted(trained=True)
    batch = with_positions([batch_of(EXAMPLES, side)])[0]
    assert_rows_equal(per_example_gradients(model, batch), loop(model))


def test_absolute_positions_and_transposed_weights_give_the_rows_gradients() -> None:
    model = adapted("random", model=tiny_gpt2(), target_modules=["c_attn", "c_fc"], trained=True)
    assert_rows_equal(per_example_gradients(model, batch_of(EXAMPLES)), loop(model))


def test_every_linear_layer_and_the_output_layer_may_have_a_core() -> None:
    names = ["q_proj", "gate_proj", "down_proj", "lm_head"]
    base = tiny_qwen2(tie_word_embeddings=False)
    model = adapted("random", model=base, target_modules=names, trained=True)
    expected = loop(model)
    assert_rows_equal(per_example_gradients(model, batch_of(EXAMPLES)), expected)
    assert_rows_equal(per_example_gradients(model, end_to_end(EXAMPLES)), expected)


def test_gradients_of_rows_end_to_end_are_those_of_rows_alone() -> None:
    model = adapted(trained=True)
    assert_rows_equal(per_example_gradients(model, end_to_end(EXAMPLES)), loop(model))


@pytest.mark.parametrize("lay_out", [batch_of, end_to_end])
def test_without_rounding_the_gradients_are_the_loops_to_a_millionth(lay_out: Callable[..., dict[str, Tensor]]) -> None:
    model = adapted("random", dtype=torch.float64, trained=True)
    assert_rows_equal(per_example_gradients(model, lay_out(EXAMPLES)), loop(model), EXACT)


def test_a_label_on_a_rows_first_token_belongs_to_no_row() -> None:
    model = adapted(trained=True)
    batch = end_to_end(EXAMPLES)
    batch["labels"][batch["position_ids"] == 0] = 3
    assert_rows_equal(per_example_gradients(model, batch), loop(model))


def test_packed_sequences_give_the_gradient_of_each_of_their_rows() -> None:
    """Two sequences of equal length, each of several rows."""
    model = adapted(trained=True)
    rows = [Example(tuple(range(1 + i, 1 + i + length)), 1) for i, length in enumerate((5, 3, 4, 2, 6))]
    packed = [end_to_end(rows[:2]), end_to_end([rows[2], Example((9, 8, 7, 6), 2)])]
    batch = {key: torch.cat([part[key] for part in packed]) for key in packed[0]}
    assert_rows_equal(
        per_example_gradients(model, batch), loop(model, [rows[0], rows[1], rows[2], Example((9, 8, 7, 6), 2)])
    )


def test_batches_of_an_accumulated_step_give_the_rows_of_the_whole_step() -> None:
    model = adapted(trained=True)
    parts = [per_example_gradients(model, batch_of(EXAMPLES[i : i + 3])) for i in (0, 3, 6)]
    assert_rows_equal(torch.cat(parts), loop(model))


def test_the_mean_over_rows_is_the_gradient_of_a_plain_step() -> None:
    """The loss of rows with equally many completion tokens, where the mean over tokens is the mean over rows."""
    model = adapted(trained=True)
    rows = [Example(e.ids[:4], 2) for e in EXAMPLES]
    batch = batch_of(rows)
    plain = gradient(model(**batch).loss, model)
    found = per_example_gradients(model, batch).mean(0)
    assert float((found - plain).norm() / plain.norm()) <= CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_sixteen_bits_give_each_rows_gradient_in_the_same_batch(dtype: torch.dtype, trained: bool) -> None:
    model = adapted("random", dtype=dtype, trained=trained)
    batch = batch_of(EXAMPLES)
    assert_rows_equal(per_example_gradients(model, batch), loop_in_batch(model, batch), EXACT)


def test_a_quantised_base_gives_each_rows_gradient_and_keeps_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    tiny_qwen2(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=bits)
    model = adapted("random", model=base, dtype=None, trained=True)
    before = [p.detach().clone() for p in model.parameters()]
    batch = batch_of(EXAMPLES)
    found = per_example_gradients(model, batch)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert_rows_equal(per_example_gradients(model.train(), end_to_end(EXAMPLES)), found)
    assert_rows_equal(found, loop_in_batch(model, batch), EXACT)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inputs_ask", [True, False])
def test_checkpointing_changes_no_gradient(reentrant: bool, inputs_ask: bool) -> None:
    model = adapted(trained=True)
    expected = loop(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if inputs_ask:
        model.enable_input_require_grads()
    model.train()
    assert model.is_gradient_checkpointing
    assert_rows_equal(per_example_gradients(model, batch_of(EXAMPLES)), expected)
    assert_rows_equal(per_example_gradients(model, end_to_end(EXAMPLES)), expected)
    assert model.training


def encoder_decoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "t5":
        config: Any = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0)
        config.decoder_start_token_id = 0
        base: Any = T5ForConditionalGeneration(config)
        names = ["q", "v"]
    else:
        config = BartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
        )  # fmt: skip
        base, names = BartForConditionalGeneration(config), ["q_proj", "v_proj", "fc1"]
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = get_peft_model(base.eval(), FrozenCoreConfig(r=3, constructor="random", target_modules=names))
    train_at_random(model)
    return model.eval()


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_encoder_decoder_rows_give_their_own_gradients(kind: str, checkpointed: bool) -> None:
    model = encoder_decoder(kind)
    sources, targets = [[5, 6, 7, 8], [9, 10], [11, 12, 13]], [[3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]

    def batch(rows: list[int]) -> dict[str, Tensor]:
        source = nn.utils.rnn.pad_sequence([torch.tensor(sources[i]) for i in rows], batch_first=True)
        labels = nn.utils.rnn.pad_sequence([torch.tensor(targets[i]) for i in rows], True, padding_value=-100)
        return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}

    expected = torch.stack([gradient(model(**batch([i])).loss, model) for i in range(3)])
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    assert_rows_equal(per_example_gradients(model, batch([0, 1, 2])), expected)


def test_a_loss_of_ones_own_gives_the_gradients_of_a_classifier() -> None:
    settings = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_labels": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    base = Qwen2ForSequenceClassification(Qwen2Config(**settings)).eval()
    model = adapted("random", model=base, trained=True)
    batch = batch_of(EXAMPLES, padding_id=0)
    batch["labels"] = torch.arange(8) % 3

    def losses(outputs: Any, batch: Any) -> Tensor:
        return cross_entropy(outputs.logits, batch["labels"], reduction="none")

    alone = [{**batch_of([e]), "labels": batch["labels"][i : i + 1]} for i, e in enumerate(EXAMPLES)]
    expected = torch.stack([gradient(model(**one).loss, model) for one in alone])
    assert_rows_equal(per_example_gradients(model, batch, losses), expected)
    with pytest.raises(DataError, match="Pass loss_fn"):
        per_example_gradients(model, batch)


def test_a_row_without_completion_tokens_has_no_gradient_and_changes_no_other() -> None:
    model = adapted(trained=True)
    batch = batch_of(EXAMPLES)
    expected = per_example_gradients(model, batch)
    batch["labels"][2] = -100
    losses, found = losses_and_gradients(model, batch)
    assert not found[2].any()
    assert losses[2] == 0
    kept = torch.arange(8) != 2
    torch.testing.assert_close(found[kept], expected[kept])


def state_of(model: PeftModel) -> dict[str, Any]:
    """Everything of a model that a call could leave something on."""
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)), m.training)
        for m in model.modules()
    ]
    flags = [(name, p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return {"hooks": hooks, "flags": flags, "rows": [layer.row_cores for layer in cores_of(model)]}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_on_the_model(fails: bool) -> None:
    model = adapted(trained=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    cores(model)[0].grad = kept = torch.ones(3, 3)
    before, values = state_of(model), [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()

    def broken(outputs: Any, batch: Any) -> Tensor:
        raise RuntimeError("mine")

    if fails:
        with pytest.raises(RuntimeError, match="mine"):
            per_example_gradients(model, batch_of(EXAMPLES), broken)
    else:
        with torch.no_grad():
            per_example_gradients(model, batch_of(EXAMPLES))
    assert state_of(model) == before
    assert cores(model)[0].grad is kept
    assert torch.equal(kept, torch.ones(3, 3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), values, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)


def merged(model: PeftModel) -> PeftModel:
    model.merge_adapter()
    return model


def two_active(model: PeftModel) -> PeftModel:
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random"))
    model.base_model.set_adapter(["default", "other"])
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tiny_qwen2(), ConfigError, "has none"),
        (lambda: merged(adapted(trained=True)), ConfigError, "unmerge_adapter"),
        (lambda: two_active(adapted(trained=True)), ConfigError, "has 2 \\(default, other\\)"),
        (lambda: adapted(calibrated=False), CalibrationError, "needs a basis"),
    ],
)
def test_what_has_no_gradient_of_each_row_is_refused(
    make: Callable[[], nn.Module], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        per_example_gradients(make(), batch_of(EXAMPLES))
    assert "\n" not in str(raised.value)


def test_a_disabled_adapter_is_refused() -> None:
    model = adapted(trained=True)
    with model.disable_adapter(), pytest.raises(ConfigError, match="has none"):
        per_example_gradients(model, batch_of(EXAMPLES))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda outputs, batch: outputs.logits.mean(), r"shape \(8,\), but shape \(\) came"),
        (lambda outputs, batch: outputs.logits.mean((1, 2))[:3], r"shape \(3,\) came"),
        (lambda outputs, batch: 1.0, "a float came"),
        (lambda outputs, batch: torch.zeros(8), "must depend on the cores"),
    ],
)
def test_a_loss_that_is_not_of_each_row_is_refused(loss_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        per_example_gradients(adapted(trained=True), batch_of(EXAMPLES), loss_fn)


def test_rows_whose_boundaries_cannot_be_told_are_refused() -> None:
    model, batch = adapted(trained=True), end_to_end(EXAMPLES)
    tokens = batch["input_ids"].shape[1]
    untold = {key: value for key, value in batch.items() if key != "position_ids"}
    for beside in (
        {**batch, "attention_mask": torch.ones(1, tokens, dtype=torch.long)},
        {**untold, "attention_mask": torch.ones(1, 1, tokens, tokens)},
        {**untold, "attention_mask": torch.arange(tokens).unsqueeze(0)},
        {**untold, "cu_seq_lens_q": torch.tensor([0, 4, tokens])},
    ):
        with pytest.raises(DataError, match="position_ids"):
            per_example_gradients(model, beside)


def test_rows_that_a_layer_does_not_see_as_its_inputs_are_refused() -> None:
    model, batch = copy.deepcopy(adapted(trained=True)), batch_of(EXAMPLES)
    layer = cores_of(model)[0]
    layer.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1),))
    with pytest.raises(ValueError, match="must be one input of layer"):
        per_example_gradients(model, batch)


@pytest.mark.parametrize("empty", [{}, {"input_ids": torch.zeros(0, 4, dtype=torch.long)}])
def test_a_batch_without_rows_is_refused(empty: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match="no tensor with a row"):
        per_example_gradients(adapted(trained=True), empty)
