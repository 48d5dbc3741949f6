"""The whole way on a GPU: the core's product, bases under a budget, a run, and a device without room."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

from frozencore import FrozenCoreConfig, calibrate, collect_moments
from frozencore.adapter.core_product import plus_core
from frozencore.calibration.hooks import FiniteBatches
from frozencore.progress import no_progress
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.methods import METHODS
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute
from tiny import ATTENTION, batches_of, cores_of, draw_examples, tiny_qwen2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BATCHES = batches_of(draw_examples(num_examples=8, seed=3), 4)
MIB = 2**20


def calibrated(device: str, **options: Any) -> PeftModel:
    config = FrozenCoreConfig(r=4, target_modules=list(ATTENTION), task_type="CAUSAL_LM")
    model = get_peft_model(tiny_qwen2().to(device), config)
    calibrate(model, BATCHES, progress=False, **options)
    return model


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_product_is_that_of_float64(dtype: torch.dtype, tolerance: float, rows: int | None, tokens: int) -> None:
    """With one core, and with one for each row."""
    torch.manual_seed(1)
    m, n, r = 160, 192, 16
    x, y = (torch.randn(3, tokens, size, device="cuda", dtype=dtype) for size in (n, m))
    P, Q = (torch.linalg.qr(torch.randn(size, r, device="cuda"))[0].to(dtype) for size in (m, n))
    R = torch.randn(*((rows, r, r) if rows else (r, r)), device="cuda", requires_grad=True)
    x.requires_grad_()
    x64, R64 = (tensor.detach().double().requires_grad_() for tensor in (x, R))
    through = "btj,bij,mi->btm" if rows else "btj,ij,mi->btm"
    expected = y.double() + 3 * torch.einsum(through, x64 @ Q.double(), R64, P.double())
    wanted = [expected, *torch.autograd.grad(expected.square().sum(), [x64, R64])]
    product = plus_core(y, x, P, Q, R, 3.0)
    found = [product, *torch.autograd.grad(product.float().square().sum(), [x, R])]
    for one, right in zip(found, wanted, strict=True):
        assert float((one.double() - right).norm() / right.norm()) < tolerance


def test_a_compiled_model_keeps_eagers_numbers() -> None:
    torch.manual_seed(1)
    model = calibrated("cuda").train()  # in bfloat16 a compiler that rounds elsewhere moves gradients by 5 %
    batch = {name: tensor.cuda() for name, tensor in BATCHES[0].items()}
    cores = [layer.factors("default")[2] for layer in cores_of(model)]
    with torch.no_grad():
        for R in cores:
            R.normal_(std=0.1)

    def outcome(call: Any) -> list[torch.Tensor]:
        output = call(**batch)
        return [output.logits.detach(), *torch.autograd.grad(output.loss, cores)]

    expected = outcome(model)
    for one, right in zip(outcome(torch.compile(model, fullgraph=True)), expected, strict=True):
        assert float((one - right).norm() / right.norm()) < 1e-4


def test_a_pass_waits_for_nothing_but_its_end() -> None:
    """torch names every call that waits for the device; what transformers itself asks is its own matter."""
    model = calibrated("cuda")
    layers = {layer.name: layer.get_base_layer() for layer in cores_of(model)}
    looked: list[int] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(FiniteBatches, "look", lambda self: looked.append(len(self.waiting)))
            collect_moments(model, BATCHES, layers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert looked
    assert not [
        entry.filename for entry in caught if "frozencore" in entry.filename and "synchroniz" in str(entry.message)
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", ["pocket-sentiment", "pocket-entailment", "pocket-comparison", "pocket-math"])
def test_a_run_on_the_gpu_scores_as_on_the_cpu(method: str, task: str, tmp_path: Path) -> None:
    if task != "pocket-sentiment" and method != "fcca":
        pytest.skip("one method on each kind of task")
    records = {
        device: execute(run_on(device, method, task), tmp_path / device, no_progress) for device in ("cpu", "cuda")
    }
    cpu, cuda = records["cpu"], records["cuda"]
    assert cuda.held_out_loss_before == pytest.approx(cpu.held_out_loss_before, abs=1e-4)
    assert cuda.accuracy_before == cpu.accuracy_before
    assert cuda.held_out_loss == pytest.approx(cpu.held_out_loss, rel=0.05)
    assert cuda.num_trainable == cpu.num_trainable


def run_on(device: str, method: str, task: str) -> RunConfig:
    rank = {} if method == "full" else {"rank": 4}
    return make_config(
        model=str(pocket_model_path()), task=task, method=method, calibration_size=16, batch_size=8, accumulation=1,
        epochs=1, num_train=32, num_evaluation=20, device=device, **rank,
    )  # fmt: skip


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit this process to 64 MiB of device memory beyond what it holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_out_of_memory_scores_in_smaller_groups(little_memory: None) -> None:
    from frozencore.tune.rows.token_batches import score_in_groups

    seen: list[list[int]] = []

    def score(rows: list[int]) -> None:
        torch.empty(len(rows) * 24 * MIB, dtype=torch.uint8, device="cuda")
        seen.append(rows)

    score_in_groups(score, [(100, 10)] * 8, torch.device("cuda"))
    assert sorted(row for rows in seen for row in rows) == list(range(8))
    assert max(map(len, seen)) <= 2
