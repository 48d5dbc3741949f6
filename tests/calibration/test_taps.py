"""The autograd capture on small modules: calls, dtypes, shared inputs, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frozencore.calibration.taps
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.counted_tokens import CountedTokens
from frozencore.calibration.taps import Taps, capturing
from frozencore.errors import CalibrationError
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from references import numpy_of
from tiny import attention_names, batch_of, draw_examples, tiny_qwen2

EVERYTHING = frozenset(MOMENT_NAMES)


class Features(nn.Module):
    """A model whose loss is whatever ``loss`` makes of its inputs, for layers in isolation."""

    def __init__(self, loss: Callable[[Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.make_loss = loss

    def forward(self, inputs_embeds: Tensor, labels: Tensor | None = None, **_: object) -> SimpleNamespace:
        return SimpleNamespace(loss=self.make_loss(inputs_embeds))


def features(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Inputs (batch, time, width) of one example; the loss of such a model is taken as it is."""
    x = torch.tensor(np.random.default_rng(seed).normal(size=(1, *shape)), dtype=dtype)
    return {"inputs_embeds": x, "labels": torch.ones(1, shape[0], dtype=torch.long)}


def test_a_module_called_twice_in_one_pass_sums_both_calls() -> None:
    layer = nn.Linear(4, 4).double()
    model = Features(lambda x: layer(torch.tanh(layer(x))).square().sum(), twice=layer)
    batch = features(6, 4)
    moments = collect_moments(model, [batch], ["layers.twice"], needs=EVERYTHING)["layers.twice"]
    model(**batch).loss.backward()
    torch.testing.assert_close(moments.cross, layer.weight.grad, rtol=1e-12, atol=1e-12)
    assert moments.num_tokens == 12
    x = batch["inputs_embeds"][0]
    second = torch.tanh(layer(x))
    torch.testing.assert_close(moments.input_square, (x.square() + second.square()).sum(0), rtol=1e-12, atol=1e-12)
    outer = sum(torch.outer(row, row) for row in (*x, *second))
    torch.testing.assert_close(moments.input_outer, outer, rtol=1e-12, atol=1e-12)


def test_a_module_called_twice_on_the_same_input_sums_both_calls() -> None:
    layer = nn.Linear(4, 3).double()
    model = Features(lambda x: (layer(x) * layer(x).detach() + layer(x).sin()).sum(), twice=layer)
    batch = features(5, 4)
    moments = collect_moments(model, [batch], ["layers.twice"])["layers.twice"]
    model(**batch).loss.backward()
    torch.testing.assert_close(moments.cross, layer.weight.grad, rtol=1e-12, atol=1e-12)
    # Three calls, one of them detached: its output takes no part in the loss.
    assert moments.num_tokens == 10
    torch.testing.assert_close(moments.input_square, 2 * batch["inputs_embeds"][0].square().sum(0))


def test_a_thousand_bf16_ones_are_a_thousand() -> None:
    """A bf16 sum of ones stops at 256."""
    layer = nn.Linear(4, 3).bfloat16()
    model = Features(lambda x: layer(x).sum(), layer=layer)
    batch = {"inputs_embeds": torch.ones(1, 1000, 4, dtype=torch.bfloat16), "labels": torch.ones(1, 1000).long()}
    moments = collect_moments(model, [batch], ["layers.layer"], needs=EVERYTHING)["layers.layer"]
    for name in ("cross", "input_square", "error_square", "input_outer", "error_outer", "input_total"):
        total = getattr(moments, name)
        assert total.dtype == torch.float32
        assert bool((total == 1000).all()), name


def test_bf16_squares_are_not_rounded_before_they_are_summed() -> None:
    value = torch.tensor(1.0078125, dtype=torch.bfloat16)  # its square needs 14 bits
    layer = nn.Linear(2, 2).bfloat16()
    model = Features(lambda x: layer(x).sum(), layer=layer)
    batch = {"inputs_embeds": value.expand(1, 100, 2), "labels": torch.ones(1, 100).long()}
    moments = collect_moments(model, [batch], ["layers.layer"], needs=EVERYTHING)["layers.layer"]
    np.testing.assert_allclose(numpy_of(moments.input_square), 100 * float(value) ** 2, rtol=1e-6)
    np.testing.assert_allclose(numpy_of(moments.input_outer), 100 * float(value) ** 2, rtol=1e-6)


