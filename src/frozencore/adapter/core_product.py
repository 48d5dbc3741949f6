"""The adapted product ``y = W x + b + s·P R Qᵀ x``, by autograd and by hand.

The product by hand keeps one tensor for the backward pass, ``z = Qᵀ x``, r values a token. It adds the core's parts in
place to the results of the two base products, because a new m-wide tensor would cost more than the arithmetic. With
g = ∂loss/∂y and h = Pᵀ g, the gradients of a token are

    ∂loss/∂R = s·h zᵀ,    ∂loss/∂x = Wᵀ g + s·Q Rᵀ h.

Shapes: inputs x (..., n), outputs (..., m), P m x r, Q n x r, R r x r; or rows x r x r, a core for each row of x.
"""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as global_hooks

from frozencore.adapter.core_operator import (
    adapted_linear_operator,
    core_gradient,
    forward,
    gradients,
    input_gradient,
    keep,
    operator_pays,
    plus_core_operator,
    through,
)

PLAIN = (Tensor, nn.Parameter)


def core_output(x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    """``s·P R Qᵀ x`` by autograd, in the dtype of P; the product with R is in the dtype of R."""
    z = (x @ Q).to(R.dtype)
    if R.ndim == 3:  # otherwise the backward pass would keep a scaled copy of each row's core
        return through(z * scale, R).to(P.dtype) @ P.mT
    return through(z, R * scale).to(P.dtype) @ P.mT


def plus_core(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    """``y + s·P R Qᵀ x`` for the output of any base layer, in the dtype of y."""
    if operator_pays(x, P) and type(y) is Tensor and y.dtype == P.dtype == Q.dtype and not _is_rewritten():
        return plus_core_operator(y, x, P, Q, R, scale)[0]
    return y + core_output(x, P, Q, R, scale).to(y.dtype)


def adapted_linear(
    x: Tensor, base: nn.Linear, P: Tensor, Q: Tensor, R: Tensor, scale: float, weight: Tensor | None = None
) -> Tensor:
    """The whole product by hand, for a base layer and an input that :func:`is_plain` accepts.

    Args:
        weight: Replaces the base layer's weight.
    """
    weight = cast(Tensor, base._parameters["weight"]) if weight is None else weight
    bias = base._parameters["bias"]
    if torch.compiler.is_compiling():
        return adapted_linear_operator(x, weight, bias, P, Q, R, scale)[0]
    if torch.is_grad_enabled() and (x.requires_grad or R.requires_grad):
        return _AdaptedLinear.apply(x, weight, bias, P, Q, R, scale)[0]
    return forward(x, weight, bias, P, Q, R, scale)[0]


def is_plain(base: nn.Module, x: Tensor, P: Tensor) -> TypeGuard[nn.Linear]:
    """Return whether the base layer is just ``linear`` with frozen weights, in one dtype.

    Hooks may read the layer's own output, and subclasses of tensors and modules may compute differently. Compilers,
    ``torch.func``, forward-mode differentiation and autocast rewrite the program and need the plain expression.
    """
    if torch.compiler.is_compiling() and not operator_pays(x, P):
        return False
    if type(base) is not nn.Linear or "forward" in base.__dict__ or _is_hooked(base):
        return False
    weight, bias = base._parameters.get("weight"), base._parameters.get("bias")  # attribute access is slow
    if weight is None or type(x) not in PLAIN or type(weight) not in PLAIN or not x.dtype == weight.dtype == P.dtype:
        return False
    frozen = (weight, P) if bias is None else (weight, P, bias)
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in frozen)) and not _is_rewritten()


def _is_hooked(base: nn.Module) -> bool:
    own = base._forward_pre_hooks or base._forward_hooks or base._backward_pre_hooks or base._backward_hooks
    return bool(own or global_hooks._has_any_global_hook())


def _is_rewritten() -> bool:
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch.jit.is_tracing()
    )


class _AdaptedLinear(torch.autograd.Function):
    """The product, with z as a second output, so that second derivatives can pass from the saved z to x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, P: Tensor, Q: Tensor, R: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        y, z = forward(x, weight, bias, P, Q, R, scale)
        keep(ctx, x, weight, P, Q, R, scale, z)
        return y, z

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        wants_x = ctx.needs_input_grad[0]
        grad_x, grad_R = gradients(ctx, grad_outputs, wants_x, input_gradient, core_gradient)
        return grad_x, None, None, None, None, grad_R, None
