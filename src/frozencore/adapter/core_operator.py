"""The arithmetic of a core beside a base product, and its operators in torch.

    frozencore::adapted_linear   y = W x + b + s·P R Qᵀ x, and z = Qᵀ x
    frozencore::plus_core        y + s·P R Qᵀ x for the output y of any base layer, and z

A compiler sees an operator as one node with shapes and derivatives, and so keeps our kernel. Eager code calls the same
arithmetic directly (:mod:`frozencore.adapter.core_product`), without the cost of a dispatched call. Both keep only z
for the backward pass. z is an output, because second derivatives can reach x only through an output.

Shapes: inputs x (..., n), outputs y (..., m), P m x r, Q n x r, z = Qᵀx and h = Pᵀg tokens x r, R r x r; or R rows x r
x r, a core for each row, with the tokens of a row contiguous.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from frozencore.maths.sums import HALF

LARGEST_RANK = 128  # a block of the kernel holds all of R
HAS_TRITON = find_spec("triton") is not None
_FACTORS = "Tensor P, Tensor Q, Tensor R, float scale"


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
    """``Wᵀ g + s·Q Rᵀ h`` of each token, tokens x n: g tokens x m, h tokens x r; without W only the second part."""
    if weight is None:
        return (through(h.to(R.dtype), R.mT) * scale).to(Q.dtype) @ Q.mT
    return add_core(g @ weight, h, R.mT, Q, scale)


def add_core(y: Tensor, z: Tensor, R: Tensor, P: Tensor, scale: float) -> Tensor:
    """``y += s·z Rᵀ Pᵀ``: y tokens x m, z tokens x r, the tokens of a row contiguous."""
    if fits_kernel(z, R):
        from frozencore.adapter.core_kernel import add_core_by_kernel

        return add_core_by_kernel(y, z, R, P, scale)
    u = through(z, R) if z.dtype == R.dtype else through(z.to(R.dtype), R).to(P.dtype)  # idle casts cost time
    return y.addmm_(u, P.mT, alpha=scale)


def through(z: Tensor, R: Tensor) -> Tensor:
    """``z Rᵀ`` with one core, or with each row's own: z (..., r) with the tokens of a row contiguous."""
    if R.ndim == 2:
        return linear(z, R)
    rows, r, _ = R.shape
    if z.numel() == rows * r:  # one token a row, as in generation: bmm takes 2 to 5 times as long
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
    """Return whether the kernel applies: 16-bit activations, a float32 core, CUDA, no second derivative."""
    return (
        z.is_cuda
        and z.dtype in HALF
        and R.dtype == torch.float32
        and R.shape[-1] <= LARGEST_RANK
        and HAS_TRITON
        and not torch.is_grad_enabled()
    )


def operator_pays(x: Tensor, P: Tensor) -> bool:
    """Return whether an operator would use the kernel; otherwise a compiler is faster with a plain expression."""
    return x.is_cuda and x.dtype in HALF and x.dtype == P.dtype and P.shape[1] <= LARGEST_RANK and HAS_TRITON


@torch.library.custom_op(
    "frozencore::adapted_linear",
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, Tensor? bias, {_FACTORS}) -> (Tensor, Tensor)",
)
def adapted_linear_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, P: Tensor, Q: Tensor, R: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """y (..., m) and z, tokens x r, of inputs x (..., n); weight, bias, P and Q are frozen."""
    with torch.no_grad():  # otherwise the arithmetic would prepare for a second derivative
        return forward(x, weight, bias, P, Q, R, scale)


