"""``fisher_labels="mc"``: the labels of d and D are drawn from the model, those of G are the data's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import references as ref
from adapted import BATCHES, adapted, cores_of
from frozencore import CalibrationOptions, calibrate
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.loss import Predictions
from frozencore.maths.linalg import seeded_generator
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from references import numpy_of
from tiny import attention_names, batch_of, batches_of, draw_examples, tiny_gpt2, tiny_qwen2, with_positions

EVERYTHING = frozenset(MOMENT_NAMES)
OF_THE_FISHER = ("error_square", "error_outer")
CHECKPOINTING = {"none": None, "non-reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
EXAMPLES = draw_examples(num_examples=7, seed=3)
PAIRS = [(list(example.ids), example.num_prompt) for example in EXAMPLES]
SEED = 5


def drawn(**options: object) -> CalibrationOptions:
    return CalibrationOptions(fisher_labels="mc", seed=SEED, **options)


def chances(seed: int = SEED) -> list[float]:
    """One for each completion token of the examples."""
    number = sum(len(example.ids) - example.num_prompt for example in EXAMPLES)
    generator = seeded_generator(seed, "fisher labels", 0)
    return torch.rand(number, generator=generator, dtype=torch.float64).tolist()


def assert_equal(found: dict[str, LayerMoments], expected: dict[str, ref.ReferenceMoments], tolerance: float) -> None:
    for name, moments in found.items():
        assert moments.num_tokens == expected[name].num_tokens
        for moment in moments.names():
            value = getattr(expected[name], moment)
            np.testing.assert_allclose(
                numpy_of(getattr(moments, moment)), value, rtol=0, atol=tolerance * np.abs(value).max(),
                err_msg=f"{name} {moment}",
            )  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> dict[str, ref.ReferenceMoments]:
    model = tiny_qwen2()
    return ref.reference_moments(model, PAIRS, attention_names(model), chances=chances())


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(("batch_size", "group_size", "side"), [(7, 999, "left"), (3, 3, "right"), (1, 999, "left")])
def test_drawn_moments_equal_the_token_by_token_reference(
    batch_size: int, group_size: int, side: str, checkpointing: str, expected: dict[str, ref.ReferenceMoments]
) -> None:
    """Whatever the padding, batching, grouping, checkpointing."""
    model = tiny_qwen2().double()
    if CHECKPOINTING[checkpointing]:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    found = collect_moments(
        model, with_positions(batches_of(EXAMPLES, batch_size, side)), attention_names(model), needs=EVERYTHING,
        options=drawn(group_size=group_size),
    )  # fmt: skip
    assert_equal(found, expected, 1e-12)


@pytest.mark.parametrize("tokens", ["completion", "nonzero_delta"])
def test_the_tokens_that_count_are_those_of_the_data(tokens: str) -> None:
    def counts(t: int, length: int, num_prompt: int, delta: np.ndarray) -> bool:
        return num_prompt - 1 <= t < length - 1 if tokens == "completion" else bool((delta != 0).any())

    model = tiny_qwen2().double()
    names = attention_names(model)
    found = collect_moments(
        model, batches_of(EXAMPLES, 3), names, needs=EVERYTHING, options=drawn(tokens=tokens, weighting="token")
    )
    expected = ref.reference_moments(model, PAIRS, names, counts=counts, chances=chances(), token_sum=True)
    assert_equal(found, expected, 1e-12)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
def test_what_is_no_fisher_moment_is_that_of_true_labels_to_the_bit(
    make: Callable[[], nn.Module], checkpointing: str
) -> None:
    model = make()
    if CHECKPOINTING[checkpointing]:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    names = [name for name, module in model.named_modules() if name.endswith(("o_proj", "q_proj", "c_attn", "c_proj"))]
    true, sampled = (
        collect_moments(model, with_positions(batches_of(EXAMPLES, 3)), names, needs=EVERYTHING, options=options)
        for options in (CalibrationOptions(), drawn())
    )
    for name in names:
        assert true[name].num_tokens == sampled[name].num_tokens
        for moment in MOMENT_NAMES:
            same = torch.equal(getattr(true[name], moment), getattr(sampled[name], moment))
            assert same == (moment not in OF_THE_FISHER), moment


def test_drawn_labels_repeat_with_their_seed_and_do_not_depend_on_the_true_ones(qwen2: nn.Module) -> None:
    name = attention_names(qwen2)[0]
    other_labels = [{**b, "labels": b["labels"].where(b["labels"].eq(-100), 5)} for b in batches_of(EXAMPLES, 3)]

    def d(batches: list[dict[str, Tensor]] | None = None, **options: object) -> Tensor:
        options = {"fisher_labels": "mc", "seed": 1, **options}
        data = batches or batches_of(EXAMPLES, 3)
        return collect_moments(qwen2, data, [name], options=CalibrationOptions(**options))[name].error_square

    assert torch.equal(d(), d())
    assert torch.equal(d(), d(other_labels))
    assert not torch.allclose(d(), d(seed=2))
    assert not torch.allclose(d(), d(fisher_labels="empirical"))


@pytest.mark.parametrize(
    ("needs", "tokens", "labels", "num_backward"),
    [
        ({"cross", "input_square", "error_square"}, "nonpad", "mc", 2),
        ({"cross", "error_outer", "output_outer"}, "nonpad", "mc", 2),
        ({"cross", "input_square", "error_square"}, "nonpad", "empirical", 1),
        ({"cross", "input_square"}, "nonpad", "mc", 1),
        ({"input_outer", "error_outer"}, "nonpad", "mc", 1),
        ({"input_outer", "error_outer"}, "nonzero_delta", "mc", 2),
        ({"input_outer"}, "nonzero_delta", "mc", 1),
        ({"input_outer"}, "nonpad", "mc", 0),
    ],
)
def test_a_batch_takes_one_forward_pass_and_the_backward_passes_that_its_moments_ask_for(
    needs: set, tokens: str, labels: str, num_backward: int, qwen2: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"forward": 0, "backward": 0, "drawn": 0}

    def counting(kind: str, owner: type, method: str) -> None:
        plain = getattr(owner, method)

        def counted(*words: object, **more: object) -> object:
            runs[kind] += 1
            return plain(*words, **more)

        monkeypatch.setattr(owner, method, counted)

    counting("forward", type(qwen2), "forward")
    counting("backward", torch.Tensor, "backward")
    counting("drawn", Predictions, "sampled_labels")
    options = CalibrationOptions(fisher_labels=labels, tokens=tokens)
    found = collect_moments(
        qwen2, batches_of(EXAMPLES, 4), attention_names(qwen2), needs=frozenset(needs), options=options
    )
    draws = labels == "mc" and not needs.isdisjoint(OF_THE_FISHER)
    assert runs == {"forward": 2, "backward": 2 * num_backward, "drawn": 2 * draws}
    assert all(set(layer.names()) == needs for layer in found.values())


def test_drawn_labels_estimate_the_fisher_matrix_of_the_softmax() -> None:
    """At the logits E[δδᵀ] = diag(p) - ppᵀ, summed over completion tokens; G stays the gradient of the data."""
    model = tiny_qwen2(tie_word_embeddings=False)
    num_draws = 1000
    moments = collect_moments(
        model, [batch_of(EXAMPLES * num_draws)], ["lm_head"], needs=frozenset({"cross", "error_outer"}),
        options=drawn(weighting="token"),
    )["lm_head"]  # fmt: skip
    expected = np.zeros((40, 40))
    for example in EXAMPLES:
        with torch.no_grad():
            p = model(input_ids=torch.tensor([example.ids])).logits[0].double().softmax(-1).numpy()
        for t in range(example.num_prompt - 1, len(example.ids) - 1):
            expected += np.diag(p[t]) - np.outer(p[t], p[t])
    np.testing.assert_allclose(moments.error_outer / num_draws, expected, atol=0.08 * np.abs(expected).max())
    empirical = collect_moments(
        model, [batch_of(EXAMPLES)], ["lm_head"], options=CalibrationOptions(weighting="token")
    )["lm_head"]
    torch.testing.assert_close(moments.cross / num_draws, empirical.cross, rtol=1e-3, atol=1e-5)


def test_certain_and_impossible_tokens_are_drawn_always_and_never() -> None:
    log_p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]).log().repeat(2000, 1)
    predictions = Predictions(log_p, torch.zeros(6000).long(), torch.ones(6000).long())
    labels = predictions.sampled_labels(torch.Generator().manual_seed(0)).reshape(2000, 3)
    assert labels[:, 0].eq(1).all()
    assert labels[:, 2].eq(0).all()
    assert sorted(labels[:, 1].unique().tolist()) == [0, 2]
    assert 900 < int(labels[:, 1].eq(0).sum()) < 1100


@pytest.mark.parametrize("constructor", ["fcca", "filora"])
def test_groups_give_the_bases_of_one_pass(constructor: str) -> None:
    options = drawn()
    model, grouped = (adapted(constructor, r=4, calibrated=False) for _ in range(2))
    calibrate(model, BATCHES, options=options, progress=False)
    calibrate(grouped, BATCHES, options=drawn(group_size=3), progress=False)
    for one, other in zip(cores_of(model), cores_of(grouped), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(one.factors("default"), other.factors("default"), strict=True))


def test_rawgrad_which_reads_g_alone_is_the_same_under_drawn_labels() -> None:
    true, sampled = (adapted("rawgrad", calibrated=False) for _ in range(2))
    calibrate(true, BATCHES, progress=False)
    calibrate(sampled, BATCHES, options=drawn(), progress=False)
    for one, other in zip(cores_of(true), cores_of(sampled), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(one.factors("default"), other.factors("default"), strict=True))
