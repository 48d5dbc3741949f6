"""Sketches of what a model trains on, against float64 moments: what is summed, what is kept, what it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from adapted import EXAMPLES, adapted, cores_of
from frozencore.calibration.running_sketch import RunningSketch, sketch_bytes
from frozencore.calibration.training_moments import SketchedMoments, TrainingMoments
from frozencore.errors import CalibrationError
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from references import numpy_of, principal_cosines, reference_moments, svd
from tiny import attention_names, batch_of, tiny_qwen2

SHAPE, WIDTH = (40, 30), 6
NEEDS = frozenset({"cross", "input_square", "error_square"})


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """δ and x of 50 tokens, correlated, with outlier channels."""
    signal = drawn(50, 3, seed=seed)
    x = signal @ drawn(3, SHAPE[1], seed=1) + 0.3 * drawn(50, SHAPE[1], seed=seed + 1)
    delta = signal @ drawn(3, SHAPE[0], seed=2) + 0.3 * drawn(50, SHAPE[0], seed=seed + 2)
    x[:, ::7] *= 20
    delta[:, ::9] *= 1e-3
    return delta, x


def diagonals_of(*batches: tuple[Tensor, Tensor], weights: tuple[float, ...] = ()) -> LayerMoments:
    weights = weights or (1.0,) * len(batches)
    d, a = (sum(w * pair[i].square().sum(0) for w, pair in zip(weights, batches, strict=True)) for i in (0, 1))
    return LayerMoments(50 * len(batches), input_square=a, error_square=d)


def whitened_sum(diagonals: LayerMoments, G: np.ndarray) -> np.ndarray:
    a, d = (numpy_of(v) / diagonals.num_tokens for v in (diagonals.input_square, diagonals.error_square))
    return (d + 1e-3 * d.mean())[:, None] ** -0.5 * G * (a + 1e-3 * a.mean()) ** -0.5


def cross(pair: tuple[Tensor, Tensor]) -> np.ndarray:
    return numpy_of(pair[0]).T @ numpy_of(pair[1])


def test_a_sketch_as_wide_as_the_layer_is_the_sum_itself_and_a_share_of_it_after_each_turn() -> None:
    first, second, third = (tokens(seed) for seed in (10, 20, 30))
    sketch = RunningSketch(SHAPE, 99, Whitening())
    sketch.begin(diagonals_of(first), torch.device("cpu"))
    sketch.add(*second)
    sketch.next_round(diagonals_of(first, second), 4, 0.5)
    sketch.add(*third)
    diagonals = diagonals_of(first, second, third, weights=(0.5, 0.5, 1.0))
    found = sketch.next_round(diagonals, 4, 0.5)
    U, S, V = svd(whitened_sum(diagonals, 0.5 * cross(second) + cross(third)))
    np.testing.assert_allclose(numpy_of(found.S), S[:4], rtol=1e-4)
    assert principal_cosines(numpy_of(found.U), U[:, :4]).min() > 1 - 1e-5
    assert principal_cosines(numpy_of(found.V), V[:, :4]).min() > 1 - 1e-5


def test_a_narrow_sketch_comes_near_the_exact_directions_of_a_stream_within_rounds() -> None:
    """The sum of each round's new batch and half of the older ones; outlier channels are whitened away."""
    sketch, G, batches = RunningSketch(SHAPE, WIDTH, Whitening()), np.zeros(SHAPE), []
    cosines = []
    for number in range(5):
        batches.append(tokens(100 * number))
        diagonals = diagonals_of(*batches)
        if number == 0:
            sketch.begin(diagonals, torch.device("cpu"))
        sketch.add(*batches[-1])
        G = 0.5 * G + cross(batches[-1])
        found = sketch.next_round(diagonals, 3, 0.5)
        U, _, V = svd(whitened_sum(diagonals, G))
        cosines.append(min(
            principal_cosines(numpy_of(found.U), U[:, :3]).min(), principal_cosines(numpy_of(found.V), V[:, :3]).min()
        ))  # fmt: skip
    assert cosines[0] < 0.9
    assert min(cosines[2:]) > 0.99


