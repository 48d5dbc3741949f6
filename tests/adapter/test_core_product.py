"""The product by hand against autograd's plain expression; what it saves for the backward pass, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_hook
from transformers.pytorch_utils import Conv1D

from adapted import BATCHES, adapted, cores_of
from frozencore.adapter.core_product import adapted_linear, is_plain
from tiny import tiny_qwen2

SCALE = 1.5
SHAPES = [(7,), (5, 7), (2, 3, 7), (0, 7)]


def drawn_layer(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A frozen layer with 7 inputs and 6 outputs, and P, Q, R of rank 3."""
    base = nn.Linear(7, 6, bias=bias, dtype=dtype).requires_grad_(False)
    P, Q = torch.randn(6, 3, dtype=dtype), torch.randn(7, 3, dtype=dtype)
    R = torch.randn(3, 3, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    return base, P, Q, R


def plain_expression(x: Tensor, base: nn.Linear, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Tensor:
    return base(x) + scale * linear(linear(linear(x, Q.mT), R), P)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_the_plain_expression(shape: tuple[int, ...], bias: bool) -> None:
    base, P, Q, R = drawn_layer(bias=bias)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert is_plain(base, x, P)
    outcomes = []
    for product in (adapted_linear, plain_expression):
        y = product(x, base, P, Q, R, SCALE)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, R])])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_the_same_to_the_bit_with_and_without_gradients(bias: bool) -> None:
    base, P, Q, R = drawn_layer(bias=bias)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    trained = adapted_linear(x, base, P, Q, R, SCALE)
    with torch.no_grad():
        assert torch.equal(adapted_linear(x, base, P, Q, R, SCALE), trained)
    torch.testing.assert_close(trained, plain_expression(x, base, P, Q, R, SCALE))


def test_the_product_goes_by_hand_as_soon_as_one_of_input_and_core_wants_a_gradient() -> None:
    base, P, Q, R = drawn_layer()
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    for input_, core in ((x, R), (x, R.detach()), (x.detach(), R)):
        assert "_AdaptedLinear" in adapted_linear(input_, base, P, Q, core, SCALE).grad_fn.name()
    assert adapted_linear(x.detach(), base, P, Q, R.detach(), SCALE).grad_fn is None


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_first_and_second_derivatives_are_those_of_finite_differences(check: Callable[..., bool]) -> None:
    base, P, Q, R = drawn_layer()
    x = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    assert check(lambda x, R: adapted_linear(x, base, P, Q, R, SCALE), (x, R))
    assert check(lambda x: adapted_linear(x, base, P, Q, R.detach(), SCALE), (x,))
    assert check(lambda R: adapted_linear(x.detach(), base, P, Q, R, SCALE), (R,))


def saved_storages(model: nn.Module) -> dict[int, int]:
    """Bytes of each storage that autograd holds between forward and backward, weights and bases left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**BATCHES[0]).loss
    loss.backward()
    return {place: tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in own}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear"])
def test_an_adapted_layer_saves_r_values_a_token_and_nothing_else(targets: Any, dtype: torch.dtype) -> None:
    base = tiny_qwen2().to(dtype).requires_grad_(False).train()
    model = adapted("random", dtype=dtype, target_modules=targets).train()
    for each in (base, model):
        each.enable_input_require_grads()
    beside = sum(saved_storages(model).values()) - sum(saved_storages(base).values())
    assert beside == len(cores_of(model)) * BATCHES[0]["input_ids"].numel() * 3 * dtype.itemsize


def test_a_core_that_does_not_train_saves_nothing() -> None:
    base = tiny_qwen2().requires_grad_(False).train()
    model = adapted("random").train().requires_grad_(False)
    for each in (base, model):
        each.enable_input_require_grads()
    assert sum(saved_storages(model).values()) == sum(saved_storages(base).values())


@pytest.fixture
def without_hands(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, layers compute the expression that autograd differentiates."""
    return lambda: monkeypatch.setattr("frozencore.adapter.linear.is_plain", lambda *_: False)


