"""``calibrate(model, data)``: what it sets, what it reports, what it refuses, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import DataCollatorWithFlattening, Qwen2ForSequenceClassification

import references as ref
from fixtures import few
from frozencore import CONSTRUCTORS, CalibrationOptions, FrozenCoreConfig, calibrate
from frozencore.calibration import calibrate as calibration
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.hooks import CalibrationPass
from frozencore.errors import CalibrationError
from frozencore.maths.moments import MOMENT_NAMES
from references import numpy_of
from tiny import (
    BATCHES,
    DATA_DRIVEN,
    EXAMPLES,
    Example,
    adapted,
    batch_of,
    batches_of,
    cores_of,
    logits,
    refuse_by_device,
    refuse_by_machine,
    same_tensors,
    tiny_gpt2,
    tiny_qwen2,
)

NAMES = [layer.name for layer in cores_of(adapted("random"))]


def bases(model: torch.nn.Module, adapter_name: str = "default") -> dict[str, bytes]:
    return {
        layer.name: b"".join(factor.numpy().tobytes() for factor in layer.factors(adapter_name)[:2])
        for layer in cores_of(model, adapter_name)
    }


@pytest.fixture(scope="module")
def evidence() -> dict[str, ref.Evidence]:
    """Means of every adapted layer, from the float64 token-by-token reference."""
    model = tiny_qwen2()
    sums = ref.reference_moments(model, [(list(e.ids), e.num_prompt) for e in EXAMPLES], NAMES)
    return {
        name: ref.Evidence(
            G=s.cross / s.num_tokens, A=s.input_outer / s.num_tokens, D=s.error_outer / s.num_tokens,
            W=numpy_of(model.get_submodule(name).weight), x_mean=s.input_total / s.num_tokens,
            Y=s.output_outer / s.num_tokens, y_mean=s.output_total / s.num_tokens,
        )
        for name, s in sums.items()
    }  # fmt: skip


@pytest.mark.parametrize("constructor", ref.REFERENCE_FACTORS)
def test_every_layer_gets_the_reference_span_from_text_to_basis(constructor: str, evidence: dict) -> None:
    model = adapted(constructor, dtype=torch.float64)
    for layer in cores_of(model):
        P0, Q0 = ref.REFERENCE_FACTORS[constructor](evidence[layer.name], 3)
        P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
        assert ref.span_distance(P, P0) < 1e-4
        assert ref.span_distance(Q, Q0) < 1e-4


def test_what_was_found_is_reported_per_layer(evidence: dict) -> None:
    model = adapted("fcca", calibrated=False)
    told: list[tuple[str, int, int | None]] = []
    found = calibrate(model, BATCHES, progress=lambda *step: told.append(step[:3]))
    of_each = [(stage, done, 8) for stage in ("bases", "rate") for done in range(1, 9)]
    of_tries = [step for step in told if step[0] == "try rate"]
    assert told[: -len(of_tries)] == [("calibration", 0, None), ("calibration", 4, 8), ("calibration", 8, 8), *of_each]
    assert of_tries == [("try rate", done, 8) for done in range(1, 9)] * (len(of_tries) // 8)
    assert list(found.layers) == NAMES
    assert found.time_s >= found.collect_s >= 0
    for name, layer in found.layers.items():
        e = evidence[name]
        assert (layer.rank, layer.effective_rank) == (3, 3)
        assert layer.num_tokens == sum(len(example.ids) for example in EXAMPLES)
        A, D = (ref.damped_matrix(np.diag(M), 1e-3) for M in (e.A, e.D))
        np.testing.assert_allclose(layer.spectrum, ref.svd(ref.whitened(e.G, A, D))[1][:3], rtol=1e-3)
        P, Q, _ = (numpy_of(factor) for factor in model.get_submodule(f"base_model.model.{name}").factors("default"))
        assert layer.capture is not None
        assert pytest.approx(ref.captured(e.G, A, D, P, Q), rel=1e-3) == layer.capture.J
        assert layer.capture.gradient == pytest.approx(np.linalg.norm(P.T @ e.G @ Q), rel=1e-3)
        assert layer.input_spread == pytest.approx(np.diag(e.A).max() / np.sort(np.diag(e.A))[15], rel=1e-3)
        assert layer.error_spread == pytest.approx(
            np.diag(e.D).max() / np.sort(np.diag(e.D))[(len(e.D) - 1) // 2], rel=1e-3
        )


def test_bars_are_off_where_the_environment_turns_those_of_tqdm_off(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for of_environment in ({}, {"disable": True}):  # TQDM_DISABLE=1 is read when tqdm is imported
        monkeypatch.setattr("frozencore.adapter.calibrate.tqdm", partial(tqdm, **of_environment))
        calibrate(adapted("fcca", calibrated=False), BATCHES)
        assert ("calibration" in capfd.readouterr().err) != bool(of_environment)


def test_a_calibration_in_inference_mode_is_one_to_train_on() -> None:
    plain, model = adapted("fcca"), adapted("fcca", calibrated=False)
    with torch.inference_mode():
        rate = calibrate(model, BATCHES, progress=False).learning_rate
    assert rate == plain.peft_config["default"].learning_rate
    assert bases(model) == bases(plain)
    model.train()(**BATCHES[0]).loss.backward()
    assert all(layer.core("default").grad.any() for layer in cores_of(model))


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_moments_collected_before_give_the_same_bytes(constructor: str) -> None:
    needs = CONSTRUCTORS[constructor].needs(CONSTRUCTORS[constructor].options())
    moments = collect_moments(tiny_qwen2(), BATCHES, NAMES, needs=needs)
    model = adapted(constructor, calibrated=False)
    calibrate(model, moments=moments, progress=False)
    assert bases(model) == bases(adapted(constructor))


@pytest.mark.parametrize("constructor", [*DATA_DRIVEN, "lora_xs"])
def test_autocast_rounds_the_models_pass_and_neither_moments_nor_bases(constructor: str) -> None:
    plain, model, moments = adapted(constructor), adapted(constructor, calibrated=False), {}
    needs = CONSTRUCTORS[constructor].needs(CONSTRUCTORS[constructor].options())
    if needs:
        moments = collect_moments(tiny_qwen2(), BATCHES, NAMES, needs=needs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = collect_moments(tiny_qwen2(), BATCHES, NAMES, needs=needs | {"input_square"})
        found = calibrate(model, moments=moments, progress=False)
    assert bases(model) == bases(plain)
    assert found.layers == calibrate(plain, moments=moments, progress=False).layers
    for layer in inside.values():
        assert {getattr(layer, name).dtype for name in layer.names()} == {torch.float32}


def test_calibration_looks_at_the_base_model_whatever_adapters_are_active() -> None:
    expected = bases(adapted("fcca"))
    model = adapted("random", trained=True)
    before, core = bases(model), cores_of(model)[0].core("default").clone()
    model.add_adapter("new", FrozenCoreConfig(r=3, coordinates="qr"))
    calibrate(model, BATCHES, adapter_name="new", progress=False)
    assert bases(model, "new") == expected
    assert (bases(model), model.active_adapters) == (before, ["default"])
    assert torch.equal(cores_of(model)[0].core("default"), core)


def test_calibration_and_rate_see_the_trained_modules_to_save_and_not_the_core() -> None:
    def made(*, of_adapter: bool) -> tuple[dict[str, bytes], float | None]:
        base = tiny_qwen2(tie_word_embeddings=False)
        model = adapted("fcca", model=base, modules_to_save=["lm_head"], trained=True)
        head = model.base_model.model.lm_head
        with torch.no_grad():
            for weight in (
                head.modules_to_save["default"].weight,
                *([] if of_adapter else [head.original_module.weight]),
            ):
                weight.mul_(-3.0)
        found = calibrate(model, BATCHES, progress=False, reset=True)
        assert head.disable_adapters is False
        return bases(model), found.learning_rate

    assert made(of_adapter=True) == made(of_adapter=False)
    assert made(of_adapter=True)[0] != bases(adapted("fcca", model=tiny_qwen2(tie_word_embeddings=False)))


@pytest.mark.parametrize("head", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["score"]}])
def test_a_rate_that_is_measured_under_a_new_head_comes_with_a_warning(head: dict[str, Any]) -> None:
    base = Qwen2ForSequenceClassification(tiny_qwen2().config)
    base.config.pad_token_id = 0
    model = get_peft_model(base, FrozenCoreConfig(r=2, **head))
    batches = [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 2} for batch in BATCHES]
    with pytest.warns(UserWarning, match="was measured under a head; .* it is too large. Give a rate, such as 5e-3"):
        assert calibrate(model, batches, progress=False).learning_rate
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        calibrate(model, batches, progress=False, learning_rate=False)


@pytest.mark.parametrize("gathered", ["_metrics", "_stored_metrics"])  # most of TRL's trainers, and ORPO and CPO
def test_calibration_leaves_the_metrics_of_a_trainer_as_they_were(gathered: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            setattr(self, gathered, {"train": {"margin": [1.0]}, "eval": {}})

        def compute_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = model(**batch).loss
            metrics = getattr(self, gathered)
            metrics["train"]["margin"].append(float(loss))
            metrics["eval"].setdefault("margin", []).append(float(loss))
            return loss

    trainer = Trainer()
    plain = adapted("fcca", calibrated=False)
    calibrate(plain, BATCHES, loss_fn=trainer.compute_loss, progress=False)
    assert getattr(trainer, gathered) == {"train": {"margin": [1.0]}, "eval": {}}


@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca"))
def test_a_trained_core_is_not_recalibrated_without_reset(constructor: str) -> None:
    model = adapted(constructor, trained=True)
    with pytest.raises(CalibrationError, match="Pass reset=True"):
        calibrate(model, BATCHES, progress=False)
    calibrate(model, BATCHES, progress=False, reset=True)
    assert torch.equal(logits(model), logits(tiny_qwen2()))


def test_signgrad_may_start_from_one_sign_step(evidence: dict) -> None:
    step, alpha = 0.01, 6.0
    model = adapted("signgrad", initial_step=step, alpha=alpha, dtype=torch.float64)
    for layer in cores_of(model):
        expected = -step * ref.truncated(np.sign(evidence[layer.name].G), 3)
        np.testing.assert_allclose(numpy_of(layer.get_delta_weight("default")), expected, atol=1e-6)
    assert torch.equal(logits(adapted("signgrad")), logits(tiny_qwen2()))


def test_conv1d_layers_are_calibrated_with_their_transposed_weight() -> None:
    targets = ["c_attn", "c_proj"]
    for constructor in ("lora_xs", "eva", "fcca"):
        model = adapted(constructor, model=tiny_gpt2(), target_modules=targets)
        for layer in cores_of(model):
            P, Q, _ = layer.factors("default")
            assert P.shape[0] == layer.get_base_layer().nf
            assert Q.shape[0] == layer.get_base_layer().nx
            if constructor == "lora_xs":
                U, _, V = ref.svd(numpy_of(layer.get_base_layer().weight).T)
                assert ref.span_distance(numpy_of(P), U[:, :3]) < 1e-4
                assert ref.span_distance(numpy_of(Q), V[:, :3]) < 1e-4


def test_the_bar_is_shown_unless_it_is_turned_off(capfd: pytest.CaptureFixture[str]) -> None:
    calibrate(adapted("fcca", calibrated=False), BATCHES, progress=False)
    assert capfd.readouterr() == ("", "")
    calibrate(adapted("fcca", calibrated=False), BATCHES)
    shown = capfd.readouterr().err
    assert "calibration" in shown
    assert "8/8" in shown


def test_a_moment_that_the_constructor_does_not_read_and_nobody_can_fails_no_calibration() -> None:
    everything = collect_moments(tiny_qwen2(), BATCHES, NAMES, needs=frozenset(MOMENT_NAMES))
    broken = {name: replace(m, cross=torch.full_like(m.cross, math.nan)) for name, m in everything.items()}  # type: ignore[arg-type]
    calibration = calibrate(adapted("eva", calibrated=False), moments=broken, progress=False)
    assert {layer.capture for layer in calibration.layers.values()} == {None}


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stage", ["calibration", "bases", "rate", "try rate"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_calibration_that_ends_early_changes_nothing(error: type[BaseException], stage: str) -> None:
    def end(at: str, *_: Any) -> None:
        if at == stage:
            raise error("in the middle")

    model = adapted("rawgrad", trained=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected, config = logits(model), copy.deepcopy(model.peft_config["default"])
    with pytest.raises(error, match="in the middle"):
        calibrate(model, batches_of(EXAMPLES, 3), progress=end, reset=True)
    assert vars(model.peft_config["default"]) == vars(config)
    assert same_tensors(model.state_dict(), before)
    assert torch.equal(logits(model), expected)
    assert all(module.training for module in model.modules())


def test_layers_whose_gradients_are_zero_in_float16_name_the_dtype_and_the_way_out() -> None:
    base = tiny_qwen2()
    with torch.no_grad():
        base.model.layers[1].self_attn.o_proj.weight.mul_(1e-9)
    for dtype, named in ((torch.float16, True), (torch.bfloat16, False)):
        model = adapted("fcca", model=copy.deepcopy(base), dtype=dtype, calibrated=False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            calibrate(model, BATCHES, progress=False)
        found = [str(one.message) for one in said if "received no signal" in str(one.message)]
        assert len(found) == named
        assert all("zero in float16: load the model in bfloat16 or float32" in one for one in found)


def test_layers_that_no_gradient_reaches_get_seeded_bases_and_are_named() -> None:
    base = tiny_qwen2()
    with torch.no_grad():
        base.model.layers[1].self_attn.o_proj.weight.zero_()  # nothing comes back to q, k and v
    model = adapted("fcca", model=base, coordinates="qr", calibrated=False)
    with pytest.warns(UserWarning, match=r"^3 of 8 layers received no signal.*first: model.layers.1.self_attn.q_proj"):
        found = calibrate(model, BATCHES, progress=False)
    silent = [name for name, layer in found.layers.items() if layer.effective_rank == 0]
    assert silent == [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    for layer in cores_of(model):
        for factor in layer.factors("default")[:2]:
            np.testing.assert_allclose(numpy_of(factor).T @ numpy_of(factor), np.eye(3), atol=1e-5)


def packed(examples: list[Example], *, num_padding: int = 0, num_rows: int = 1) -> dict[str, Tensor]:
    """Rows end to end without a mask, as transformers and TRL pack them; padding as of ``pad_to_multiple_of``."""
    apart = [
        {"input_ids": list(e.ids), "labels": [-100] * e.num_prompt + list(e.ids[e.num_prompt :])} for e in examples
    ]
    size = len(examples) // num_rows
    rows = [DataCollatorWithFlattening()(apart[i * size : (i + 1) * size]) for i in range(num_rows)]
    length = num_padding + max(row["labels"].shape[1] for row in rows)
    fillers = {"input_ids": 7, "labels": -100, "position_ids": 0}
    return {
        key: torch.cat([pad(row[key], (0, length - row[key].shape[1]), value=filler) for row in rows])
        for key, filler in fillers.items()
    }


PACKINGS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "one row": lambda: packed(EXAMPLES),
    "padded to a multiple": lambda: packed(EXAMPLES, num_padding=3),
    "two rows of several": lambda: packed(EXAMPLES, num_rows=2),
    "labels that cross examples": lambda: packed(EXAMPLES) | {"labels": packed(EXAMPLES)["input_ids"]},
}
OF_PACKED: list[tuple[dict[str, Any], int | None]] = [
    ({}, None), ({"weighting": "token_sum"}, None), ({}, 5), ({"skip_first": 2}, 5), ({"tokens": "completion"}, 5),
]  # fmt: skip


@pytest.mark.parametrize(("options", "num_examples"), OF_PACKED, ids=str)
@pytest.mark.parametrize("form", PACKINGS)
def test_packed_rows_give_the_bases_of_the_padded_rows(
    form: str, options: dict[str, Any], num_examples: int | None
) -> None:
    rows = batch_of(EXAMPLES)
    if form == "labels that cross examples":
        rows["labels"] = rows["input_ids"].where(rows["attention_mask"].bool(), -100)
    whole, flat = (adapted("fcca", calibrated=False) for _ in range(2))
    chosen = {"options": CalibrationOptions(**options), "num_examples": num_examples, "progress": False}
    wanted, found = calibrate(whole, [rows], **chosen), calibrate(flat, [PACKINGS[form]()], **chosen)
    assert [one.num_tokens for one in found.layers.values()] == [one.num_tokens for one in wanted.layers.values()]
    for one, other in zip(cores_of(whole), cores_of(flat), strict=True):
        for X, Y in zip(one.factors("default")[:2], other.factors("default")[:2], strict=True):
            left, right = (torch.linalg.qr(factor.double())[0] for factor in (X, Y))
            assert float((left @ left.mT - right @ right.mT).norm()) < 1e-4


NUM_LAYERS = 8


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Makes room for the sums of so many layers; the sizes of the groups that were tried are told."""

    def make(most: int, refuse: Callable[[], None] = refuse_by_device) -> list[int]:
        tried: list[int] = []
        record = CalibrationPass.record

        def with_room(capture: CalibrationPass, *words: Any, **more: Any) -> None:
            record(capture, *words, **more)
            group = capture.recorders
            if tried[-1:] != [len(group)]:
                tried.append(len(group))
            if sum(bool(recorder.totals) for recorder in group.values()) > most:
                refuse()

        monkeypatch.setattr(CalibrationPass, "record", with_room)
        return tried

    return make


