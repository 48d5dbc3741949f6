"""The capture on a GPU, where half-precision products accumulate in float32 in one kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model

from adapted import cores_of
from frozencore import FrozenCoreConfig, calibrate
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.maths.moments import MOMENT_NAMES
from references import numpy_of, reference_moments
from tiny import attention_names, batches_of, draw_examples, tiny_qwen2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EXAMPLES = draw_examples(num_examples=7, seed=3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("stats_device", [None, "cpu"])
def test_moments_on_cuda_equal_the_reference(dtype: torch.dtype, tolerance: float, stats_device: str | None) -> None:
    names = attention_names(tiny_qwen2())
    expected = reference_moments(tiny_qwen2(), [(list(e.ids), e.num_prompt) for e in EXAMPLES], names)
    found = collect_moments(
        tiny_qwen2().to("cuda", dtype), batches_of(EXAMPLES, 3), names, needs=frozenset(MOMENT_NAMES),
        options=CalibrationOptions(stats_device=stats_device),
    )  # fmt: skip
    for name, moments in found.items():
        for moment in moments.names():
            total, value = getattr(moments, moment), getattr(expected[name], moment)
            assert total.dtype == torch.float32
            assert total.device.type == (stats_device or "cuda")
            np.testing.assert_allclose(numpy_of(total), value, rtol=0, atol=tolerance * np.abs(value).max())


def wide_model() -> PeftModel:
    """Sums of 160 MiB in all and 8 at most."""
    settings = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return get_peft_model(tiny_qwen2(**settings).cuda(), FrozenCoreConfig(r=4, target_modules="all-linear"))


def test_memory_that_runs_out_on_the_device_makes_smaller_groups() -> None:
    expected, model = wide_model(), wide_model()
    calibrate(expected, batches_of(EXAMPLES, 3), progress=False)  # libraries have their workspaces then
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * 2**20) / total)
    try:
        with pytest.warns(UserWarning, match=r"Out of memory with 28 layers in a pass: calibration goes on with 14"):
            calibrate(model, batches_of(EXAMPLES, 3), progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert torch.linalg.svdvals(X.mT @ Y).min() > 0.999