@torch.library.custom_op(
    "frozencore::plus_core", mutates_args=(), schema=f"(Tensor y, Tensor x, {_FACTORS}) -> (Tensor, Tensor)"
)
def plus_core_operator(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A new tensor y (..., m) with the core's part added, and z, tokens x r; P and Q are frozen."""
    with torch.no_grad():
        z = x.reshape(-1, x.shape[-1]) @ Q
        added = add_core(y.reshape(-1, y.shape[-1]).clone(memory_format=torch.contiguous_format), z, R, P, scale)
        return added.view(y.shape), z


@torch.library.custom_op(
    "frozencore::input_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor h, Tensor? weight, Tensor Q, Tensor R, float scale) -> Tensor",
)
def input_gradient_operator(g: Tensor, h: Tensor, weight: Tensor | None, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    """``Wᵀ g + s·Q Rᵀ h`` of each token, tokens x n."""
    with torch.no_grad():
        return input_gradient(g, h, weight, Q, R, scale)


@torch.library.custom_op(
    "frozencore::core_gradient", mutates_args=(), schema="(Tensor h, Tensor z, Tensor R, float scale) -> Tensor"
)
def core_gradient_operator(h: Tensor, z: Tensor, R: Tensor, scale: float) -> Tensor:
    """``s·hᵀ z`` in the shape and dtype of R."""
    with torch.no_grad():
        return core_gradient(h, z, R, scale).contiguous()


@adapted_linear_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Any:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), _like_z(x, Q)


@plus_core_operator.register_fake
def _(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Any:
    return y.new_empty(y.shape), _like_z(x, Q)


@input_gradient_operator.register_fake
def _(g: Tensor, h: Tensor, weight: Tensor | None, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    return g.new_empty(g.shape[0], Q.shape[0])


@core_gradient_operator.register_fake
def _(h: Tensor, z: Tensor, R: Tensor, scale: float) -> Tensor:
    return torch.empty_like(R, memory_format=torch.contiguous_format)


def _like_z(x: Tensor, Q: Tensor) -> Tensor:
    return x.new_empty(x.reshape(-1, x.shape[-1]).shape[0], Q.shape[1])


def keep(ctx: Any, x: Tensor, weight: Tensor | None, P: Tensor, Q: Tensor, R: Tensor, scale: float, z: Tensor) -> None:
    """Save the tensors of the backward pass: z only if R trains, the weight only for the whole product."""
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.shape = scale, x.shape
    ctx.save_for_backward(weight, P, Q, R, z if R.requires_grad else None)


def _gradients(ctx: Any, grads: tuple[Tensor | None, ...], wants_x: bool) -> tuple[Tensor | None, Tensor | None]:
    if torch.is_grad_enabled():  # operators have no second derivative, the plain products do
        return gradients(ctx, grads, wants_x, input_gradient, core_gradient)
    return gradients(ctx, grads, wants_x, input_gradient_operator, core_gradient_operator)


def gradients(
    ctx: Any, grads: tuple[Tensor | None, ...], wants_x: bool, of_input: Any, of_core: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of R, by :func:`input_gradient` and :func:`core_gradient` or their operators."""
    grad_y, grad_z = grads
    weight, P, Q, R, z = ctx.saved_tensors
    grad_x = grad_R = None
    if grad_y is not None:
        g = grad_y.reshape(-1, grad_y.shape[-1])
        h = g @ P
        if z is not None:
            grad_R = of_core(h, z, R, ctx.scale)
        if wants_x:
            grad_x = of_input(g, h, weight, Q, R, ctx.scale)
    if grad_z is not None and wants_x:
        through_z = grad_z @ Q.mT
        grad_x = through_z if grad_x is None else grad_x + through_z
    return None if grad_x is None else grad_x.view(ctx.shape), grad_R


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, P, Q, R, scale = inputs
    keep(ctx, x, weight, P, Q, R, scale, output[1])


def _linear_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_x, grad_R = _gradients(ctx, grads, ctx.needs_input_grad[0])
    return grad_x, None, None, None, None, grad_R, None


def _keep_plus(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x, P, Q, R, scale = inputs
    keep(ctx, x, None, P, Q, R, scale, output[1])


def _plus_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_x, grad_R = _gradients(ctx, grads, ctx.needs_input_grad[1])
    return grads[0], grad_x, None, None, grad_R, None


adapted_linear_operator.register_autograd(_linear_backward, setup_context=_keep_linear)
plus_core_operator.register_autograd(_plus_backward, setup_context=_keep_plus)
