"""The arithmetic of y = (W + s·P R Qᵀ) x + b: zero cores, dtypes, derivatives, merging, compiled graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.module import register_module_forward_hook
from transformers.pytorch_utils import Conv1D

from fixtures import few
from frozencore import CONSTRUCTORS, Core, CoreBank, FrozenCoreConfig, calibrate, get_core, swap_core
from frozencore.adapter.core_product import plus_core
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ArtifactError, CalibrationError, ModelError
from frozencore.files.fingerprint import fingerprint_model
from references import numpy_of
from tiny import (
    BATCHES,
    DATA_DRIVEN,
    EXAMPLES,
    adapted,
    batch_of,
    cores_of,
    logits,
    same_tensors,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    train_at_random,
)

EVERY = pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "eva", "milora", "random"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@EVERY
def test_zero_core_leaves_the_logits_bit_equal(constructor: str, dtype: torch.dtype) -> None:
    expected = logits(tiny_qwen2().to(dtype))
    model = adapted(constructor, dtype=dtype)
    for layer in cores_of(model):
        P, Q, R = layer.factors("default")
        assert (P.dtype, Q.dtype, R.dtype) == (dtype, dtype, torch.promote_types(dtype, torch.float32))
        assert (P.shape, Q.shape, R.shape) == ((layer.out_features, 3), (layer.in_features, 3), (3, 3))
        assert P.any()
        assert Q.any()
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.train()), expected)
    assert logits(model).dtype == dtype


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("alpha", [None, 12.0])
@EVERY
def test_the_gradient_of_a_zero_core_is_the_projected_moment(constructor: str, alpha: float | None, side: str) -> None:
    """∇_R L = s PᵀGQ (paper, section 3.1), with G a mean over tokens and L a sum over examples."""
    model = adapted(constructor, alpha=alpha, dtype=torch.float64)
    batch = batch_of(EXAMPLES, side)
    names = [layer.name for layer in cores_of(model)]
    moments = collect_moments(tiny_qwen2().double(), [batch], names)
    model.train()
    for example in EXAMPLES:
        model(**batch_of([example])).loss.backward()
    scale = 1.0 if alpha is None else alpha / 3
    for layer in cores_of(model):
        P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
        expected = scale * P.T @ numpy_of(moments[layer.name].cross) @ Q
        found = numpy_of(layer.frozencore_R["default"].weight.grad)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("alpha", [None, 1.5])
def test_a_trained_core_is_the_dense_update_of_its_weight(make: type, alpha: float | None) -> None:
    targets = ["c_attn", "c_proj"] if make is tiny_gpt2 else None
    model = adapted("rawgrad", model=make(), dtype=torch.float64, alpha=alpha, trained=True, target_modules=targets)
    dense = make().double()
    with torch.no_grad():
        for layer in cores_of(model):
            P, Q, R = layer.factors("default")
            update = (1.0 if alpha is None else alpha / 3) * P @ R @ Q.mT
            target = dense.get_submodule(layer.name)
            target.weight += update.mT if isinstance(target, Conv1D) else update
            torch.testing.assert_close(
                layer.get_delta_weight("default"), update.mT if isinstance(target, Conv1D) else update
            )
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-10, atol=1e-10)


def with_two_adapters(dtype: torch.dtype = torch.float32, make: type = tiny_qwen2) -> PeftModel:
    targets = ["c_attn"] if make is tiny_gpt2 else None
    model = adapted("random", model=make(), dtype=dtype, trained=True, target_modules=targets)
    model.add_adapter("other", FrozenCoreConfig(r=2, alpha=5.0, constructor="random", target_modules=targets))
    train_at_random(model, "other", seed=1)
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 5e-3)],
)
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
def test_merging_keeps_the_logits_and_unmerging_gives_the_same_bits_back_however_often(
    make: type, dtype: torch.dtype, tolerance: float
) -> None:
    model = with_two_adapters(dtype, make)
    before, plain = fingerprint_model(model), logits(make().to(dtype))

    def assert_near(found: Tensor, expected: Tensor) -> None:
        assert float((found - expected).double().norm() / expected.double().norm()) < tolerance

    for names in (["default"], ["other", "default"], ["other"]):
        model.base_model.set_adapter(names)
        expected = logits(model)
        model.merge_adapter(adapter_names=names, safe_merge=True)
        for merged in (copy.deepcopy(model), model):
            assert cores_of(merged)[0].merged_adapters == names
            assert fingerprint_model(merged) != before
            assert_near(logits(merged), expected)
            with merged.disable_adapter():  # a disabled layer is unmerged when it is used
                assert torch.equal(logits(merged), plain)
            assert fingerprint_model(merged) == before
            assert torch.equal(logits(merged), expected)
    with pytest.warns(UserWarning, match=r"^Already unmerged. Nothing to do.$"):
        model.unmerge_adapter()
    unloaded = copy.deepcopy(model).merge_and_unload()
    assert not any("frozencore" in name for name in unloaded.state_dict())
    assert_near(logits(unloaded), expected)
    assert torch.equal(logits(model.unload()), plain)


def test_an_active_adapter_that_a_merge_leaves_out_is_named() -> None:
    model = with_two_adapters(torch.float32, tiny_qwen2)
    model.base_model.set_adapter(["default", "other"])
    with pytest.warns(UserWarning, match=r"of the active ones other are not merged: .* in merged layers until"):
        model.merge_adapter(adapter_names=["default"])
    with warnings.catch_warnings(record=True) as caught:
        model.merge_adapter(adapter_names=["other"])
    assert not any("not merged" in str(one.message) for one in caught)


def test_an_active_adapter_of_other_layers_acts_beside_merged_ones_without_a_warning() -> None:
    model = adapted("random", trained=True, target_modules=["q_proj"])
    model.add_adapter("other", FrozenCoreConfig(r=3, constructor="random", target_modules=["v_proj"]))
    train_at_random(model, "other")
    model.base_model.set_adapter(["default", "other"])
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.merge_adapter(adapter_names=["default"])
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inside", ["merge", "unmerge"])
def test_autocast_does_not_round_an_update_that_is_merged(inside: str) -> None:
    model = with_two_adapters(torch.float32, tiny_qwen2)
    before, expected = copy.deepcopy(model.state_dict()), logits(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside == "merge"):
        model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside == "unmerge"):
        model.unmerge_adapter()
    assert same_tensors(model.state_dict(), before)


def test_a_merged_weight_that_is_cast_is_restored() -> None:
    model = adapted("random", trained=True)
    before = cores_of(model)[0].get_base_layer().weight.detach().clone()
    model.merge_adapter()
    model.bfloat16().unmerge_adapter()
    assert torch.equal(cores_of(model)[0].get_base_layer().weight, before.bfloat16())


def _assign(model: PeftModel, weight: nn.Parameter, new: Tensor) -> None:
    name = next(name for name, p in model.named_parameters() if p is weight)
    model.load_state_dict({name: new}, strict=False, assign=True)


CHANGES: dict[str, Callable[[PeftModel, nn.Parameter, Tensor], Any]] = {
    "in place": lambda _, weight, new: weight.data.copy_(new),
    "loaded": lambda model, weight, new: model.load_state_dict(
        {next(name for name, p in model.named_parameters() if p is weight): new}, strict=False
    ),
    "assigned": _assign,
    "one bit": lambda _, weight, __: weight.data.view(torch.int32)[0, 0].bitwise_xor_(1),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("way", CHANGES)
def test_base_weights_that_were_changed_while_merged_are_not_thrown_away(way: str, copied: bool) -> None:
    model = adapted("random", trained=True)
    model.merge_adapter()
    model = copy.deepcopy(model) if copied else model
    layer = cores_of(model)[0]
    with torch.no_grad():
        CHANGES[way](model, layer.get_base_layer().weight, torch.ones(layer.shape))
    changed = layer.get_base_layer().weight.clone()
    with pytest.raises(ModelError, match="loaded or changed since"):
        model.unmerge_adapter()
    assert torch.equal(layer.get_base_layer().weight, changed)


def test_a_core_or_basis_that_changes_while_it_is_merged_does_not_hinder_unmerging() -> None:
    model = adapted("random", trained=True)
    layer = cores_of(model)[0]
    before = layer.get_base_layer().weight.detach().clone()
    model.merge_adapter()
    with torch.no_grad():
        for factor in layer.factors("default"):
            factor.mul_(2)
    model.unmerge_adapter()
    assert torch.equal(layer.get_base_layer().weight, before)


def test_an_adapter_that_is_saved_while_it_is_merged_is_of_the_base_from_before(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.merge_adapter()
    model.save_pretrained(str(tmp_path / "merged"))
    with torch.no_grad():
        cores_of(model)[0].get_base_layer().weight.mul_(1.1)
    model.save_pretrained(str(tmp_path / "changed"))
    PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "merged"))
    with pytest.raises(ArtifactError, match="another base model"):
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "changed"))


def test_a_16_bit_weight_is_rounded_once_when_an_update_is_merged() -> None:
    layer = cores_of(adapted("random", dtype=torch.bfloat16, trained=True, alpha=None))[0]
    P, Q, R = (numpy_of(factor) for factor in layer.factors("default"))
    exact = numpy_of(layer.get_base_layer().weight) + P @ R @ Q.T
    layer.merge()
    merged = layer.get_base_layer().weight
    assert merged.dtype == torch.bfloat16
    np.testing.assert_allclose(numpy_of(merged), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last of 8 bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_active_adapters_add_up_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = with_two_adapters(dtype)
    layer = cores_of(model)[0]
    x = torch.randn(2, 5, layer.in_features, dtype=dtype)
    base = layer.get_base_layer()(x)
    model.base_model.set_adapter(["default", "other"])
    found = layer(x)
    assert found.dtype == dtype
    expected = numpy_of(base)
    for name, scale in (("default", 1.0), ("other", 2.5)):
        P, Q, R = (numpy_of(factor) for factor in layer.factors(name))
        expected = expected + scale * numpy_of(x) @ Q @ R.T @ P.T
    error = np.abs(numpy_of(found) - expected).max() / np.abs(expected).max()
    assert error < 8 * torch.finfo(dtype).eps


def test_a_safe_merge_refuses_a_core_that_is_not_finite() -> None:
    model = adapted("random")
    layer = cores_of(model)[0]
    before = layer.get_base_layer().weight.clone()
    with torch.no_grad():
        layer.frozencore_R["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, before)


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_training_before_calibration_is_an_error_that_says_to_call_it(constructor: str) -> None:
    model = adapted(constructor, calibrated=False)
    assert torch.equal(logits(model), logits(tiny_qwen2()))  # evaluation is allowed
    model.train()
    with pytest.raises(CalibrationError, match=r"Call frozencore\.calibrate\(model, dataloader\) first") as caught:
        model(**BATCHES[0])
    assert "layers.0.self_attn.q_proj" in str(caught.value)
    calibrate(model, BATCHES, progress=False)
    model(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient_of_a_core(use_reentrant: bool) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = adapted("random", dtype=torch.float64).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(**BATCHES[0]).loss.backward()
        gradients.append([layer.frozencore_R["default"].weight.grad for layer in cores_of(model)])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-8, atol=1e-12)


def test_layers_narrower_than_the_rank_get_the_rank_that_fits_and_one_warning() -> None:
    """k and v have 16 outputs."""
    for constructor in ("random", "fcca"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = adapted(constructor, r=20)
        about_rank = [str(w.message) for w in caught if "narrower than the rank" in str(w.message)]
        assert len(about_rank) == 1, constructor
        assert "4 of 8 layers" in about_rank[0]
        assert "model.layers.0.self_attn.k_proj, 16 instead of 20" in about_rank[0]
        assert [layer.frozencore_R["default"].weight.shape[0] for layer in cores_of(model)][:4] == [20, 16, 16, 20]


@pytest.mark.parametrize(("weight", "bases"), [(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.float32)])
def test_bases_take_the_dtype_of_their_own_weight_unless_it_is_too_narrow_to_compute_in(
    weight: torch.dtype, bases: torch.dtype
) -> None:
    layer = FrozenCoreLinear(nn.Linear(6, 5).to(weight), "default", "only", dtype=torch.float32)
    layer.update_layer("default", 3, 1.0, inference_mode=False)
    assert [X.dtype for X in layer.factors("default")] == [bases, bases, torch.float32]


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


# ------------------------------------------------------------------------------------------------- torch.compile

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}


def one_block() -> nn.Module:
    return tiny_qwen2(num_hidden_layers=1, layer_types=None)


@pytest.fixture
def _without_old_graphs() -> None:
    torch._dynamo.reset()


def logits_and_gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    model.zero_grad()
    output = call(**BATCHES[0])
    output.loss.backward()
    return [output.logits.detach(), *(layer.core("default").grad.clone() for layer in cores_of(model))]


@pytest.mark.usefixtures("_without_old_graphs")
@pytest.mark.parametrize(
    ("checkpointed", "backend"),
    [
        (False, "aot_eager"),
        pytest.param(True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(False, "inductor", marks=pytest.mark.slow),  # the C++ compiler takes a minute on one core
    ],
)
def test_a_model_in_training_is_one_graph_with_eagers_logits_and_gradients(checkpointed: bool, backend: str) -> None:
    model = adapted("fcca", model=one_block(), trained=True)
    model.add_adapter("other", model.peft_config["default"])
    expected = logits_and_gradients(model.train(), model)
    if checkpointed:
        model.config.use_cache = False  # transformers' warning about it is a graph break of its own
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # only reentrant checkpointing needs it, and its hook is a graph break too
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for one, other in zip(logits_and_gradients(model, compiled), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert one.any()


@pytest.mark.usefixtures("_without_old_graphs")
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_without_a_basis_says_so_when_it_is_compiled(fullgraph: bool) -> None:
    model = adapted("fcca", model=one_block(), calibrated=False).train()
    with pytest.raises(Exception, match=r"Call frozencore.calibrate\(model, dataloader\) first"):
        torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(**BATCHES[0])


@pytest.mark.usefixtures("_without_old_graphs")
@torch.no_grad()
def test_a_swapped_core_and_other_tenants_of_a_bank_need_no_new_graph() -> None:
    model, counter = adapted("fcca", model=one_block(), trained=True), CompileCounter()
    core = get_core(model)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for scale in (1, 2):
        swap_core(model, Core(core.basis_id, scale * core.values))
        assert torch.equal(compiled(**PROMPT).logits, model(**PROMPT).logits)
    assert counter.frame_count == 1
    bank = CoreBank(model, 3)
    bank.put("a", core)
    for names, scale in ((["a", None, "b", "a"], 2), (["b", "b", None, "a"], -1)):
        bank.put("b", Core(core.basis_id, scale * core.values))
        with bank.rows(names):
            torch.testing.assert_close(compiled(**PROMPT).logits, model(**PROMPT).logits, atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.usefixtures("_without_old_graphs")
def test_an_adapter_of_a_compiled_base_reloads_there_and_says_so_on_a_plain_one(tmp_path: Path) -> None:
    model = adapted("random", model=torch.compile(one_block(), backend="eager"), trained=True)
    model.save_pretrained(str(tmp_path))
    compiled = PeftModel.from_pretrained(torch.compile(one_block(), backend="eager"), str(tmp_path)).eval()
    assert torch.equal(compiled(**PROMPT).logits, model(**PROMPT).logits)
    with pytest.raises(ArtifactError, match="was saved from a compiled model"):
        PeftModel.from_pretrained(one_block(), str(tmp_path))
