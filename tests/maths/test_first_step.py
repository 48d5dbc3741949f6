"""The direction of a core's first step, against sums over single tokens."""

from __future__ import annotations

import pytest
import torch

from frozencore.maths.basis import known_basis
from frozencore.maths.objective import first_step, of_length


def test_where_inputs_and_errors_are_independent_it_is_the_gradient_over_the_root_of_its_second_moment() -> None:
    generator = torch.Generator().manual_seed(0)
    deltas, inputs = (torch.randn(count, size, generator=generator) + 0.5 for count, size in ((7, 5), (9, 6)))
    P, Q = (torch.linalg.qr(torch.randn(size, 3, generator=generator)).Q for size in (5, 6))
    of_token = torch.stack([torch.outer(delta, x) for delta in deltas for x in inputs])  # every pair: independent
    projected = P.mT @ of_token @ Q
    wanted = -projected.mean(0) / projected.square().mean(0).sqrt()
    A, D = inputs.mT @ inputs / len(inputs), deltas.mT @ deltas / len(deltas)
    found = first_step(of_token.mean(0), A, D, known_basis(P, Q))
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)


def test_directions_that_nothing_flows_along_are_left_alone() -> None:
    A, D = torch.diag(torch.tensor([1.0, 0.0])), torch.eye(2)
    found = first_step(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), A, D, known_basis(torch.eye(2), torch.eye(2)))
    assert found.tolist() == [[-1.0, 0.0], [0.0, 0.0]]


def test_cores_of_any_ranks_go_equally_far_in_the_root_mean_square_and_keep_their_proportions() -> None:
    cores = {"narrow": torch.full((2, 2), 3.0), "wide": torch.full((4, 4), 1.0)}
    scaled = of_length(cores, 5.0)
    assert sum(float(R.norm()) ** 2 for R in scaled.values()) / 2 == pytest.approx(25)
    assert float(scaled["narrow"][0, 0] / scaled["wide"][0, 0]) == pytest.approx(3)
    assert of_length({"dead": torch.zeros(2, 2)}, 5.0)["dead"].tolist() == [[0, 0], [0, 0]]
