"""The proposed learning rate of cores, against gradients of a float64 copy, one example and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

import references as ref
from frozencore import CalibrationOptions, FrozenCoreConfig, calibrate
from frozencore.adapter import learning_rate
from frozencore.adapter.learning_rate import evenly_spaced, mean_square, summed_gradients
from frozencore.calibration.hooks import PassSpec
from references import numpy_of
from tiny import BATCHES, EXAMPLES, adapted, batch_of, batches_of, cores_of, draw_examples, logits, tiny_qwen2


@pytest.mark.parametrize(("longest", "lower"), [(0.8, 0.9), (8.0, 1.0)])
@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "eva"])
def test_the_rate_is_a_step_in_the_fisher_metric_halved_while_it_is_too_long(
    constructor: str, longest: float, lower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_rate, "FISHER_STEP", longest)
    monkeypatch.setattr(learning_rate, "LOWER", lower)
    model = adapted(constructor, dtype=torch.float64, calibrated=False, alpha=6.0)
    found = calibrate(model, BATCHES, progress=False)
    layers, squares, mean = {layer.name: layer for layer in cores_of(model)}, [], dict[str, Any]()
    for example in EXAMPLES:
        sums = ref.reference_moments(tiny_qwen2(), [(list(example.ids), example.num_prompt)], list(layers))
        gradients = {}
        for name, layer in layers.items():
            P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
            gradients[name] = 2.0 * P.T @ sums[name].cross @ Q  # s = alpha / r
            mean[name] = mean.get(name, 0) + gradients[name]
        squares.append(sum(np.square(gradient).sum() for gradient in gradients.values()))

    def loss_after(rate: float) -> float:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.core("default").copy_(torch.from_numpy(-rate * np.sign(mean[name])))
            return sum(float(loss_of_example(model, example)) for example in EXAMPLES)

    rate, halvings = longest / np.sqrt(np.mean(squares)), 0
    while loss_after(rate / 2) < lower * loss_after(rate):
        rate, halvings = rate / 2, halvings + 1
    assert halvings > 0 or longest < 1
    assert found.learning_rate == pytest.approx(rate, rel=1e-6)


def loss_of_example(model: torch.nn.Module, example: Any) -> torch.Tensor:
    ids = torch.tensor([list(example.ids)])
    logits = model(input_ids=ids).logits[0, example.num_prompt - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, example.num_prompt :])


def test_a_default_device_of_torch_is_not_that_of_the_sums() -> None:
    model, spec = adapted("random"), PassSpec({}, frozenset())
    cores = [layer.core("default") for layer in cores_of(model)]
    expected = summed_gradients(model, cores, BATCHES, spec)
    with torch.device("meta"):
        found = summed_gradients(model, cores, BATCHES, spec)
    assert all(map(torch.equal, found, expected))


def test_a_rate_does_not_depend_on_the_size_of_batches() -> None:
    rates = [calibrate(adapted(calibrated=False), batches_of(EXAMPLES, size), progress=False).learning_rate
             for size in (1, 3, 8)]  # fmt: skip
    assert rates[0] is not None
    assert rates == pytest.approx([rates[0]] * 3, rel=1e-4)


def packed(ends: bool) -> list[Any]:
    """All examples end to end in one row, whose beginnings the positions or the ends say."""
    rows = [{"input_ids": list(one.ids), "labels": [-100] * one.num_prompt + list(one.ids[one.num_prompt :])}
            for one in EXAMPLES]  # fmt: skip
    if not ends:
        return [DataCollatorWithFlattening()(rows)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(rows)
    return [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])}]


MASKED = batch_of(EXAMPLES)
MASKED["labels"][[0, 5]] = -100
OF_SAME_EXAMPLES: dict[str, tuple[list[Any], list[Any], CalibrationOptions]] = {
    "packed, by positions": (BATCHES, packed(ends=False), CalibrationOptions()),
    "packed, by ends": (BATCHES, packed(ends=True), CalibrationOptions()),
    "masked ones beside them": (
        batches_of([one for i, one in enumerate(EXAMPLES) if i not in (0, 5)], 3), [MASKED], CalibrationOptions()
    ),
    "weighed by their tokens": (BATCHES, BATCHES, CalibrationOptions(weighting="token_sum")),
}  # fmt: skip


@pytest.mark.parametrize("form", OF_SAME_EXAMPLES)
def test_a_rate_is_that_of_the_examples_one_by_one(form: str) -> None:
    """On random directions, which do not depend on the examples."""
    apart, given, options = OF_SAME_EXAMPLES[form]
    wanted = calibrate(adapted("random"), apart, progress=False).learning_rate
    found = calibrate(adapted("random"), given, options=options, progress=False).learning_rate
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_mean_square_of_single_gradients_is_estimated_from_sums_over_batches(size: int) -> None:
    """Gradients of 200 values with a mean and a covariance of unlike variances."""
    generator = torch.Generator().manual_seed(0)
    mean, spread = 0.3 * torch.ones(200).double(), torch.linspace(0.1, 2, 200).double()
    g = mean + spread * torch.randn(640, 200, generator=generator).double()
    sums = g.view(-1, size, 200).sum(1)
    squares = float(sums.square().sum() / size)
    found = mean_square(squares, sums.sum(0), len(sums), len(g))
    assert found == pytest.approx(float(g.square().sum(1).mean()), rel=1e-9 if size == 1 else 0.05)


def test_a_loss_of_whole_batches_proposes_about_the_rate_of_single_examples() -> None:
    def rate(size: int) -> float | None:
        batches = batches_of(draw_examples(32, seed=3), size)
        return calibrate(adapted("random"), batches, loss_fn=mean_of_examples, progress=False).learning_rate

    assert rate(4) == pytest.approx(rate(1), rel=0.3)


def mean_of_examples(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    return (losses.sum(1) / targets.ne(-100).sum(1)).mean()


def test_a_loss_below_zero_is_no_reason_to_halve() -> None:
    def shifted(by: float) -> float | None:
        model = adapted("random", dtype=torch.float64)
        return calibrate(model, BATCHES, loss_fn=lambda m, batch: m(**batch).loss + by, progress=False).learning_rate

    assert shifted(-100.0) == pytest.approx(shifted(100.0), rel=1e-6)


def test_an_active_adapter_on_other_layers_does_not_count() -> None:
    options = {"constructor": "random", "target_modules": ["q_proj"]}
    wanted = calibrate(adapted(model=tiny_qwen2(), **options), BATCHES, progress=False).learning_rate
    model = adapted("random", model=tiny_qwen2(), target_modules=["down_proj"], modules_to_save=["norm"], trained=True)
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save["default"].weight.mul_(3)
    model.add_adapter("b", FrozenCoreConfig(r=3, alpha=None, coordinates="qr", **options))
    before = logits(model)
    assert calibrate(model, BATCHES, adapter_name="b", progress=False).learning_rate == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("constructor", ["eva", "random"])
def test_rows_without_labels_propose_no_rate(constructor: str) -> None:
    batches = [{name: X for name, X in batch.items() if name != "labels"} for batch in BATCHES]
    model = adapted(constructor, calibrated=False)
    assert calibrate(model, batches, progress=False).learning_rate is None
    assert all(bool(layer.frozencore_P["default"].any()) for layer in cores_of(model))


def test_a_finer_scale_takes_a_larger_rate() -> None:
    """The rate follows 1 / s, so s is of no consequence for training."""
    rates = [calibrate(adapted(calibrated=False, alpha=alpha), BATCHES, progress=False).learning_rate
             for alpha in (3.0, 0.3)]  # fmt: skip
    assert rates[1] == pytest.approx(10 * rates[0], rel=1e-5)


def test_the_model_is_as_before() -> None:
    model = adapted(calibrated=False)
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    calibrate(model, BATCHES, progress=False)
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert not any(torch.count_nonzero(layer.core("default")) for layer in cores_of(model))


def test_an_optimizer_that_steps_in_the_backward_pass_takes_no_step() -> None:
    """As PyTorch's tutorial and torchtune run it: the hook of a gradient steps, and throws the gradient away."""
    model, plain, steps = adapted(calibrated=False), adapted(calibrated=False), []

    def step(core: torch.Tensor) -> None:
        steps.append(core)
        core.grad = None

    for layer in cores_of(model):
        layer.core("default").register_post_accumulate_grad_hook(step)
    rates = [calibrate(one, BATCHES, progress=False).learning_rate for one in (model, plain)]
    assert not steps
    assert rates[0] == rates[1]
    model.train()(**BATCHES[0]).loss.backward()
    assert len(steps) == len(cores_of(model))


def test_the_examples_are_spread_over_all_batches() -> None:
    batches: list[Any] = [{"input_ids": torch.arange(8).view(8, 1) + 8 * i} for i in range(4)]
    classifier = torch.nn.Identity()
    assert [int(one["input_ids"]) for one in evenly_spaced(classifier, batches, 4)] == [0, 8, 16, 24]
    assert [int(one["input_ids"]) for one in evenly_spaced(classifier, batches, 64)] == list(range(32))


def test_batches_stay_whole_where_rows_belong_together() -> None:
    """Patches of images have rows of their own, and a loss of pairs compares the rows of a batch."""
    patches: list[Any] = [{"input_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(7, i + 1)} for i in range(8)]
    assert [one["pixel_values"].shape[1] for one in evenly_spaced(torch.nn.Identity(), patches, 4)] == [1, 5]
    pairs: list[Any] = [{"input_ids": torch.full((4, 3), i)} for i in range(8)]
    assert [len(one["input_ids"]) for one in evenly_spaced(torch.nn.Identity(), pairs, 16, whole=True)] == [4] * 4