def test_second_derivatives_of_a_model_are_those_of_the_plain_expression(without_hands: Callable[[], None]) -> None:
    """The gradient of a gradient's norm, as in sharpness-aware and meta-learning objectives."""
    model = adapted("random", dtype=torch.float64, trained=True, alpha=5.0).train()
    model.set_attn_implementation("eager")  # the fused kernels have no second derivative
    cores = [layer.factors("default")[2] for layer in cores_of(model)]

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(model(**BATCHES[0]).loss, cores, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), cores)

    by_hand = second()
    without_hands()
    for found, expected in zip(by_hand, second(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_function_transforms_give_each_rows_own_gradient(without_hands: Callable[[], None]) -> None:
    layer = cores_of(adapted("random", dtype=torch.float64, trained=True))[0]
    name = "frozencore_R.default.weight"
    x = torch.randn(4, 5, 32, dtype=torch.float64)

    def loss(R: Tensor, row: Tensor) -> Tensor:
        return functional_call(layer, {name: R}, (row,)).square().sum()

    R = layer.get_parameter(name)
    each = vmap(grad(loss), in_dims=(None, 0))(R.detach(), x)
    for row, found in zip(x, each, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(loss(R, row), R)[0])


def test_forward_mode_gives_the_directional_derivative() -> None:
    layer = cores_of(adapted("random", dtype=torch.float64, trained=True))[0]
    x, direction = torch.randn(2, 5, 32, dtype=torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(tangent, layer(x + direction) - layer(x))


def test_autocast_computes_in_its_own_dtype_and_trains_the_core() -> None:
    model = adapted("random", trained=True).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**BATCHES[0])
    output.loss.backward()
    plain = model(**BATCHES[0])
    assert float((output.logits - plain.logits).norm() / plain.logits.norm()) < 3e-2
    assert all(bool(layer.factors("default")[2].grad.any()) for layer in cores_of(model))


@pytest.mark.parametrize("way", ["forward hook", "global hook"])
def test_a_hook_keeps_the_base_layers_own_output(way: str) -> None:
    layer = cores_of(adapted("random", trained=True))[0]
    base = layer.get_base_layer()
    x = torch.randn(2, 5, 32)
    expected, adapted_output = base(x), layer(x)
    kept: list[Tensor] = []

    def keep(module: nn.Module, _: Any, y: Tensor) -> None:
        if module is base:
            kept.append(y)

    handle = base.register_forward_hook(keep) if way == "forward hook" else register_module_forward_hook(keep)
    try:
        torch.testing.assert_close(layer(x), adapted_output)
    finally:
        handle.remove()
    assert torch.equal(kept[0], expected)


def test_a_model_without_storage_gives_shapes() -> None:
    model = adapted("random").to("meta").train()
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert model(input_ids=ids).logits.shape == (2, 5, 40)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_forward(base: nn.Linear) -> nn.Linear:
    forward = base.forward
    base.forward = lambda x: 2 * forward(x)  # as accelerate does to move weights
    return base


def with_hook(base: nn.Linear) -> nn.Linear:
    base.register_full_backward_hook(lambda *_: None)
    return base


NOT_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: Doubled(7, 6).requires_grad_(False),
    "a forward of its own": lambda: own_forward(nn.Linear(7, 6).requires_grad_(False)),
    "a backward hook": lambda: with_hook(nn.Linear(7, 6).requires_grad_(False)),
    "a trained weight": lambda: nn.Linear(7, 6),
    "another dtype": lambda: nn.Linear(7, 6).double().requires_grad_(False),
    "transposed": lambda: Conv1D(6, 7).requires_grad_(False),
    "a parametrisation": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(7, 6)).requires_grad_(False),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_layer_that_is_more_than_a_frozen_product_is_called(kind: str) -> None:
    x, P = torch.randn(5, 7), torch.randn(6, 3)
    assert is_plain(nn.Linear(7, 6).requires_grad_(False), x, P)
    assert not is_plain(NOT_PLAIN[kind](), x, P)
