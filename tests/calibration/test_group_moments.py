"""Groups one at a time against all of their whitened moments at once, in float64."""

from __future__ import annotations

import gc

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frozencore import CalibrationOptions, Whitening, collect_moments
from frozencore.calibration import group_moments
from frozencore.calibration.group_moments import GroupedLayer, collect_groups
from frozencore.calibration.recorder import LayerRecorder, ReadInput
from frozencore.calibration.taps import Taps
from frozencore.constructors.random import random_basis
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.groups import shared_spans
from frozencore.maths.linalg import principal_cosines
from frozencore.maths.moments import LayerMoments
from references import numpy_of
from tiny import ATTENTION, batches_of, draw_examples, tiny_qwen2

GROUPS = {name: batches_of(draw_examples(5, seed=seed), 3) for seed, name in enumerate(("anna", "ben", "cleo", "dora"))}
RANK = 2


def model_and_layers() -> tuple[nn.Module, dict[str, nn.Module]]:
    model = tiny_qwen2().double()
    return model, {name: part for name, part in model.named_modules() if name.endswith(ATTENTION)}


def collected(
    groups: dict[str, list], rank: int = RANK, beside: dict[str, Basis] | None = None, **weights: float
) -> dict[str, GroupedLayer]:
    model, layers = model_and_layers()
    return collect_groups(
        model, groups, layers, dict.fromkeys(layers, rank), whitening=Whitening(), options=CalibrationOptions(),
        weights=dict.fromkeys(groups, 1.0) | weights, beside=beside,
    )  # fmt: skip


