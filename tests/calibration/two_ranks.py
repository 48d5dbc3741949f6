"""The work of each rank in test_distributed: calibrate, train a step, save, fail; one report each."""

from __future__ import annotations

import sys
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from frozencore import FrozenCoreConfig, calibrate, frozen_core_layers
from frozencore.adapter.calibrate import layer_costs, targets_of
from frozencore.calibration.layer_owners import assign_owners
from frozencore.calibration.taps import CalibrationPass
from frozencore.errors import CalibrationError
from frozencore.ranks import own_rank
from tiny import Example, batches_of, draw_examples, tiny_qwen2

EXAMPLES = draw_examples(num_examples=12, seed=5)
CONSTRUCTORS = ("fcca", "rawgrad", "signgrad", "filora", "eva", "lora_xs", "random")


def adapted(constructor: str, **options: Any) -> torch.nn.Module:
    return get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, constructor=constructor, **options))


def bases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers() if "frozencore_" in name}


def cores_after_a_step(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], rate: float = 0.1
) -> dict[str, torch.Tensor]:
    """One SGD step on the mean over the batch's examples of their completion loss."""
    model.train()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="none")
    (losses.sum(1) / batch["labels"][:, 1:].ne(-100).sum(1)).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def fsdp_step(batch: dict[str, torch.Tensor], calibration: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same step with every decoder layer sharded by FSDP2; cores gathered whole."""
    model = adapted("fcca")
    calibrate(model, calibration, progress=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_base_model().model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {name: core.full_tensor() for name, core in cores_after_a_step(model, batch).items()}


def bases_where_one_rank_has_little_room(share: list[Example]) -> dict[str, torch.Tensor]:
    """The second rank has none for the sums of more than three layers."""
    record = CalibrationPass.record

    def with_room(capture: CalibrationPass, *words: Any, **more: Any) -> None:
        record(capture, *words, **more)
        if dist.get_rank() == 1 and sum(bool(recorder.totals) for recorder in capture.recorders.values()) > 3:
            raise torch.OutOfMemoryError("injected")

    CalibrationPass.record = with_room  # type: ignore[method-assign]
    try:
        model = adapted("fcca")
        calibrate(model, batches_of(share, 2), progress=False)
    finally:
        CalibrationPass.record = record  # type: ignore[method-assign]
    return bases(model)


def costs(batches: list[dict[str, torch.Tensor]]) -> dict[str, tuple[Any, ...]]:
    """The costs of each layer for a memory budget."""
    model = adapted("fcca")
    targets = targets_of(frozen_core_layers(model, "default"), "default")
    found = layer_costs(model, model.peft_config["default"], targets, batches)
    return {name: astuple(cost) for name, cost in found.items()}


def failure(work: Any) -> str:
    try:
        work()
    except CalibrationError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    """As a process of ``torchrun``, whose environment says which rank it is."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    share = EXAMPLES[rank::size]
    report: dict[str, Any] = {}

    for constructor in CONSTRUCTORS:
        model = adapted(constructor, initial_step=0.1 if constructor == "signgrad" else 0.0)
        calibration = calibrate(model, batches_of(share, 2), progress=False)
        report[constructor] = bases(model) | {n: p.detach() for n, p in model.named_parameters() if "frozencore_R" in n}
        report[f"{constructor} tokens"] = {name: layer.num_tokens for name, layer in calibration.layers.items()}
        captured = {name: layer.capture for name, layer in calibration.layers.items()}
        report[f"{constructor} J"] = {name: found and found.J for name, found in captured.items()}

    report["costs"] = costs(batches_of(share, 1 + rank))
    report["little room"] = bases_where_one_rank_has_little_room(share)

    model = adapted("fcca")
    calibrate(model, batches_of(share, 2), progress=False)
    wrapped = DistributedDataParallel(model)
    own = {b.data_ptr() for n, b in model.named_buffers() if "frozencore_" in n}
    report["bases"] = len(own)
    report["broadcast bases"] = sum(buffer.data_ptr() in own for buffer in wrapped.modules_buffers)
    report["step"] = cores_after_a_step(wrapped, batches_of(share, len(share))[0])

    report["fsdp step"] = fsdp_step(batches_of(share, len(share))[0], batches_of(share, 2))

    bad = batches_of(share, 2)
    if rank == 1:
        bad[0]["labels"].fill_(-100)
    report["failure"] = failure(lambda: calibrate(adapted("fcca"), bad, progress=False))
    report["owner share"] = sum(
        owner == own_rank() for owner in assign_owners({f"l{i}": (8, 8) for i in range(8)}).values()
    )
    of_another_seed = adapted("random", seed=rank, target_modules=["v_proj"])
    report["other bases"] = failure(lambda: DistributedDataParallel(of_another_seed))
    on_other_layers = adapted("random", layers_to_transform=[0, 1] if rank else [0], target_modules=["v_proj"])
    report["other layers"] = failure(lambda: DistributedDataParallel(on_other_layers))
    torch.save(report, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