def bases_of(data: Iterable[Any], constructor: str = "fcca", **options: Any) -> dict[str, Tensor]:
    model = adapted(constructor, calibrated=False)
    with warnings.catch_warnings(action="ignore"):
        calibrate(model, data, progress=False, **options)
    return {name: value.clone() for name, value in model.named_buffers() if "frozencore_" in name}


@pytest.mark.parametrize("refuse", [refuse_by_device, refuse_by_machine])
@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_smaller_groups_give_the_same_bytes(constructor: str, refuse: Callable[[], None], room: Callable) -> None:
    expected = bases_of(BATCHES, constructor)
    tried = room(3, refuse)
    assert same_tensors(bases_of(iter(BATCHES), constructor), expected)  # data that come but once
    assert tried == [8, 4, 2]


def test_memory_that_runs_out_over_a_basis_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, build, refused = bases_of(BATCHES), calibration.build_basis, []

    def refuse_the_fifth(*words: Any) -> Any:
        refused.append(words)
        if len(refused) == 5:
            refuse_by_device()
        return build(*words)

    monkeypatch.setattr(calibration, "build_basis", refuse_the_fifth)
    assert same_tensors(bases_of(BATCHES), expected)
    assert len(refused) == 5 + NUM_LAYERS


def test_it_is_said_once_in_one_line_and_progress_goes_on_to_its_new_end(room: Callable) -> None:
    told: list[tuple[str, int, int | None]] = []
    model = adapted("fcca", calibrated=False)
    room(4)
    with pytest.warns(UserWarning, match="Out of memory with 8 layers in a pass: calibration goes on with 4") as said:
        calibrate(model, BATCHES, progress=lambda *step: told.append(step[:3]))
    assert len(said) == 1
    assert [step for step in told if step[0] == "calibration"][-1] == ("calibration", 16, 16)


def test_no_room_for_one_layer_is_one_line_and_changes_nothing(room: Callable) -> None:
    model = adapted("fcca", trained=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    room(0)
    refused = pytest.raises(CalibrationError, match=r"no memory .*'model.layers.0\S+' even alone")
    with warnings.catch_warnings(action="ignore"), refused as caught:
        calibrate(model, BATCHES, progress=False, reset=True)
    assert "\n" not in str(caught.value)
    assert same_tensors(model.state_dict(), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_data_that_run_out_of_memory_themselves_are_never_taken_for_shorter_ones() -> None:
    def data() -> Iterator[dict[str, Tensor]]:
        yield BATCHES[0]
        refuse_by_machine()

    with pytest.raises(RuntimeError, match="allocate"):
        calibrate(adapted("fcca", calibrated=False), data(), progress=False)
