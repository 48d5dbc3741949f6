"""Moments of a whole model, against a float64 copy that is run one example and summed one token at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

import references as ref
from frozencore.calibration.batches import take_examples
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from references import numpy_of
from tiny import (
    Example,
    attention_names,
    batch_of,
    batches_of,
    draw_examples,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    with_positions,
)

EVERYTHING = frozenset(MOMENT_NAMES)
MODELS = {"qwen2": tiny_qwen2, "llama": tiny_llama, "gpt2": tiny_gpt2}
CHECKPOINTING = {"none": None, "non-reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
EXAMPLES = draw_examples(num_examples=7, seed=3)


def layer_names(model: nn.Module) -> list[str]:
    if hasattr(model, "transformer"):
        return [f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    return [*attention_names(model), "model.layers.0.mlp.down_proj"]


@functools.cache
def expected_moments(kind: str, **options: object) -> dict[str, ref.ReferenceMoments]:
    model = MODELS[kind]()
    pairs = [(list(example.ids), example.num_prompt) for example in EXAMPLES]
    return ref.reference_moments(model, pairs, layer_names(model), **options)


def assert_equal(found: dict[str, LayerMoments], expected: dict[str, ref.ReferenceMoments], tolerance: float) -> None:
    """Every sum, relative to its own largest entry."""
    assert list(found) == list(expected)
    for name, moments in found.items():
        assert moments.num_tokens == expected[name].num_tokens, name
        for moment in moments.names():
            value = getattr(expected[name], moment)
            np.testing.assert_allclose(
                numpy_of(getattr(moments, moment)), value, rtol=0, atol=tolerance * np.abs(value).max(),
                err_msg=f"{name} {moment}",
            )  # fmt: skip


# --------------------------------------------------------------------------------------------- the sums are right


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(
    ("side", "batch_size", "group_size"),
    [("left", 7, 999), ("right", 7, 1), ("left", 3, 3), ("right", 3, 999), ("left", 1, 999)],
)
@pytest.mark.parametrize("kind", MODELS)
def test_moments_equal_the_token_by_token_reference(
    kind: str, side: str, batch_size: int, group_size: int, checkpointing: str
) -> None:
    """Whatever the padding, batching, grouping, checkpointing; grouped-query shapes and Conv1D included."""
    model = MODELS[kind]().double()
    if CHECKPOINTING[checkpointing]:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
        model.train()  # blocks checkpoint only in training mode
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, batch_size, side)), layer_names(model), needs=EVERYTHING,
        options=CalibrationOptions(group_size=group_size),
    )  # fmt: skip
    assert_equal(found, expected_moments(kind), 1e-12)


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_checkpointing_really_recomputes_the_blocks(checkpointing: str, qwen2: nn.Module) -> None:
    """Otherwise the test above would prove nothing: every block runs twice."""
    runs: list[int] = []
    qwen2.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    qwen2.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    qwen2.train()
    collect_moments(qwen2, [batch_of(EXAMPLES)], attention_names(qwen2))
    assert len(runs) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_float32_moments_are_float32_accurate(kind: str) -> None:
    model = MODELS[kind]()
    found = collect_moments(model, with_positions(batches_of(EXAMPLES, 3)), layer_names(model), needs=EVERYTHING)
    assert_equal(found, expected_moments(kind), 1e-5)
    assert all(getattr(m, name).dtype == torch.float32 for m in found.values() for name in m.names())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", MODELS)
def test_g_is_the_gradient_that_autograd_leaves_in_the_weights(kind: str, side: str) -> None:
    """transformers' own loss (in float32) is the mean over the labels of one example; examples weigh equally."""
    model = MODELS[kind]().double()
    names = layer_names(model)
    found = collect_moments(model, with_positions(batches_of(EXAMPLES, 3, side)), names)
    for example in EXAMPLES:
        model(**batch_of([example])).loss.backward()
    for name in names:
        layer = model.get_submodule(name)
        gradient = layer.weight.grad if isinstance(layer, nn.Linear) else layer.weight.grad.mT
        torch.testing.assert_close(found[name].cross, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


def test_grouped_query_shapes(qwen2: nn.Module) -> None:
    found = collect_moments(qwen2, [batch_of(EXAMPLES)], attention_names(qwen2))
    assert found["model.layers.1.self_attn.q_proj"].G.shape == (32, 32)
    assert found["model.layers.1.self_attn.k_proj"].G.shape == (16, 32)


def test_a_bf16_model_is_summed_in_float32() -> None:
    model = tiny_qwen2().bfloat16()
    found = collect_moments(model, batches_of(EXAMPLES, 3), layer_names(model), needs=EVERYTHING)
    assert all(getattr(m, name).dtype == torch.float32 for m in found.values() for name in m.names())
    assert_equal(found, expected_moments("qwen2"), 0.1)


def test_the_content_of_padding_does_not_matter(qwen2: nn.Module) -> None:
    names = layer_names(qwen2)
    one, other = (
        collect_moments(qwen2, [batch_of(EXAMPLES, "left", padding_id=id_)], names, needs=EVERYTHING) for id_ in (7, 11)
    )
    for name in names:
        for moment in one[name].names():
            value = getattr(one[name], moment)
            torch.testing.assert_close(
                getattr(other[name], moment), value, rtol=0, atol=1e-6 * float(value.abs().max())
            )


def test_a_missing_attention_mask_means_no_padding(qwen2: nn.Module) -> None:
    batch = batch_of([EXAMPLES[0]])
    without = {key: value for key, value in batch.items() if key != "attention_mask"}
    names = attention_names(qwen2)
    one, other = collect_moments(qwen2, [batch], names), collect_moments(qwen2, [without], names)
    assert torch.equal(one[names[0]].cross, other[names[0]].cross)


def test_layers_that_share_an_input_share_their_input_moments(qwen2: nn.Module) -> None:
    found = collect_moments(qwen2, batches_of(EXAMPLES, 3), attention_names(qwen2), needs=EVERYTHING)
    q, k, v = (found[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv")
    for name in ("input_square", "input_outer", "input_total"):
        assert torch.equal(getattr(q, name), getattr(k, name))
        assert torch.equal(getattr(q, name), getattr(v, name))
        assert getattr(q, name).data_ptr() != getattr(k, name).data_ptr()  # yet one layer's sums are its own


def test_groups_and_one_pass_give_the_same_bytes(qwen2: nn.Module) -> None:
    names = attention_names(qwen2)
    batches = batches_of(EXAMPLES, 3)
    one_pass, grouped = (
        collect_moments(qwen2, batches, names, needs=EVERYTHING, options=CalibrationOptions(group_size=size))
        for size in (999, 3)
    )
    for name in names:
        for moment in MOMENT_NAMES:
            assert torch.equal(getattr(one_pass[name], moment), getattr(grouped[name], moment))


def test_a_pass_repeats_byte_for_byte(qwen2: nn.Module) -> None:
    names = attention_names(qwen2)
    one, two = (collect_moments(qwen2, batches_of(EXAMPLES, 2), names) for _ in range(2))
    assert all(torch.equal(one[name].cross, two[name].cross) for name in names)


# -------------------------------------------------------------------------------------------------------- options


def test_completion_tokens_are_those_that_predict_the_completion() -> None:
    model = tiny_qwen2().double()
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, 3, "left")), layer_names(model), needs=EVERYTHING,
        options=CalibrationOptions(tokens="completion"),
    )  # fmt: skip

    def counts(t: int, length: int, num_prompt: int, _: np.ndarray) -> bool:
        return num_prompt - 1 <= t < length - 1

    assert_equal(found, expected_moments("qwen2", counts=counts), 1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("skip_first", [1, 3])
def test_skip_first_leaves_out_the_first_tokens_of_each_text_not_padding(skip_first: int, side: str) -> None:
    model = tiny_qwen2().double()
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, 3, side)), layer_names(model), needs=EVERYTHING,
        options=CalibrationOptions(skip_first=skip_first),
    )  # fmt: skip
    expected = expected_moments("qwen2", counts=lambda t, *_: t >= skip_first)
    assert_equal(found, expected, 1e-12)


