"""A model whose blocks lie on several devices: each layer's sums lie with it, and the bases are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from adapted import BATCHES, DATA_DRIVEN, adapted, cores_of
from frozencore import CalibrationOptions, calibrate
from frozencore.calibration.taps import LayerRecorder
from tiny import tiny_qwen2

ON_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def spread_out(device: str) -> nn.Module:
    """The second block on that device, by accelerate's hooks as ``device_map`` sets them; the rest on the CPU."""
    model = tiny_qwen2()
    hook = AlignDevicesHook(execution_device=device, io_same_device=True, place_submodules=True)
    add_hook_to_module(model.model.layers[1].to(device), hook)
    return model


@contextmanager
def devices_of_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """Where each layer's sums were when they were handed over."""
    found: dict[str, set[str]] = {}
    moments = LayerRecorder.moments

    def look(recorder: LayerRecorder) -> object:
        found[recorder.name] = {total.device.type for total in recorder.totals.values()}
        return moments(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(LayerRecorder, "moments", look)
        yield found


@pytest.mark.parametrize("stats_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_bases_are_those_of_one_device(
    constructor: str, device: str, stats_device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = adapted(constructor), adapted(constructor, model=spread_out(device), dtype=None, calibrated=False)
    with devices_of_sums(monkeypatch) as found:
        calibrate(model, BATCHES, options=CalibrationOptions(stats_device=stats_device), progress=False)
    assert found == {layer.name: {stats_device or layer.weight.device.type} for layer in cores_of(model)}
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert X.device == layer.weight.device
            assert torch.linalg.svdvals(X.cpu().mT @ Y).min() > 0.999


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"memory_budget": "1MiB"},
        lambda: {"options": CalibrationOptions("completion")},
    ],
)
def test_budgets_and_options_work_on_several_devices(make: Callable[[], dict], device: str) -> None:
    models = [adapted("fcca", model=base, dtype=None, calibrated=False) for base in (tiny_qwen2(), spread_out(device))]
    for model in models:
        calibrate(model, BATCHES, progress=False, **make())
    for layer, other in zip(cores_of(models[0]), cores_of(models[1]), strict=True):
        assert torch.linalg.svdvals(layer.factors("default")[1].mT @ other.factors("default")[1].cpu()).min() > 0.999