def roots(moments: list[LayerMoments], damping: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    """The diagonals of D^-1/2 and A^-1/2 of all groups."""
    a, d = (np.mean([getattr(one, name) / getattr(one, name).mean() for one in moments], axis=0) for name in ("a", "d"))
    return (d + damping * d.mean()) ** -0.5, (a + damping * a.mean()) ** -0.5


def whitened(moments: list[LayerMoments]) -> Tensor:
    """Every group's T in NumPy, from its moments and the diagonals of all."""
    D, A = roots(moments)
    T = [D[:, None] * numpy_of(one.G) * A for one in moments]
    return torch.tensor(np.stack([one / np.linalg.norm(one) for one in T]))


@pytest.fixture(scope="module")
def moments() -> dict[str, list[LayerMoments]]:
    """The moments of every group by layer."""
    model, layers = model_and_layers()
    found = [collect_moments(model, batches, layers) for batches in GROUPS.values()]
    return {name: [of_group[name] for of_group in found] for name in layers}


@pytest.fixture(scope="module")
def stacks(moments: dict[str, list[LayerMoments]]) -> dict[str, Tensor]:
    """T of every group by layer."""
    return {name: whitened(of_groups) for name, of_groups in moments.items()}


def test_spans_of_groups_one_at_a_time_hold_what_those_of_all_at_once_do(stacks: dict[str, Tensor]) -> None:
    found = collected(GROUPS)
    assert found.keys() == stacks.keys()
    for name, T in stacks.items():
        spans, best = found[name].spans, shared_spans(T, RANK)
        held = float((spans.U.mT @ T @ spans.V).square().sum())
        assert held == pytest.approx(spans.sums[-1], rel=1e-6)
        assert 0.99 * best.sums[-1] < held <= best.sums[-1] * (1 + 1e-6)


def test_each_row_can_be_a_group_of_its_own() -> None:
    rows = {f"row {k}": batches_of([example], 1) for k, example in enumerate(draw_examples(10, seed=9))}
    model, layers = model_and_layers()
    moments = [collect_moments(model, batches, layers) for batches in rows.values()]
    for name, layer in collected(rows).items():
        T = whitened([of_row[name] for of_row in moments])
        best, held = shared_spans(T, RANK).sums[-1], (layer.spans.U.mT @ T @ layer.spans.V).square().sum((1, 2))
        assert 0.98 * best < float(held.sum()) <= best * (1 + 1e-6)
        assert list(layer.shares) == list(rows)
        assert [share.held for share in layer.shares.values()] == pytest.approx(held.tolist(), rel=1e-5)


def test_directions_that_a_basis_grows_by_hold_what_the_best_of_all_groups_at_once_do(
    moments: dict[str, list[LayerMoments]], stacks: dict[str, Tensor]
) -> None:
    old = {name: random_basis(shape=T.shape[1:], rank=2, seed=7) for name, T in stacks.items()}
    found = collected(GROUPS, rank=2 + RANK, beside=old)
    for name, T in stacks.items():
        spans = found[name].spans
        complete = []
        for X, root, own in zip((old[name].P, old[name].Q), roots(moments[name]), (spans.U, spans.V), strict=True):
            given = torch.linalg.qr(torch.tensor(numpy_of(X) / root[:, None])).Q  # D^1/2 P
            assert principal_cosines(given, own[:, :2]).min() > 1 - 1e-6
            complete.append(torch.linalg.svd(given).U)
        T = complete[0].mT @ T @ complete[1]
        best, held = shared_spans(T, 2 + RANK, 2).sums[-1], spans.sums[-1]
        assert 0.98 * best < held <= best * (1 + 1e-6)


def test_the_share_of_each_group_is_what_its_own_matrix_says(stacks: dict[str, Tensor]) -> None:
    for name, layer in collected(GROUPS).items():
        assert list(layer.shares) == list(GROUPS)
        for T, share in zip(stacks[name], layer.shares.values(), strict=True):
            own = np.linalg.svd(numpy_of(T), compute_uv=False)[:RANK]
            m, n = T.shape
            assert share.held == pytest.approx(float((layer.spans.U.mT @ T @ layer.spans.V).square().sum()), rel=1e-5)
            assert share.own == pytest.approx(float((own**2).sum()), rel=1e-5)
            assert share.random == RANK**2 / (m * n)
            assert share.held <= share.own


def test_groups_of_layers_give_the_same_and_a_group_of_many_rows_weighs_no_more() -> None:
    repeated = {name: batches * (3 if name == "ben" else 1) for name, batches in GROUPS.items()}
    plain, longer = collected(GROUPS), collected(repeated)
    for name, layer in plain.items():
        for X, Y in ((layer.spans.U, longer[name].spans.U), (layer.spans.V, longer[name].spans.V)):
            torch.testing.assert_close(X, Y, rtol=0, atol=1e-5)


def test_a_group_of_weight_two_counts_as_the_group_twice() -> None:
    heavy, twice = collected(GROUPS, ben=2.0), collected({**GROUPS, "ben again": GROUPS["ben"]})
    for name, layer in heavy.items():
        for X, Y in ((layer.spans.U, twice[name].spans.U), (layer.spans.V, twice[name].spans.V)):
            assert principal_cosines(X, Y).min() > 1 - 1e-5
        assert layer.spans.sums[-1] == pytest.approx(twice[name].spans.sums[-1], rel=1e-6)
        torch.testing.assert_close(layer.diagonals.d, twice[name].diagonals.d)
        assert layer.shares["ben"].held == pytest.approx(twice[name].shares["ben"].held, rel=1e-5)


def test_nothing_larger_than_one_groups_sums_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold one m x n matrix a layer at a time: every group's is used before the next one is summed."""
    live: list[int] = []
    run = group_moments.run_pass

    def watched(*args: object, **kwargs: object) -> dict[str, LayerRecorder]:
        gc.collect()
        shapes = {(part.out_features, part.in_features) for part in model_and_layers()[1].values()}
        wide = [x for x in gc.get_objects() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
        live.append(sum(tuple(x.shape) in shapes and x.dtype == torch.float64 and min(x.shape) > 8 for x in wide))
        return run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(group_moments, "run_pass", watched)
    collected(GROUPS, rank=1)
    assert len(live) == 3 * len(GROUPS)
    assert len(set(live)) == 1


def test_no_tensor_grows_with_the_number_of_groups_and_two_thousand_have_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorders without a model, because 8,000 passes of a model take half a minute."""
    seen = torch.Generator().manual_seed(0)
    X, E = (torch.randn(40, 7, size, generator=seen).double() for size in (12, 9))
    rows, layer = list(zip(X, E, strict=True)), nn.Linear(12, 9).double()
    num_read, held = 0, []

    def summed(model: nn.Module, batches: list, taps: Taps, progress: None) -> dict[str, LayerRecorder]:
        nonlocal num_read
        num_read += 1
        if num_read % K == 0:  # the last group of each pass
            tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
            held.append(sum(x.numel() * x.element_size() for x in tensors))
        recorders = taps.recorders()
        for x, error in batches:
            recorders["one"].add_input(ReadInput.of(x, taps.needs))
            recorders["one"].add_error(error, x, taps.needs)
        return recorders

    monkeypatch.setattr(group_moments, "run_pass", summed)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks take most of the time
    most = []
    for K in (119, 2000):  # the stack of 64 is as full after the last group of either
        num_read, found = 0, None
        held.clear()
        groups = {f"group {k}": [rows[k % 40]] for k in range(K)}
        found = collect_groups(
            layer, groups, {"one": layer}, {"one": 2}, whitening=Whitening(), options=CalibrationOptions(),
            weights=dict.fromkeys(groups, 1.0),
        )["one"]  # fmt: skip
        assert len(held) == 4
        most.append(max(held))
    assert most[1] <= most[0]
    T = whitened([LayerMoments(7, e.mT @ x, x.square().sum(0), e.square().sum(0)) for x, e in rows])
    own = (found.spans.U.mT @ T @ found.spans.V).square().sum((1, 2))
    assert list(found.shares) == list(groups)
    for number, share in enumerate(found.shares.values()):
        assert share.held == pytest.approx(float(own[number % 40]), rel=1e-6)
    assert float(own.sum()) > 0.95 * shared_spans(T, 2).sums[-1]  # of groups that share nothing


def test_a_group_without_loss_tokens_is_named_in_one_line() -> None:
    masked = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in GROUPS["ben"]]
    with pytest.raises(CalibrationError, match=r"^Group 'ben': .*every label of a batch is masked") as caught:
        collected({**GROUPS, "ben": masked})
    assert "\n" not in str(caught.value)
