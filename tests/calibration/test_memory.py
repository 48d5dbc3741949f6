"""Where the sums of calibration are: on which device, in groups if memory ends, and what waits on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn

from fixtures import few
from frozencore import CONSTRUCTORS, CalibrationOptions, FrozenCoreConfig, calibrate, collect_moments
from frozencore.calibration.hooks import FiniteBatches
from frozencore.maths.moments import MOMENT_NAMES
from tiny import BATCHES, DATA_DRIVEN, adapted, attention_names, cores_of, logits, tiny_qwen2

ON_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def spread_out(device: str) -> nn.Module:
    """The second block on that device, by accelerate's hooks as ``device_map`` sets them; the rest on the CPU."""
    model = tiny_qwen2()
    hook = AlignDevicesHook(execution_device=device, io_same_device=True, place_submodules=True)
    add_hook_to_module(model.model.layers[1].to(device), hook)
    return model


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "random", "lora_xs"))
def test_weights_that_accelerate_offloads_give_the_bases_loss_and_gradient_of_plain_ones(
    constructor: str, place: str, tmp_path: Path
) -> None:
    base = tiny_qwen2().eval()
    if place == "disk":
        disk_offload(base, tmp_path, execution_device=torch.device("cpu"))
    else:
        cpu_offload(base, execution_device=torch.device("cpu"))
    expected, model = adapted(constructor), adapted(constructor, model=base, dtype=None)
    assert next(layer.weight for layer in cores_of(model)).is_meta
    losses = [one(**BATCHES[0]).loss for one in (model, expected)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(layer.factors("default"), other.factors("default"), strict=True))
        assert torch.equal(layer.core("default").grad, other.core("default").grad)


def test_a_merged_adapter_of_offloaded_weights_can_be_turned_off() -> None:
    base = tiny_qwen2().eval()
    bare = logits(base)
    cpu_offload(base, execution_device=torch.device("cpu"))
    model = adapted("random", model=base, dtype=None, trained=True)
    trained = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), trained)
    with model.disable_adapter():
        assert torch.equal(logits(model), bare)
    assert torch.equal(logits(model), trained)


@pytest.mark.parametrize("constructor", ["fcca", "random", "lora_xs"])
def test_an_adapter_made_with_low_cpu_mem_usage_is_the_plain_one(constructor: str) -> None:
    config = FrozenCoreConfig(r=3, constructor=constructor, alpha=None, coordinates="qr")
    expected, model = adapted(constructor), get_peft_model(tiny_qwen2(), config, low_cpu_mem_usage=True)
    if constructor == "fcca":
        calibrate(model, BATCHES, progress=False)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(layer.factors("default"), other.factors("default"), strict=True))
        assert layer.core("default").requires_grad


def test_an_adapter_for_which_a_file_will_bring_the_cores_has_them_on_the_meta_device_until_then() -> None:
    config = FrozenCoreConfig(r=3, constructor="random")
    model = inject_adapter_in_model(config, tiny_qwen2(), low_cpu_mem_usage=True)
    assert all(layer.core("default").is_meta for layer in cores_of(model))


@pytest.mark.parametrize("stats_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_bases_are_those_of_one_device(constructor: str, device: str, stats_device: str | None) -> None:
    expected, model = adapted(constructor), adapted(constructor, model=spread_out(device), dtype=None, calibrated=False)
    calibrate(model, BATCHES, options=CalibrationOptions(stats_device=stats_device), progress=False)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert X.device == layer.weight.device
            assert torch.linalg.svdvals(X.cpu().mT @ Y).min() > 0.999


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens": "completion", "weighting": "token_sum"}, {"skip_first": 2}],
    ids=["default", "completion", "skip"],
)
def test_a_pass_reads_nothing_off_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(FiniteBatches, "look", lambda self: looked.append(len(self.waiting)))
    model = tiny_qwen2().to("meta")
    model.set_attn_implementation("eager")  # the other one's mask asks on the way whether there is padding
    moments, counted = (
        collect_moments(
            one, BATCHES, attention_names(one), needs=frozenset(MOMENT_NAMES), options=CalibrationOptions(**options)
        )
        for one in (model, tiny_qwen2())
    )
    assert looked[0] == 2 * len(BATCHES)  # once, behind all batches: the flags of both sides of each
    assert {name: layer.num_tokens for name, layer in moments.items()} == {
        name: layer.num_tokens for name, layer in counted.items()
    }


def wide_model() -> PeftModel:
    """Sums of 160 MiB in all and 8 at most."""
    settings = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return get_peft_model(tiny_qwen2(**settings).cuda(), FrozenCoreConfig(r=4, target_modules="all-linear"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_runs_out_on_the_device_makes_smaller_groups() -> None:
    expected, model = wide_model(), wide_model()
    calibrate(expected, BATCHES, progress=False)  # libraries have their workspaces then
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * 2**20) / total)
    try:
        with pytest.warns(UserWarning, match=r"Out of memory with 28 layers in a pass: calibration goes on with 14"):
            calibrate(model, BATCHES, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert torch.linalg.svdvals(X.mT @ Y).min() > 0.999
