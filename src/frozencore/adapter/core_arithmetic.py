"""The arithmetic of a core beside a base product, without autograd: what the operators and the product by hand run.

Shapes: inputs x (..., n), outputs y (..., m), P m x r, Q n x r, z = Qᵀx and h = Pᵀg tokens x r, R r x r; or rows x r x
r, a core for each row, the tokens of a row one after the other.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import linear

from frozencore.maths.sums import HALF

LARGEST_RANK = 128  # a block of the kernel holds all of R
HAS_TRITON = find_spec("triton") is not None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, P: Tensor, Q: Tensor, R: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """y (..., m) and z, tokens x r in the dtype of Q."""
    shape = x.shape
    tokens = x.reshape(-1, shape[-1])
    z = tokens.mm(Q)
    y = add_core(linear(tokens, weight, bias), z, R, P, scale)
    return y.view(*shape[:-1], weight.shape[0]), z


def input_gradient(g: Tensor, h: Tensor, weight: Tensor | None, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    """``Wᵀ g + s·Q Rᵀ h`` of each token, tokens x n: g tokens x m, h tokens x r; None leaves the first part out."""
    if weight is None:
        return (through(h.to(R.dtype), R.mT) * scale).to(Q.dtype) @ Q.mT
    return add_core(g @ weight, h, R.mT, Q, scale)


def add_core(y: Tensor, z: Tensor, R: Tensor, P: Tensor, scale: float) -> Tensor:
    """``y += s·z Rᵀ Pᵀ``: y tokens x m, z tokens x r, the tokens of a row one after the other."""
    if fits_kernel(z, R):
        from frozencore.adapter.core_kernel import add_core_by_kernel

        return add_core_by_kernel(y, z, R, P, scale)
    u = through(z, R) if z.dtype == R.dtype else through(z.to(R.dtype), R).to(P.dtype)  # a call that does nothing costs
    return y.addmm_(u, P.mT, alpha=scale)


def through(z: Tensor, R: Tensor) -> Tensor:
    """``z Rᵀ`` with one core, or with that of each row: z (..., r) with all tokens of a row together."""
    if R.ndim == 2:
        return linear(z, R)
    rows, r, _ = R.shape
    if z.numel() == rows * r:  # a token a row, as in generation: bmm calls a library for each, 2 to 5 times this
        product = (R.mT * z.reshape(rows, r, 1)).sum(1)
        return product if z.ndim == 2 else product.view(z.shape)
    return torch.bmm(z.reshape(rows, -1, r), R.mT).view(z.shape)


def core_gradient(h: Tensor, z: Tensor, R: Tensor, scale: float) -> Tensor:
    """``s·hᵀ z`` in the dtype of R: h and z tokens x r."""
    if R.ndim == 3:
        h, z = (X.to(R.dtype).view(len(R), -1, X.shape[-1]) for X in (h, z))
        return h.mT @ z * scale
    if fits_kernel(z, R):
        return torch.addmm(R, h.mT, z, beta=0, alpha=scale, out_dtype=R.dtype)
    return h.to(R.dtype).mT @ z.to(R.dtype) * scale


def fits_kernel(z: Tensor, R: Tensor) -> bool:
    """16-bit activations around a float32 core on a CUDA device; a second derivative needs the plain products."""
    return (
        z.is_cuda
        and z.dtype in HALF
        and R.dtype == torch.float32
        and R.shape[-1] <= LARGEST_RANK
        and HAS_TRITON
        and not torch.is_grad_enabled()
    )
