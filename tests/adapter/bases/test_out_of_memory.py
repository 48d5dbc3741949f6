"""Memory that runs out while a model is calibrated: smaller groups and the same bytes, or one line and no change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from adapted import BATCHES, DATA_DRIVEN, EXAMPLES, adapted
from frozencore import CalibrationOptions, calibrate
from frozencore.adapter import calibrate as batched_bases
from frozencore.calibration.taps import CalibrationPass
from frozencore.errors import CalibrationError
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
    expected, build, refused = bases_of(BATCHES), batched_bases.build_basis, []

    def refuse_the_fifth(*words: Any) -> Any:
        refused.append(words)
        if len(refused) == 5:
            refuse_by_device()
        return build(*words)

    monkeypatch.setattr(batched_bases, "build_basis", refuse_the_fifth)
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