@pytest.mark.parametrize("needs", [EVERYTHING, frozenset({"input_outer"})])
def test_nonzero_delta_counts_the_tokens_that_an_error_reaches(needs: frozenset) -> None:
    model = tiny_qwen2().double()
    found = collect_moments(
        model, batches_of(EXAMPLES, 3, "right"), layer_names(model), needs=needs,
        options=CalibrationOptions(tokens="nonzero_delta"),
    )  # fmt: skip
    assert_equal(found, expected_moments("qwen2", counts=lambda t, n, p, delta: bool((delta != 0).any())), 1e-12)
    counted = {name: moments.num_tokens for name, moments in found.items()}
    assert counted["model.layers.1.self_attn.o_proj"] < counted["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("weighting", ["token_sum", "token"])
def test_token_sum_weighs_tokens_equally(weighting: str) -> None:
    model = tiny_qwen2().double()
    found = collect_moments(
        model, batches_of(EXAMPLES, 3), layer_names(model), needs=EVERYTHING,
        options=CalibrationOptions(weighting=weighting),
    )  # fmt: skip
    assert_equal(found, expected_moments("qwen2", token_sum=True), 1e-12)


@pytest.mark.parametrize("needs", [frozenset({"input_outer"}), frozenset({"input_total", "output_outer"})])
def test_forward_moments_take_neither_labels_nor_a_backward_pass(needs: frozenset) -> None:
    model = tiny_qwen2().double()
    batches = [{key: b[key] for key in ("input_ids", "attention_mask")} for b in batches_of(EXAMPLES, 3)]
    backwards: list[int] = []
    model.model.norm.register_full_backward_hook(lambda *_: backwards.append(1))
    found = collect_moments(model, batches, layer_names(model), needs=needs)
    assert_equal(found, expected_moments("qwen2"), 1e-12)
    assert not backwards


@pytest.mark.parametrize("needs", [frozenset(MOMENT_NAMES), frozenset({"error_square"})])
def test_a_batch_takes_one_forward_and_one_backward_pass_whatever_is_summed(needs: frozenset) -> None:
    model, passes = tiny_qwen2(), []
    model.model.norm.register_forward_hook(lambda *_: passes.append("forward"))
    model.model.norm.register_full_backward_hook(lambda *_: passes.append("backward"))
    found = collect_moments(model, batches_of(EXAMPLES, 4), layer_names(model), needs=needs)
    assert passes == ["forward", "backward"] * 2
    assert all(set(layer.names()) == needs for layer in found.values())


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "all"}, "tokens must be one of nonpad, completion, nonzero_delta, but 'all' came"),
        ({"weighting": "sum"}, "weighting must be one of"),
        ({"skip_first": -1}, "skip_first must be a whole number of at least 0, but -1 came"),
        ({"group_size": 0}, "group_size must be a whole number of at least 1, but 0 came"),
        ({"stats_device": "abacus"}, "stats_device must be a device such as cpu or cuda:1, but 'abacus' came"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrationOptions(**options)


# ----------------------------------------------------------------------------------------------------------- data


def test_a_one_shot_iterator_serves_every_group(qwen2: nn.Module) -> None:
    names = attention_names(qwen2)
    found = collect_moments(qwen2, iter(batches_of(EXAMPLES, 3)), names, options=CalibrationOptions(group_size=2))
    expected = collect_moments(qwen2, batches_of(EXAMPLES, 3), names)
    assert all(torch.equal(found[name].cross, expected[name].cross) for name in names)


@pytest.mark.parametrize("num_examples", [1, 3, 4, 7, 100])
def test_take_examples_stops_at_the_number_and_asks_for_no_batch_more(num_examples: int) -> None:
    asked = 0

    def loader() -> Iterable[dict[str, Tensor]]:
        nonlocal asked
        for batch in batches_of(EXAMPLES, 3):
            asked += 1
            yield batch

    taken = torch.cat([batch["labels"][:, 0] for batch in take_examples(loader(), num_examples)])
    assert len(taken) == min(num_examples, 7)
    assert asked == min(-(-num_examples // 3), 3)


@pytest.mark.parametrize("patches", [1, 4, 2048])
def test_take_examples_cuts_rows_and_no_patches(patches: int) -> None:
    """Patches of all images are one tensor, as in the vision models of transformers."""
    batch = {"pixel_values": torch.ones(patches, 8), "input_ids": torch.ones(3, 5), "labels": torch.ones(3, 5)}
    for num_examples, expected in ((128, 3), (3, 3), (2, 3)):
        (taken,) = take_examples([batch], num_examples)
        assert (len(taken["pixel_values"]), len(taken["input_ids"])) == (patches, expected)
    assert sum(len(taken["input_ids"]) for taken in take_examples([batch] * 5, 6)) == 6


@pytest.mark.parametrize("group_size", [3, 999])
def test_progress_counts_examples_over_all_groups(group_size: int, qwen2: nn.Module) -> None:
    names = attention_names(qwen2)[:6]
    told: list[tuple[int, int | None]] = []
    collect_moments(
        qwen2, batches_of(EXAMPLES, 3), names, options=CalibrationOptions(group_size=group_size),
        progress=lambda stage, done, total: told.append((done, total)),
    )  # fmt: skip
    passes = -(-6 // min(group_size, 6))
    assert told == [(done + 7 * p, 7 * passes) for p in range(passes) for done in (3, 6, 7)]


def one_nan_in(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight[0, 0] = float("nan")


@pytest.mark.parametrize("needs", [EVERYTHING, frozenset({"cross"}), frozenset({"input_outer"})])
def test_a_nan_in_a_weight_names_the_batch_and_the_first_layer_it_reached(needs: frozenset, qwen2: nn.Module) -> None:
    one_nan_in(qwen2.model.layers[1].self_attn.k_proj)
    with pytest.raises(CalibrationError, match=r"'model\.layers\.1\.self_attn\.o_proj' in calibration batch 0"):
        collect_moments(qwen2, batches_of(EXAMPLES, 3), attention_names(qwen2), needs=needs)


def test_a_nan_that_one_batch_meets_names_that_batch(qwen2: nn.Module) -> None:
    with torch.no_grad():
        qwen2.model.embed_tokens.weight[39] = float("nan")
    calm = [Example(tuple(min(token, 38) for token in e.ids), e.num_prompt) for e in EXAMPLES]
    batches = batches_of(calm, 2)
    batches[2]["input_ids"][0, 1] = 39
    with pytest.raises(CalibrationError, match=r"layers\.0\.self_attn\.q_proj' in calibration batch 2") as caught:
        collect_moments(qwen2, batches, attention_names(qwen2), needs=frozenset({"input_outer"}))
    assert "\n" not in str(caught.value)


def test_a_nan_under_padding_alone_is_no_error(qwen2: nn.Module) -> None:
    embeds = qwen2.model.embed_tokens(batch_of(EXAMPLES)["input_ids"]).detach()
    batch = batch_of(EXAMPLES, "right")
    padded = batch["attention_mask"].eq(0)
    for value in (3.0, 1e4):
        embeds[padded] = value
        data = [{"inputs_embeds": embeds, "attention_mask": batch["attention_mask"], "labels": batch["labels"]}]
        found = collect_moments(qwen2, data, attention_names(qwen2))
        assert found["model.layers.0.self_attn.q_proj"].num_tokens == sum(len(e.ids) for e in EXAMPLES)


def test_an_infinite_error_names_the_batch_and_the_layer(qwen2: nn.Module) -> None:
    """A backward hook of the user turns one gradient infinite in layer 0 only."""
    qwen2.model.layers[0].self_attn.o_proj.register_full_backward_hook(
        lambda _, gradients, __: tuple(g if g is None else g * float("inf") for g in gradients)
    )
    with pytest.raises(CalibrationError, match=r"output error of layer 'model\.layers\.0\.self_attn\.v_proj'.*batch 0"):
        collect_moments(qwen2, batches_of(EXAMPLES, 3), attention_names(qwen2))


def test_labels_that_are_all_masked_are_refused(qwen2: nn.Module) -> None:
    batch = batch_of(EXAMPLES)
    batch["labels"][:] = -100
    with pytest.raises(CalibrationError, match="every label of a batch is masked"):
        collect_moments(qwen2, [batch], attention_names(qwen2))


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        (frozenset({"cross"}), CalibrationOptions()),
        (frozenset({"input_outer"}), CalibrationOptions(tokens="completion")),
        (frozenset({"cross"}), CalibrationOptions(tokens="completion")),
    ],
)
def test_batches_without_labels_are_refused_where_labels_are_needed(
    needs: frozenset, options: CalibrationOptions, qwen2: nn.Module
) -> None:
    batch = {key: value for key, value in batch_of(EXAMPLES).items() if key != "labels"}
    with pytest.raises(CalibrationError, match="needs labels .*attention_mask, input_ids"):
        collect_moments(qwen2, [batch], attention_names(qwen2), needs=needs, options=options)


@pytest.mark.parametrize("data", [[], iter([])])
@pytest.mark.parametrize("group_size", [1, 999])
def test_no_examples_are_refused(data: Iterable, group_size: int, qwen2: nn.Module) -> None:
    with pytest.raises(CalibrationError, match="the data gave none"):
        collect_moments(qwen2, data, attention_names(qwen2), options=CalibrationOptions(group_size=group_size))


def test_no_layers_are_refused(qwen2: nn.Module) -> None:
    with pytest.raises(CalibrationError, match="at least one layer"):
        collect_moments(qwen2, [batch_of(EXAMPLES)], [])


def test_a_moment_without_a_sum_of_its_own_is_refused(qwen2: nn.Module) -> None:
    needs = frozenset({"cross", "input_squares"})
    with pytest.raises(ConfigError, match=r"no moment 'input_squares'. Did you mean 'input_square'\?"):
        collect_moments(qwen2, [batch_of(EXAMPLES)], attention_names(qwen2), needs=needs)


@pytest.mark.parametrize("group_size", [1, 999])
@pytest.mark.parametrize("needs", [frozenset({"cross"}), frozenset({"input_outer"})])
def test_a_layer_that_nothing_reaches_is_named(needs: frozenset, group_size: int, qwen2: nn.Module) -> None:
    qwen2.unused = nn.Linear(3, 3)
    names = [*attention_names(qwen2), "unused"]
    with pytest.raises(CalibrationError, match="'unused'"):
        collect_moments(
            qwen2, [batch_of(EXAMPLES)], names, needs=needs, options=CalibrationOptions(group_size=group_size)
        )


def test_batches_of_padding_alone_are_refused(qwen2: nn.Module) -> None:
    batch = batch_of(EXAMPLES)
    with pytest.raises(CalibrationError, match="received no counted token"):
        collect_moments(
            qwen2, [batch], attention_names(qwen2), options=CalibrationOptions(skip_first=50),
            needs=frozenset({"input_square"}),
        )  # fmt: skip


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calibration_works_where_the_caller_turned_gradients_off(context: type, qwen2: nn.Module) -> None:
    names = attention_names(qwen2)
    expected = collect_moments(qwen2, batches_of(EXAMPLES, 3), names)
    with context():
        found = collect_moments(qwen2, batches_of(EXAMPLES, 3), names)
    assert all(torch.equal(found[name].cross, expected[name].cross) for name in names)


def test_dropout_of_the_config_is_off(gpt2: nn.Module) -> None:
    """GPT-2 with dropout 0.3, in training mode, checkpointed: the sums are those of a model without dropout."""
    assert gpt2.config.resid_pdrop == 0.3
    plain = copy.deepcopy(gpt2)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    names = layer_names(gpt2)
    expected = collect_moments(plain.eval(), batches_of(EXAMPLES, 3), names)
    for checkpointing in CHECKPOINTING.values():
        model = copy.deepcopy(gpt2).train()
        if checkpointing:
            model.gradient_checkpointing_enable(checkpointing)
        found = collect_moments(model, batches_of(EXAMPLES, 3), names)
        assert all(torch.equal(found[name].cross, expected[name].cross) for name in names)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_dropout_that_a_checkpointed_block_holds_as_a_number_is_off(checkpointing: str) -> None:
    """A block checkpoints in training mode only, in which OPT's block would apply its own dropout."""

    def made(dropout: float) -> nn.Module:
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=16, max_position_embeddings=64, init_std=0.2, pad_token_id=0,
            dropout=dropout, attention_dropout=dropout,
        )  # fmt: skip
        return OPTForCausalLM(config)

    model = made(dropout=0.5).train()
    assert any(getattr(module, "dropout", 0) == 0.5 for module in model.model.decoder.layers)
    names = attention_names(model)
    expected = collect_moments(made(dropout=0.0).eval(), batches_of(EXAMPLES, 3), names)
    if CHECKPOINTING[checkpointing]:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    found = collect_moments(model, batches_of(EXAMPLES, 3), names)
    for name in names:
        torch.testing.assert_close(found[name].cross, expected[name].cross, rtol=1e-4, atol=1e-6)
    assert all(module.dropout == 0.5 for module in model.model.decoder.layers)
