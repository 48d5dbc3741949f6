"""Moments of a whole model, against a float64 copy that is run one example and summed one token at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import references as ref
from frozencore.calibration.batches import num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ConfigError
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from references import numpy_of
from tiny import attention_names, batch_of, batches_of, draw_examples, tiny_gpt2, tiny_llama, tiny_qwen2, with_positions

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


ON_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("stats_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("kind", MODELS)
def test_narrow_models_are_summed_in_float32(
    kind: str, dtype: torch.dtype, tolerance: float, device: str, stats_device: str | None
) -> None:
    model = MODELS[kind]().to(device, dtype)
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, 3)), layer_names(model), needs=EVERYTHING,
        options=CalibrationOptions(stats_device=stats_device),
    )  # fmt: skip
    for moments in found.values():
        totals = [getattr(moments, name) for name in moments.names()]
        assert {(total.dtype, total.device.type) for total in totals} == {(torch.float32, stats_device or device)}
    assert_equal(found, expected_moments(kind), 10 * tolerance if device == "cuda" else tolerance)


# -------------------------------------------------------------------------------------------------------- options

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "completion": ({"tokens": "completion"}, {"counts": lambda t, length, prompt, _: prompt - 1 <= t < length - 1}),
    "without the first": ({"skip_first": 1}, {"counts": lambda t, *_: t >= 1}),
    "without the first three": ({"skip_first": 3}, {"counts": lambda t, *_: t >= 3}),
    "tokens that an error reaches": (
        {"tokens": "nonzero_delta"},
        {"counts": lambda *token: bool((abs(token[3]) > 1e-12).any())},
    ),
    "equal tokens": ({"weighting": "token_sum"}, {"token_sum": True}),
    "equal tokens, short": ({"weighting": "token_sum"}, {"token_sum": True}),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("needs", [EVERYTHING, frozenset({"input_outer"})])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_choose_the_tokens_and_their_weights_not_padding(case: str, needs: frozenset, side: str) -> None:
    options, reference = OPTIONS[case]
    model = tiny_qwen2().double()
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, 3, side)), layer_names(model), needs=needs,
        options=CalibrationOptions(**options),
    )  # fmt: skip
    assert_equal(found, expected_moments("qwen2", **reference), 1e-12)


@pytest.mark.parametrize(
    "needs", [EVERYTHING, {"error_square"}, {"input_outer"}, {"input_total", "output_outer"}], ids=len
)
def test_a_batch_takes_one_forward_pass_and_for_errors_labels_and_a_backward_pass(needs: set) -> None:
    model, passes, forward = tiny_qwen2().double(), [], needs <= {"input_outer", "input_total", "output_outer"}
    model.model.norm.register_forward_hook(lambda *_: passes.append("forward"))
    model.model.norm.register_full_backward_hook(lambda *_: passes.append("backward"))
    batches = [{k: v for k, v in batch.items() if k != "labels" or not forward} for batch in batches_of(EXAMPLES, 4)]
    found = collect_moments(model, batches, layer_names(model), needs=frozenset(needs))
    assert passes == (["forward"] if forward else ["forward", "backward"]) * 2
    assert all(set(layer.names()) == needs for layer in found.values())
    assert_equal(found, expected_moments("qwen2"), 1e-12)


@pytest.mark.parametrize(
    ("device_map", "are_chosen"),
    [({"": 0}, True), ({"model": 0, "lm_head": "cpu"}, True), ({"model": 0, "lm_head": 1}, False)],
)
def test_a_model_on_two_gpus_is_asked_for_all_logits(device_map: dict[str, int | str], are_chosen: bool) -> None:
    """accelerate moves every argument to the first GPU, where no head is that reads it."""
    model, asked = tiny_qwen2().double(), list[bool]()
    model.hf_device_map = device_map
    model.register_forward_pre_hook(lambda _, __, given: asked.append("logits_to_keep" in given), with_kwargs=True)
    found = collect_moments(model, batches_of(EXAMPLES, 4), layer_names(model), needs=EVERYTHING)
    assert asked == [are_chosen] * 2
    assert_equal(found, expected_moments("qwen2"), 1e-12)


# ----------------------------------------------------------------------------------------------------------- data


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


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calibration_works_where_the_caller_turned_gradients_off(context: type, qwen2: nn.Module) -> None:
    names = attention_names(qwen2)
    expected = collect_moments(qwen2, batches_of(EXAMPLES, 3), names)
    with context():
        found = collect_moments(qwen2, batches_of(EXAMPLES, 3), names)
    assert all(torch.equal(found[name].cross, expected[name].cross) for name in names)


def mean_of_examples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, num_items_in_batch=num_examples_of(batch)).loss


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("with_loss_fn", [False, True])
def test_packed_rows_with_a_mask_of_pairs_of_tokens_have_the_moments_of_the_rows_apart(
    kind: str, with_loss_fn: bool
) -> None:
    model = tiny_qwen2().double()
    options = None if with_loss_fn else CalibrationOptions(weighting="token_sum")
    owner = torch.tensor([i for i, example in enumerate(EXAMPLES) for _ in example.ids] + [-1] * 3)  # -1: padding
    size = len(owner)
    sees = (owner[:, None] == owner) & torch.ones(size, size).tril().bool() & (owner >= 0)
    packed = {
        "input_ids": torch.tensor([[i for example in EXAMPLES for i in example.ids] + [7] * 3]),
        "position_ids": torch.tensor([[i for example in EXAMPLES for i in range(len(example.ids))] + [0] * 3]),
        "labels": torch.cat([batch_of([example])["labels"] for example in EXAMPLES] + [torch.full((1, 3), -100)], 1),
        "attention_mask": (sees if kind == "boolean" else (~sees).double() * -1e300)[None, None],
    }
    rows = [batch_of([example]) for example in EXAMPLES]
    of_rows, of_packed = (
        collect_moments(
            model, one, attention_names(model), options=options,
            loss_fn=mean_of_examples if with_loss_fn else None,
        )
        for one in (rows, [packed])
    )  # fmt: skip
    for name, moments in of_rows.items():
        assert of_packed[name].num_tokens == moments.num_tokens
        assert with_loss_fn or moments.num_tokens == size - 3
        for moment in moments.names():
            wanted = getattr(moments, moment)
            torch.testing.assert_close(getattr(of_packed[name], moment), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layers", ["q_proj", ["model.layers.9.self_attn.q_proj"]])
def test_names_that_no_module_has_are_refused_with_one_that_has(layers: str | list[str], qwen2: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"in full, .* such as 'model.layers.0.self_attn.q_proj', but '.*q_proj' was"):
        collect_moments(qwen2, [batch_of(EXAMPLES)], layers)


def test_labels_of_32_bits_are_those_of_64() -> None:
    batch = batch_of(EXAMPLES)
    narrow, wide = (
        collect_moments(tiny_qwen2(), [one], attention_names(tiny_qwen2()))
        for one in ({**batch, "labels": batch["labels"].int()}, batch)
    )
    assert all(torch.equal(narrow[name].cross, moments.cross) for name, moments in wide.items())