def test_a_layer_without_gradient_has_no_directions() -> None:
    sketch = RunningSketch(SHAPE, WIDTH, Whitening())
    delta, x = tokens(1)
    sketch.begin(diagonals_of((0 * delta, x)), torch.device("cpu"))
    sketch.add(0 * delta, x)
    assert [tuple(part.shape) for part in sketch.next_round(diagonals_of((0 * delta, x)), 3, 0.5)] == [
        (40, 0),
        (0,),
        (30, 0),
    ]


def sketched(model: torch.nn.Module, width: int) -> SketchedMoments:
    layers = {layer.name: layer for layer in cores_of(model)}
    shapes = {name: layer.shape for name, layer in layers.items()}
    return SketchedMoments(model, layers, shapes=shapes, widths=dict.fromkeys(layers, width), whitening=Whitening())


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_what_is_sketched_while_training_are_products_with_the_moments_of_the_batches(checkpointing: str) -> None:
    model = adapted().train()
    if checkpointing != "none":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    sums = sketched(model, 5)
    assert sums.awaits_metric
    for example in EXAMPLES[:2]:  # only tell the metric
        model(**batch_of([example]), use_cache=False).loss.backward()
    sums.set_metric()
    assert not sums.awaits_metric
    for example in EXAMPLES[2:5]:
        model(**batch_of([example]), use_cache=False).loss.backward()
        with torch.no_grad():
            model(**batch_of([example]), use_cache=False)
    sums.listen(on=False)
    model(**batch_of(EXAMPLES[5:6]), use_cache=False).loss.backward()
    sums.close()
    names = attention_names(tiny_qwen2())
    told, summed = (
        reference_moments(tiny_qwen2(), [(e.ids, e.num_prompt) for e in part], names)
        for part in (EXAMPLES[:2], EXAMPLES[2:5])
    )
    for name, sketch in sums.sketches.items():
        tests, (of_errors, of_values) = sketch.tests, sketch.images
        G, (m, n) = summed[name].cross, sketch.shape
        for found, wanted in ((of_errors, G @ numpy_of(tests.right)), (of_values, G.T @ numpy_of(tests.left))):
            np.testing.assert_allclose(numpy_of(found), wanted, rtol=1e-3, atol=1e-5 * abs(wanted).max())
        diagonals = LayerMoments(
            told[name].num_tokens,
            input_square=torch.tensor(told[name].input_square), error_square=torch.tensor(told[name].error_square),
        )  # fmt: skip
        metric = whitened_sum(diagonals, np.ones((m, n)))
        np.testing.assert_allclose(numpy_of(tests.error_root * tests.input_root.mT), metric, rtol=1e-3)
        V = numpy_of(tests.right) / numpy_of(tests.input_root)
        np.testing.assert_allclose(V.T @ V, np.eye(5), atol=0.02)  # but for the rounding of the tests


def test_a_sketch_holds_what_the_plan_counts() -> None:
    model = adapted().train()
    sums = sketched(model, 5)
    model(**batch_of(EXAMPLES[:1])).loss.backward()
    sums.set_metric()
    model(**batch_of(EXAMPLES[1:2])).loss.backward()
    sums.close()
    held = sum(tensor.nbytes for name, tensor in sums.state().items() if not name.endswith("num_tokens"))
    assert held == sum(sketch_bytes(sketch.shape, 5)[0] for sketch in sums.sketches.values())


def test_a_sketch_that_met_nan_says_in_which_layer() -> None:
    model = adapted().train()
    sums = sketched(model, 5)
    model(**batch_of(EXAMPLES[:1])).loss.backward()
    sums.set_metric()
    with torch.no_grad():
        model.get_input_embeddings().weight[EXAMPLES[1].ids[0]] = torch.nan
    model(**batch_of(EXAMPLES[1:2])).loss.backward()
    sums.close()
    with pytest.raises(CalibrationError, match=r"of layer 'model\.layers\.0.* met NaN or Inf while training"):
        list(sums.next_round(dict.fromkeys(sums.sketches, 3), 0.5))


def test_saved_sums_of_another_kind_are_refused() -> None:
    model = adapted().train()
    exact = TrainingMoments(model, {layer.name: layer for layer in cores_of(model)}, NEEDS)
    model(**batch_of(EXAMPLES[:1])).loss.backward()
    exact.close()
    other = sketched(adapted(), 5)
    other.close()
    with pytest.raises(CalibrationError, match=r"saved moments are exact sums.* Resume with the memory_budget"):
        other.load_state(exact.state())
