"""The kernel in Triton's interpreter, on a machine that has Triton; on a GPU tests/test_on_cuda.py runs it for real."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("num_tokens", "m", "r"), [(70, 200, 16), (5, 33, 4), (64, 128, 40), (1, 7, 1), (20, 150, 128)]
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("num_cores", [None, 1, 3])
def test_the_kernel_adds_what_the_separate_products_add(
    num_tokens: int, m: int, r: int, turned: bool, num_cores: int | None
) -> None:
    """With one core, and with a core for each row of a batch."""
    from frozencore.adapter.core_kernel import add_core_by_kernel

    rows = num_cores or 1
    y, z = (torch.randn(rows * num_tokens, size, dtype=torch.float16) for size in (m, r))
    R, P = torch.randn(rows, r, r), torch.randn(m, r, dtype=torch.float16)
    if turned:  # the backward pass gives Rᵀ; a QR gives columns side by side
        R, P = R.mT, P.mT.contiguous().mT
    through = torch.bmm(z.double().view(rows, num_tokens, r), R.double().mT).flatten(0, 1)
    expected = y.double() + 1.5 * through @ P.double().mT
    found = add_core_by_kernel(y.clone(), z, R if num_cores else R[0], P, 1.5)
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-3
