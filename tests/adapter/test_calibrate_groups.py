"""Groups of layers: smaller ones where memory runs out, and layers of one shape that are built together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from adapted import BATCHES, DATA_DRIVEN, EXAMPLES, adapted, cores_of
from frozencore import CalibrationOptions, calibrate
from frozencore.adapter import calibrate as calibration
from frozencore.calibration.taps import CalibrationPass
from frozencore.errors import CalibrationError
from frozencore.maths.linalg import principal_cosines
from tiny import batch_of

NUM_LAYERS = 8


def refuse_by_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def refuse_by_machine() -> None:
    torch.empty(2**50)


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


def bases_of(data: Iterable[Any], constructor: str = "fcca", **options: Any) -> dict[str, torch.Tensor]:
    model = adapted(constructor, calibrated=False)
    torch.manual_seed(3)  # of a loader that shuffles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrate(model, data, progress=False, **options)
    return {name: value.clone() for name, value in model.named_buffers() if "frozencore_" in name}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("refuse", [refuse_by_device, refuse_by_machine])
@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_smaller_groups_give_the_same_bytes(constructor: str, refuse: Callable[[], None], room: Callable) -> None:
    expected = bases_of(BATCHES, constructor)
    tried = room(3, refuse)
    assert_equal(bases_of(BATCHES, constructor), expected)
    assert tried == [8, 4, 2]


FORMS: dict[str, Callable[[], Iterable[Any]]] = {
    "one-shot": lambda: (batch for batch in BATCHES),
    "shuffled": lambda: DataLoader(EXAMPLES, batch_size=3, shuffle=True, collate_fn=batch_of),
}


@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("form", FORMS)
def test_data_that_come_but_once_or_in_another_order_are_kept(form: str, most: int, room: Callable) -> None:
    expected = bases_of(FORMS[form]())
    room(most)
    assert_equal(bases_of(FORMS[form]()), expected)


def test_options_of_the_pass_stay_as_they_are(room: Callable) -> None:
    options = CalibrationOptions(group_size=5)
    expected = bases_of(BATCHES, options=options)
    room(2)
    assert_equal(bases_of(BATCHES, options=options), expected)


def test_memory_that_runs_out_over_a_basis_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, build, refused = bases_of(BATCHES), calibration.build_basis, []

    def refuse_the_fifth(*words: Any) -> Any:
        refused.append(words)
        if len(refused) == 5:
            refuse_by_device()
        return build(*words)

    monkeypatch.setattr(calibration, "build_basis", refuse_the_fifth)
    assert_equal(bases_of(BATCHES), expected)
    assert len(refused) == 5 + NUM_LAYERS


def test_it_is_said_once_in_one_line_and_progress_goes_on_to_its_new_end(room: Callable) -> None:
    told: list[tuple[str, int, int | None]] = []
    model = adapted("fcca", calibrated=False)
    room(4)
    with pytest.warns(UserWarning, match="Out of memory with 8 layers in a pass: calibration goes on with 4") as said:
        calibrate(model, BATCHES, progress=lambda *step: told.append(step))
    assert len(said) == 1
    assert [step for step in told if step[0] == "calibration"][-1] == ("calibration", 16, 16)


def test_no_room_for_one_layer_is_one_line_and_changes_nothing(room: Callable) -> None:
    model = adapted("fcca", trained=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    room(0)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(CalibrationError, match=r"no memory to calibrate layer 'model.layers.0\S+' even alone") as caught,
    ):
        calibrate(model, BATCHES, progress=False, reset=True)
    assert "\n" not in str(caught.value)
    assert_equal(dict(model.state_dict()), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_data_that_run_out_of_memory_themselves_are_never_taken_for_shorter_ones() -> None:
    def data() -> Iterator[dict[str, torch.Tensor]]:
        yield BATCHES[0]
        refuse_by_machine()

    with warnings.catch_warnings(action="ignore"), pytest.raises(CalibrationError, match="even alone"):
        calibrate(adapted("fcca", calibrated=False), data(), progress=False)


# ------------------------------------------------------------------- layers of one shape, built together as on a GPU


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers are built together on this device too; how many each time."""
    sizes: list[int] = []
    build = calibration.build_batch

    def counted(constructor: str, layers: Any, options: Any) -> Any:
        if len(layers) > 1:
            sizes.append(len(layers))
        return build(constructor, layers, options)

    monkeypatch.setattr(calibration, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(calibration, "build_batch", counted)
    return sizes


def built(constructor: str, **options: Any) -> dict[str, tuple[Tensor, Tensor, int]]:
    calibration_options = options.pop("calibrate", {})
    model = adapted(constructor, calibrated=False, dtype=torch.float64, **options)
    calibration = calibrate(model, BATCHES, progress=False, **calibration_options)
    return {
        layer.name: (*layer.factors("default")[:2], calibration.layers[layer.name].effective_rank)
        for layer in cores_of(model)
    }


@pytest.mark.parametrize("constructor", ["fcca", "rawgrad"])
def test_layers_of_one_shape_get_the_bases_that_each_would_get_alone(constructor: str, batches: list[int]) -> None:
    found = built(constructor)
    assert sorted(batches) == [4, 4]  # q and o of two blocks, k and v
    batches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_is_on_gpu", lambda _: False)
        alone = built(constructor)
    assert batches == []
    for name, (P, Q, rank) in found.items():
        assert rank == alone[name][2]
        for X, Y in ((P, alone[name][0]), (Q, alone[name][1])):
            assert float(principal_cosines(X, Y).min()) > 1 - 1e-6


def test_ranks_of_their_own_and_budgets_are_not_mixed(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    built("fcca", rank_pattern={r"0\.self_attn\.q_proj": 2})
    assert sorted(batches) == [3, 4]
    batches.clear()
    built("fcca", calibrate={"memory_budget": "1GiB"})
    built("eva")
    assert batches == []
    monkeypatch.setattr(calibration, "BATCH_BYTES", 2 * 32 * 32 * 8)
    built("fcca")
    assert sorted(batches) == [2, 2, 4]
