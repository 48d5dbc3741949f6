"""The autograd capture on small modules: calls, dtypes, shared inputs, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental._config import patch as patch_of_torch

import frozencore.calibration.hooks
import references as ref
from fixtures import tried
from frozencore.calibration.batches import CountedTokens
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.hooks import CalibrationPass, LayerRecorder, PassSpec, recording
from frozencore.errors import CalibrationError
from frozencore.maths.moments import MOMENT_NAMES
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


def test_a_module_called_twice_in_one_pass_sums_both_calls_on_one_input_too() -> None:
    layer = nn.Linear(4, 4).double()
    model = Features(lambda x: layer(torch.tanh(layer(input=x))).square().sum() + layer(x).sin().sum(), twice=layer)
    batch = features(6, 4)
    moments = collect_moments(model, [batch], ["layers.twice"], needs=EVERYTHING)["layers.twice"]
    model(**batch).loss.backward()
    torch.testing.assert_close(moments.cross, layer.weight.grad, rtol=1e-12, atol=1e-12)
    assert moments.num_tokens == 18
    x = batch["inputs_embeds"][0]
    rows = torch.cat([x, x, torch.tanh(layer(x))])
    torch.testing.assert_close(moments.input_square, rows.square().sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.input_outer, rows.mT @ rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [1.0, 1.0078125])  # the square of the second needs 14 bits
def test_a_thousand_bf16_tokens_are_a_thousand(value: float) -> None:
    """A bf16 sum of ones stops at 256."""
    layer = nn.Linear(4, 3).bfloat16()
    model = Features(lambda x: layer(x).sum(), layer=layer)
    x = torch.full((1, 1000, 4), value, dtype=torch.bfloat16)
    batch = {"inputs_embeds": x, "labels": torch.ones(1, 1000).long()}
    moments = collect_moments(model, [batch], ["layers.layer"], needs=EVERYTHING)["layers.layer"]
    for name, power in {"cross": 1, "input_square": 2, "error_square": 0, "input_outer": 2, "input_total": 1}.items():
        total = getattr(moments, name)
        assert total.dtype == torch.float32
        np.testing.assert_allclose(numpy_of(total), 1000 * value**power, rtol=1e-6)


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


class InPlace(nn.Module):
    """A language model that adds to the input of a layer before the next layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4).double()
        self.one, self.other = (nn.Linear(4, 4).double() for _ in range(2))
        self.config = SimpleNamespace(is_encoder_decoder=False)

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        x = self.embed(input_ids)
        x += self.one(x)
        return SimpleNamespace(logits=self.other(x))


