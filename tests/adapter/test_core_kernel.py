"""The kernel in Triton's interpreter, on a machine that has Triton; on a GPU tests/test_on_cuda.py runs it for real."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("num_tokens", "m", "r"), [(70, 200, 16), (5, 33, 4), (64, 128, 40), (1, 7, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_kernel_adds_what_the_separate_products_add(num_tokens: int, m: int, r: int, turned: bool) -> None:
    from frozencore.adapter.core_kernel import add_core

    y, z = (torch.randn(num_tokens, size, dtype=torch.float16) for size in (m, r))
    R, P = torch.randn(r, r), torch.randn(m, r, dtype=torch.float16)
    if turned:  # the backward pass gives Rᵀ; a QR gives columns side by side
        R, P = R.mT, P.mT.contiguous().mT
    expected = y.double() + 1.5 * z.double() @ R.double().mT @ P.double().mT
    found = add_core(y.clone(), z, R, P, 1.5)
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-3