def test_shared_inputs_are_squared_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v read one tensor: with o that is two input squares and four error squares a block."""
    calls: list[int] = []
    square_sum = frozencore.calibration.taps.square_sum
    monkeypatch.setattr(frozencore.calibration.taps, "square_sum", lambda values: calls.append(1) or square_sum(values))
    model = tiny_qwen2()
    collect_moments(model, [batch_of(draw_examples(3, seed=0))], attention_names(model))
    assert len(calls) == 2 * (2 + 4)


@pytest.mark.parametrize("view", [False, True])
def test_an_output_that_the_model_changes_in_place_has_its_error_from_before(view: bool) -> None:
    layer = nn.Linear(4, 4).double()
    layer.register_forward_hook(lambda _, args, y: y.split([6, 0])[0] if view else None)  # a view of several
    model = Features(lambda x: torch.relu_(layer(x[0])).square().sum(), layer=layer)
    batch = features(6, 4)
    moments = collect_moments(model, [batch], ["layers.layer"], needs=EVERYTHING)["layers.layer"]
    y = layer(batch["inputs_embeds"][0])
    y.relu().square().sum().backward()
    torch.testing.assert_close(moments.cross, layer.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.output_total, y.detach().sum(0), rtol=1e-12, atol=1e-12)


class Ordered(nn.Module):
    """A model whose layer reads its tokens in some order; 9 is the padding."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4).double()
        self.layer = nn.Linear(4, 4, bias=False).double()
        self.order = order
        self.positions = nn.Parameter(torch.arange(24.0).reshape(6, 4).double().sin())
        self.config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x, y = self.embed(input_ids), 0.0
        if self.order.startswith("tokens first"):
            x = x.transpose(0, 1)
            attention_mask = attention_mask.T
        if self.order.endswith("flat"):
            x, attention_mask = x.reshape(-1, 4), attention_mask.reshape(-1)
        if self.order == "positions too":
            y = self.layer(self.positions[None]).sin().sum()
        if self.order == "expert":  # as many rows as tokens, but other ones
            x = x.reshape(-1, 4)[torch.randperm(x.shape[0] * x.shape[1], generator=torch.Generator().manual_seed(0))]
            return SimpleNamespace(loss=self.layer(x).sin().sum() / len(input_ids))
        y = y * len(input_ids) + (self.layer(x).sin().sum(-1) * attention_mask).sum()
        return SimpleNamespace(loss=y / len(input_ids))


SHAPES = {"wide": (3, 6), "square": (4, 4), "alone": (1, 6)}