def test_an_input_that_the_model_changes_in_place_is_read_anew() -> None:
    """The moments of inputs alone, for which no backward pass runs that would refuse the change."""
    model, ids = InPlace(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    moments = collect_moments(model, [batch], ["one", "other"], needs=frozenset({"input_outer"}))
    x = model.embed(ids).flatten(0, 1).detach()
    for name, rows in (("one", x), ("other", x + model.one(x).detach())):
        torch.testing.assert_close(moments[name].input_outer, rows.mT @ rows)


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
        if self.order == "tokens first":
            x, attention_mask = x.transpose(0, 1), attention_mask.T
        if self.order == "flat":
            x, attention_mask = x.reshape(-1, 4), attention_mask.reshape(-1)
        if self.order == "positions too":
            y = self.layer(self.positions[None]).sin().sum()
        y = y * len(input_ids) + (self.layer(x).sin().sum(-1) * attention_mask).sum()
        return SimpleNamespace(loss=y / len(input_ids))


def padded(b: int, t: int) -> dict[str, Tensor]:
    ids, mask = torch.randint(0, 9, (b, t), generator=torch.Generator().manual_seed(0)), torch.ones(b, t).long()
    ids[-1, t // 2 :], mask[-1, t // 2 :] = 9, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(b)}


@pytest.mark.parametrize("with_loss_fn", [False, True])
@pytest.mark.parametrize("shape", [(3, 6), (4, 4), (1, 6)])
@pytest.mark.parametrize("order", ["examples first", "flat", "tokens first", "positions too"])
def test_padding_is_left_out(order: str, shape: tuple[int, int], with_loss_fn: bool) -> None:
    model, batch = Ordered(order), padded(*shape)
    loss_fn = (lambda m, batch: m(**batch).loss) if with_loss_fn else None
    found = collect_moments(model, [batch, batch], ["layer"], loss_fn=loss_fn)["layer"]
    rows = [model.embed(batch["input_ids"])[batch["attention_mask"].bool()]]
    rows += [model.positions] if order == "positions too" else []
    torch.testing.assert_close(found.input_square, 2 * torch.cat(rows).detach().square().sum(0))
    (2 * shape[0] * model(**batch).loss).backward()
    torch.testing.assert_close(found.cross, model.layer.weight.grad)


class Decoder(nn.Module):
    """A language model with a decoder alone, whose layer reads its tokens in some order, or a row's first one."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.embed, self.layer, self.order = nn.Embedding(10, 4), nn.Linear(4, 4), order

    def can_generate(self) -> bool:
        return True

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        y = self.layer(x.transpose(0, 1)).transpose(0, 1) if self.order == "tokens first" else x + self.layer(x[:, :1])
        return SimpleNamespace(logits=y)


@pytest.mark.parametrize("shape", [(3, 6), (4, 4)])  # with as many rows as tokens, shapes do not tell
@pytest.mark.parametrize("order", ["tokens first", "the first token"])
def test_rows_that_padding_cannot_be_told_in_are_refused_in_a_language_model(
    order: str, shape: tuple[int, int]
) -> None:
    batch = padded(*shape)
    batch["labels"] = (batch["input_ids"] % 4).where(batch["attention_mask"].bool(), -100)
    with pytest.raises(CalibrationError, match=r"'layer' read rows .* padding cannot be told from text"):
        collect_moments(Decoder(order), [batch], ["layer"])


def test_outputs_and_weight_gradients_are_the_same_with_and_without_the_capture() -> None:
    model, batch = tiny_qwen2(), batch_of(draw_examples(3, seed=0))
    layer = model.model.layers[0].self_attn.q_proj
    plain = model(**batch)
    plain.loss.backward()
    gradient = layer.weight.grad.clone()
    model.zero_grad()
    with recording(PassSpec({"q": layer}, EVERYTHING)) as capture:
        capture.tokens = CountedTokens.from_mask(batch["attention_mask"].bool())
        captured = model(**batch)
        captured.loss.backward()
    assert torch.equal(plain.logits, captured.logits)
    assert torch.equal(gradient, layer.weight.grad)


@pytest.mark.parametrize("strip", [1, 10, 10**9])
def test_sums_that_are_held_elsewhere_are_added_strip_by_strip_to_the_same(
    strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cpu:0`` is another name for where the layers are: nothing else is needed to go through the strips."""
    monkeypatch.setattr(frozencore.calibration.hooks, "STRIP", strip)
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


class OnAGpu(Tensor):
    """Is indexed as a GPU indexes: by what it holds itself."""

    def __getitem__(self, index: Tensor) -> Tensor:  # type: ignore[override]
        assert index.device == self.device
        return super().__getitem__(index)


def test_a_layer_may_be_on_another_gpu_than_the_rows_of_the_batch() -> None:
    """The meta device stands for the second one: every row of it counts as one with an error."""
    x, delta = (torch.empty(2, 3, width, device="meta") for width in (4, 5))
    needs, options = frozenset({"cross", "error_square"}), CalibrationOptions(tokens="nonzero_delta")
    with patch_of_torch(meta_nonzero_assume_all_nonzero=True), recording(PassSpec({}, needs, options)) as capture:
        capture.tokens = CountedTokens((2, 3), torch.tensor([0, 2, 3, 4]).as_subclass(OnAGpu))
        recorder = LayerRecorder("layer", None)
        capture.record(recorder, capture.tokens.rows, x, delta)
    assert recorder.num_tokens == 4
    assert {total.device.type for total in recorder.totals.values()} == {"meta"}


class TwoGPUs(CalibrationPass):
    """The thread of another GPU records whenever this one has set what it reads."""

    other: Callable[[], None] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_latest" and (record := self.other) is not None:
            self.other = None
            record()


def test_a_layer_counts_its_own_input_while_the_thread_of_another_gpu_records() -> None:
    capture, x, delta = (
        TwoGPUs(PassSpec({}, frozenset({"cross", "input_total"}))),
        torch.ones(1, 3, 4),
        torch.ones(1, 3, 5),
    )
    capture.tokens = CountedTokens((1, 3))
    one, other = LayerRecorder("one", None), LayerRecorder("other", None)
    capture.other = lambda: capture.record(other, None, 7 * x, delta)
    capture.record(one, None, x, delta)
    assert one.totals["input_total"].tolist() == [3.0] * 4
    assert other.totals["input_total"].tolist() == [21.0] * 4


ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


@dataclass(frozen=True)
class Call:
    """One call of a layer: inputs (batch, time, n), output errors and outputs (batch, time, m)."""

    x: Tensor
    delta: Tensor
    y: Tensor


def summed(calls: list[Call], mask: Tensor, *, sizes_only: bool = False) -> ref.ReferenceMoments:
    """Over the counted tokens of all calls; with ``sizes_only`` nothing cancels, which bounds the rounding."""
    sums: dict[str, ref.ReferenceMoments] = {}
    for call in calls:
        for place in mask.nonzero().tolist():
            rows = [numpy_of(values[tuple(place)]) for values in (call.x, call.delta, call.y)]
            ref.add_token(sums, "layer", *(np.abs(row) if sizes_only else row for row in rows))
    return sums["layer"]


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Which tokens of a batch count: at least one, and not always one block. The shape shows the order of the rows."""
    batch, time = draw(st.tuples(st.integers(1, 4), st.integers(1, 7)).filter(lambda shape: shape[0] != shape[1]))
    counted = draw(st.lists(st.booleans(), min_size=batch * time, max_size=batch * time).filter(any))
    return torch.tensor(counted).reshape(batch, time)


@given(
    mask=masks(),
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    dtype=st.sampled_from(list(ROUNDING)),
    num_calls=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@tried(2)
def test_the_sums_of_any_layer_are_those_of_its_counted_tokens(
    mask: Tensor, m: int, n: int, dtype: torch.dtype, num_calls: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(n, m, bias=bias).to(dtype)
    calls = []
    with recording(PassSpec({"layer": layer}, EVERYTHING)) as capture:
        capture.tokens = CountedTokens.from_mask(mask)
        for _ in range(num_calls):
            x, delta = (torch.randn(*mask.shape, k, generator=generator, dtype=dtype) for k in (n, m))
            y = layer(x)
            y.backward(delta)
            calls.append(Call(x, delta, y))
        found = capture.recorders["layer"].moments()
    assert found.num_tokens == num_calls * int(mask.sum())
    expected, size = summed(calls, mask), summed(calls, mask, sizes_only=True)
    for name in MOMENT_NAMES:
        error = np.abs(numpy_of(getattr(found, name)) - getattr(expected, name))
        assert (error <= ROUNDING[dtype] * getattr(size, name)).all(), name
