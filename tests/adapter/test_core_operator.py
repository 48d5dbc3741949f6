"""The operators: what torch asks of one, the plain expression's numbers, and that a compiler keeps them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn.functional import linear

from adapted import BATCHES, adapted, cores_of
from frozencore.adapter.core_operator import (
    adapted_linear_operator,
    core_gradient_operator,
    input_gradient_operator,
    plus_core_operator,
)
from frozencore.adapter.mixed_batch import adapter_of_each_row
from tiny import tiny_qwen2

SCALE = 1.5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
M, N, ROWS, TOKENS = 5, 4, 3, 2


def drawn(
    rank: int = 4, dtype: torch.dtype = torch.float32, *, rows: bool = False, trained: bool = True
) -> dict[str, Tensor]:
    """x rows x tokens x n that wants a gradient, frozen W, b, P, Q, and a core, or one for each row."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    R = torch.randn(*((ROWS, rank, rank) if rows else (rank, rank)), generator=generator)
    return {
        "x": draw(ROWS, TOKENS, N).requires_grad_(), "weight": draw(M, N), "bias": draw(M), "P": draw(M, rank),
        "Q": draw(N, rank), "R": R.to(torch.promote_types(dtype, torch.float32)).requires_grad_(trained),
    }  # fmt: skip


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, P: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """In the dtype of the core throughout."""
    x, weight, P, Q = (X.to(R.dtype) for X in (x, weight, P, Q))
    turned = linear(x @ Q, R) if R.ndim == 2 else torch.einsum("btj,bij->bti", x @ Q, R)
    return linear(x, weight, None if bias is None else bias.to(R.dtype)) + SCALE * linear(turned, P)


CASES = [
    {}, {"rank": 128}, {"rows": True}, {"trained": False}, {"dtype": torch.bfloat16}, {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "rows": True}, {"dtype": torch.float64},
]  # fmt: skip


def named(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "plain"


case = pytest.mark.parametrize("options", CASES, ids=named)
few_cases = pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=[] if o == CASES[0] else pytest.mark.slow, id=named(o)) for o in CASES],
)


@few_cases
def test_each_operator_is_what_torch_asks_of_one(options: dict[str, Any]) -> None:
    """Schema, autograd registration, shapes without values, and traced with shapes that vary."""
    t = drawn(**options)
    frozen = {name: X.detach() for name, X in t.items()}
    y = torch.randn(ROWS, TOKENS, M).to(t["x"].dtype).requires_grad_()
    g, h, z = (torch.randn(ROWS * TOKENS, k).to(t["x"].dtype) for k in (M, *2 * [t["P"].shape[1]]))
    checks: Any = torch.library.opcheck
    checks(adapted_linear_operator, (*t.values(), SCALE))
    checks(adapted_linear_operator, (t["x"], t["weight"], None, t["P"], t["Q"], t["R"], SCALE))
    checks(plus_core_operator, (y, t["x"], t["P"], t["Q"], t["R"], SCALE))
    checks(input_gradient_operator, (g, h, frozen["weight"], frozen["Q"], frozen["R"], SCALE))
    checks(input_gradient_operator, (g, h, None, frozen["Q"], frozen["R"], SCALE))
    checks(core_gradient_operator, (h, z, frozen["R"], SCALE))


@case
def test_outputs_and_gradients_are_those_of_the_plain_expression(options: dict[str, Any]) -> None:
    t = drawn(**options)
    x, R = t["x"], t["R"]
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}[x.dtype]
    wanted = [x, R] if R.requires_grad else [x]
    expected = plain(*t.values())
    right = [expected, *torch.autograd.grad(expected.square().sum(), wanted)]
    base = linear(x, t["weight"], t["bias"])
    for y in (
        adapted_linear_operator(*t.values(), SCALE)[0],
        plus_core_operator(base, x, t["P"], t["Q"], R, SCALE)[0],
    ):
        found = [y, *torch.autograd.grad(y.to(R.dtype).square().sum(), wanted)]
        for one, other in zip(found, right, strict=True):
            assert float((one.double() - other.double()).norm() / other.double().norm()) < tolerance


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_and_second_derivatives_are_those_of_finite_differences(check: Callable[..., bool], rows: bool) -> None:
    t = drawn(rank=2, dtype=torch.float64, rows=rows)
    frozen = t["weight"], t["bias"], t["P"], t["Q"]
    y = torch.randn(ROWS, TOKENS, M, dtype=torch.float64, requires_grad=True)
    assert check(lambda x, R: adapted_linear_operator(x, *frozen, R, SCALE)[0], (t["x"], t["R"]))
    assert check(lambda y, x, R: plus_core_operator(y, x, *frozen[2:], R, SCALE)[0], (y, t["x"], t["R"]))


def one_block() -> nn.Module:
    return tiny_qwen2(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1
    )


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled models take the operators on this device and in this dtype too."""
    torch._dynamo.reset()
    monkeypatch.setattr("frozencore.adapter.core_product.operator_pays", lambda x, P: x.dtype == P.dtype)
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the forward and backward graphs that AOTAutograd makes, and runs them as they are."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.fx.GraphModule]] = {"forward": [], "backward": []}

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def keep(kind: str) -> Callable[..., Any]:
            return lambda graph, _: (self.seen[kind].append(graph), graph.forward)[1]

        return aot_module_simplified(module, inputs, keep("forward"), bw_compiler=keep("backward"))

    def count(self, kind: str, operator: str) -> int:
        return sum(f"frozencore.{operator}" in str(node.target) for g in self.seen[kind] for node in g.graph.nodes)


def outcome(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    model.zero_grad()
    output = call(**BATCHES[0])
    output.loss.backward()
    return [output.logits.detach(), *(layer.factors("default")[2].grad.clone() for layer in cores_of(model))]


@pytest.mark.parametrize(
    "kind",
    ["float32", *(pytest.param(k, marks=pytest.mark.slow) for k in ("bfloat16", "checkpointing", "ragged", "tenants"))],
)
@pytest.mark.usefixtures("everywhere")
def test_a_compiled_model_is_one_graph_that_keeps_the_operator_in_both_passes(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    options = {"rank_pattern": {"q_proj": 5}} if kind == "ragged" else {}
    model = adapted("random", model=one_block(), trained=True, dtype=dtype, target_modules=ATTENTION, **options).train()
    if kind == "checkpointing":
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    if kind == "tenants":
        compare(model.eval(), lambda: adapter_of_each_row(model, ["default", "__base__"] * 2))
        return
    compare(model)


def compare(model: nn.Module, inside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    graphs = Graphs()
    with inside():
        expected = outcome(model, model)
    with inside():
        found = outcome(model, torch.compile(model, fullgraph=True, backend=graphs))
    atol, rtol = (3e-2, 3e-2) if found[0].dtype == torch.bfloat16 else (1e-6, 1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
    num_layers = len(cores_of(model))
    assert len(graphs.seen["forward"]) == 1
    assert graphs.count("forward", "adapted_linear") == num_layers
    assert graphs.count("backward", "core_gradient") == num_layers


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere")
def test_a_layer_with_a_product_of_its_own_keeps_the_operator_beside_it() -> None:
    """A hook, a quantised weight: the base layer is called, and its output goes through the operator."""
    model = adapted("random", model=one_block(), trained=True).train()
    for layer in cores_of(model):
        layer.get_base_layer().weight.requires_grad_(True)  # then it is more than a frozen product
    graphs = Graphs()
    expected = outcome(model, model)
    for one, other in zip(outcome(model, torch.compile(model, fullgraph=True, backend=graphs)), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert graphs.count("forward", "plus_core") == len(cores_of(model))