@pytest.mark.parametrize("with_loss_fn", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "order", ["examples first", "examples first, flat", "tokens first", "tokens first, flat", "positions too"]
)
def test_padding_is_left_out_in_any_order_of_the_rows(order: str, shape: str, with_loss_fn: bool) -> None:
    torch.manual_seed(0)
    model = Ordered(order)
    b, t = SHAPES[shape]
    ids = torch.randint(0, 9, (b, t))
    mask = torch.ones(b, t, dtype=torch.long)
    ids[-1, t // 2 :], mask[-1, t // 2 :] = 9, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(b)}
    loss_fn = (lambda m, batch: m(**batch).loss) if with_loss_fn else None
    found = collect_moments(model, [batch, batch], ["layer"], loss_fn=loss_fn)["layer"]
    rows = torch.cat([model.embed(ids)[mask.bool()], *([model.positions] if order == "positions too" else [])])
    torch.testing.assert_close(found.input_square, 2 * rows.detach().square().sum(0))
    (2 * b * model(**batch).loss).backward()
    torch.testing.assert_close(found.cross, model.layer.weight.grad)


@pytest.mark.parametrize("shape", [(3, 6), (4, 4)])
def test_equal_numbers_of_rows_prove_no_order(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, 2:] = 0
    batch = {"input_ids": torch.randint(0, 9, shape), "attention_mask": mask, "labels": torch.zeros(shape[0])}
    with pytest.raises(CalibrationError, match="unknown order"):
        collect_moments(Ordered("expert"), [batch], ["layer"])


def test_an_input_given_by_keyword_is_found() -> None:
    layer = nn.Linear(4, 3).double()
    model = Features(lambda x: layer(input=x).sin().sum(), layer=layer)
    batch = features(6, 4)
    moments = collect_moments(model, [batch], ["layers.layer"])["layers.layer"]
    model(**batch).loss.backward()
    torch.testing.assert_close(moments.cross, layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_layer_that_sees_other_rows_than_tokens_is_refused() -> None:
    """A routed expert or a pooled layer: its rows cannot be matched with the padding mask."""
    layer = nn.Linear(4, 3).double()
    model = Features(lambda x: layer(x[:, 0]).sum(), pooled=layer)
    with pytest.raises(CalibrationError, match=r"'layers\.pooled' saw 1 rows where the batch has 6 tokens"):
        collect_moments(model, [features(6, 4)], ["layers.pooled"])


def test_outputs_are_unchanged_by_the_capture() -> None:
    model, batch = tiny_qwen2(), batch_of(draw_examples(3, seed=0))
    plain = model(**batch)
    with capturing(Taps({"q": model.model.layers[0].self_attn.q_proj}, EVERYTHING)) as capture:
        capture.tokens = CountedTokens.from_mask(batch["attention_mask"].bool())
        captured = model(**batch)
    assert torch.equal(plain.logits, captured.logits)


def test_weight_gradients_are_the_same_with_and_without_the_capture() -> None:
    model, batch = tiny_qwen2(), batch_of(draw_examples(3, seed=0))
    layer = model.model.layers[0].self_attn.q_proj
    model(**batch).loss.backward()
    plain = layer.weight.grad.clone()
    model.zero_grad()
    with capturing(Taps({"q": layer}, EVERYTHING)) as capture:
        capture.tokens = CountedTokens.from_mask(batch["attention_mask"].bool())
        model(**batch).loss.backward()
    assert torch.equal(plain, layer.weight.grad)


def test_sums_are_held_where_asked() -> None:
    model = tiny_qwen2()
    layer = model.model.layers[0].self_attn.q_proj
    with capturing(Taps({"q": layer}, EVERYTHING, CalibrationOptions(stats_device="cpu"))) as capture:
        batch = batch_of(draw_examples(3, seed=0))
        capture.tokens = CountedTokens.from_mask(batch["attention_mask"].bool())
        model(**batch).loss.backward()
        moments = capture.recorders["q"].moments()
    assert isinstance(moments, LayerMoments)
    assert all(getattr(moments, name).device.type == "cpu" for name in moments.names())
    assert all(not getattr(moments, name).requires_grad for name in moments.names())


def test_the_sum_of_outputs_is_taken_without_their_products() -> None:
    layer = nn.Linear(4, 3).double()
    batch = features(6, 4)
    model = Features(lambda x: layer(x).sum(), only=layer)
    moments = collect_moments(model, [batch], ["layers.only"], needs=frozenset({"output_total"}))["layers.only"]
    assert moments.names() == ("output_total",)
    torch.testing.assert_close(moments.output_total, layer(batch["inputs_embeds"][0]).sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strip", [1, 10, 10**9])
def test_sums_that_are_held_elsewhere_are_added_strip_by_strip_to_the_same(
    strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cpu:0`` is another name for where the layers are: nothing else is needed to go through the strips."""
    monkeypatch.setattr(frozencore.calibration.taps, "STRIP", strip)
    model, batches = tiny_qwen2().double(), [batch_of(draw_examples(num_examples=4, seed=2))]
    here, elsewhere = (
        collect_moments(
            model, batches, attention_names(model), needs=EVERYTHING, options=CalibrationOptions(stats_device=device)
        )
        for device in (None, "cpu:0")
    )
    for name, expected in here.items():
        for moment in EVERYTHING:
            found, wanted = getattr(elsewhere[name], moment), getattr(expected, moment)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
