"""The adapted product ``y = W x + b + s·P R Qᵀ x``: values, derivatives, what it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.modules.module import register_module_forward_hook

from adapted import BATCHES, adapted, cores_of
from frozencore.adapter.layer import FrozenCoreLinear, plus_core
from tiny import tiny_qwen2

SCALE = 1.5
SHAPES = [(7,), (5, 7), (2, 3, 7), (0, 7)]
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def drawn(dtype: torch.dtype, shape: tuple[int, ...], *, rows: bool = False) -> dict[str, Tensor]:
    """x, the base layer's output y, P, Q of rank 3, and R: one, or one for each row."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    R = draw(*((shape[0], 3, 3) if rows else (3, 3))).to(torch.promote_types(dtype, torch.float32))
    y = draw(*shape[:-1], 6)
    return {"y": y, "x": draw(*shape).requires_grad_(), "P": draw(6, 3), "Q": draw(7, 3), "R": R.requires_grad_()}


def reference(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    through = "...j,ij->...i" if R.ndim == 2 else "b...j,bij->b...i"
    return y + SCALE * torch.einsum(through, x @ Q, R) @ P.mT


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("shape", "rows"), [*((shape, False) for shape in SHAPES), ((4, 3, 7), True), ((4, 1, 7), True), ((4, 7), True)]
)
def test_outputs_and_gradients_are_those_of_float64(shape: tuple[int, ...], rows: bool, dtype: torch.dtype) -> None:
    outcomes = []
    for wide, product in ((False, lambda *tensors: plus_core(*tensors, SCALE)), (True, reference)):
        tensors = drawn(dtype, shape, rows=rows)
        if wide:
            tensors = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
        y = product(*tensors.values())
        outcomes.append([y.detach(), *torch.autograd.grad(y.double().square().sum(), [tensors["x"], tensors["R"]])])
    assert outcomes[0][0].dtype == dtype
    for found, expected in zip(*outcomes, strict=True):
        assert float((found.double() - expected).norm()) <= BOUNDS[dtype] * float(expected.norm())


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("rows", [False, True])
def test_first_and_second_derivatives_are_those_of_finite_differences(check: Callable[..., bool], rows: bool) -> None:
    y, x, P, Q, R = drawn(torch.float64, (2, 2, 7), rows=rows).values()
    assert check(lambda y, x, R: plus_core(y, x, P, Q, R, SCALE), (y.requires_grad_(), x, R))


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
@pytest.mark.parametrize("trains", [True, False])
def test_an_adapted_layer_saves_r_float32_values_a_token_if_its_core_trains(trains: bool, dtype: torch.dtype) -> None:
    base = tiny_qwen2().to(dtype).requires_grad_(False).train()
    model = adapted("random", dtype=dtype, target_modules="all-linear").train().requires_grad_(False)
    for layer in cores_of(model):
        layer.core("default").requires_grad_(trains)
    for each in (base, model):
        each.enable_input_require_grads()
    beside = sum(saved_storages(model).values()) - sum(saved_storages(base).values())
    assert beside == trains * len(cores_of(model)) * BATCHES[0]["input_ids"].numel() * 3 * 4


def test_function_transforms_give_each_rows_own_gradient() -> None:
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
    x, direction = torch.randn(2, 2, 5, 32, dtype=torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(tangent, layer(x + direction) - layer(x))


class Wide(nn.Linear):
    """Gives float32 under autocast too, as a layer with 4-bit weights does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize(("kind", "dtype"), [(nn.Linear, torch.bfloat16), (Wide, torch.float32)])
def test_autocast_keeps_the_dtype_of_the_base_layers_output_and_trains_the_core(kind: type, dtype: torch.dtype) -> None:
    layer = FrozenCoreLinear(kind(32, 24).requires_grad_(False), "default", "layer")
    layer.update_layer("default", 3, 2.0, inference_mode=False)
    for X in (layer.frozencore_P["default"], layer.frozencore_Q["default"]):
        nn.init.orthogonal_(X)
    x = torch.randn(2, 5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer.get_base_layer()(x))
        y = layer(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert layer.core("default").grad.any()


@pytest.mark.parametrize("way", ["forward hook", "global hook"])
def test_a_hook_sees_the_base_layers_own_output_and_the_cores(way: str) -> None:
    layer = cores_of(adapted("random", trained=True))[0]
    base, R = layer.get_base_layer(), layer.frozencore_R["default"]
    x = torch.randn(2, 5, 32)
    expected, adapted_output = base(x), layer(x)
    seen: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, _: Any, y: Tensor) -> None:
        seen[module] = y

    modules = [base, R] if way == "forward hook" else []
    handles = [module.register_forward_hook(keep) for module in modules] or [register_module_forward_hook(keep)]
    try:
        assert torch.equal(layer(x), adapted_output)
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(seen[base], expected)
    torch.testing.assert_close(seen[R], x @ layer.frozencore_Q["default"] @ R.weight.mT)


def test_a_model_without_storage_gives_shapes() -> None:
    model = adapted("random").to("meta").train()
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert model(input_ids=ids).logits.shape == (2, 5, 40)
