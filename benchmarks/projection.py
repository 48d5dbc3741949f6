"""Calibration and a training step at sizes that were not run: operations and bytes from shapes, times from constants.

The formulas stand in docs/cost.md; here they are code. Three kinds of numbers go in: counts (benchmarks/shapes.py),
constants measured on this machine's CPU (:class:`Measured`), and what a device is assumed to do (:class:`Device`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from shapes import (
    FLOAT32_BYTES,
    Architecture,
    entries,
    num_rounds,
    pass_operations,
    product_bytes,
    product_operations,
    sent_by_formula,
    sides,
    svd_operations,
)

RANK = 16


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet, and three guesses.

    Attributes:
        half_rate, single_rate: Operations a second in bfloat16 (dense) and float32.
        memory_rate: Bytes a second of its own memory.
        share: Of ``half_rate`` that a forward and backward pass reaches. A guess.
        link_rate: Bytes a second that one process sends to others. A guess: 400 Gbit/s.
        latency_s: Seconds a message takes at least. A guess.
    """

    name: str
    half_rate: float
    single_rate: float
    memory_rate: float
    share: float = 0.4
    link_rate: float = 50e9
    latency_s: float = 20e-6


H20 = Device("H20", 148e12, 44e12, 4.0e12)
H100 = Device("H100 SXM", 989e12, 67e12, 3.35e12)

QWEN_1_5B = Architecture(1536, 8960, 28, 12, 2, 151936, 128)
QWEN_3B = Architecture(2048, 11008, 36, 16, 2, 151936, 128)
QWEN_7B = Architecture(3584, 18944, 28, 28, 4, 152064, 128)
LLAMA_70B = Architecture(8192, 28672, 80, 64, 8, 128256, 128)


@dataclass(frozen=True)
class Measured:
    """Constants of this machine that are taken along.

    Attributes:
        product_cost: Time of an operation in the products over that of one in the pass.
        svd_cost: Time of an operation in the Krylov SVD over that of one in a float32 matrix product.
        call_s: Seconds a batch and target in collecting beyond its products: calls and vector sums.
        basis_s: Seconds a target in its basis beyond its SVD.
        wire_factor: Bytes on the wire over bytes by the formula (gloo, the most ranks measured).
        collectives: Calls a target.
    """

    product_cost: float
    svd_cost: float
    call_s: float
    basis_s: float
    wire_factor: float
    collectives: float

    @classmethod
    def of(cls, growth: Mapping[str, Any], ranks: Mapping[str, Any]) -> Measured:
        """From what benchmarks/growth.py and benchmarks/ranks.py wrote."""
        constants = growth["constants"]
        most = max(ranks["rows"], key=lambda row: row["num_ranks"])
        return cls(
            product_cost=constants["products"]["per_operation_s"] / constants["pass"]["per_operation_s"],
            svd_cost=constants["bases"]["per_krylov_operation_s"] * growth["rates"]["matmul_operations_per_s"],
            call_s=constants["products"]["per_target_and_batch_s"],
            basis_s=constants["bases"]["per_target_s"],
            wire_factor=most["wire_bytes"] / most["sent_by_formula_bytes"],
            collectives=most["num_collectives"] / (4 * ranks["scale"]["num_layers"]),
        )


@dataclass(frozen=True)
class Job:
    """Calibration of q, k, v and o: ``gpus_a_copy`` devices hold one copy of the model and work one after the other."""

    title: str
    model: Architecture
    device: Device
    num_gpus: int = 1
    gpus_a_copy: int = 1
    num_examples: int = 128
    sequence: int = 512

    @property
    def num_copies(self) -> int:
        return self.num_gpus // self.gpus_a_copy


@dataclass(frozen=True)
class Projected:
    """Seconds of each part on the busiest copy, one after the other, and bytes of the sums a device holds."""

    pass_s: float
    products_s: float
    bases_s: float
    exchange_s: float
    sums_bytes: float

    @property
    def total_s(self) -> float:
        return self.pass_s + self.products_s + self.bases_s + self.exchange_s


def project(job: Job, measured: Measured) -> Projected:
    """The formulas of docs/cost.md."""
    device, copies, targets = job.device, job.num_copies, job.model.targets()
    own = ceil(job.num_examples / copies)  # batches of one example
    tokens, completion = own * job.sequence, own * job.sequence // 4
    rate = device.share * device.half_rate
    svds = sum(svd_operations(shape, RANK) for shape in targets)
    largest = max(svd_operations(shape, RANK) for shape in targets)
    messages = measured.collectives * len(targets) * num_rounds(copies)
    sent = measured.wire_factor * sent_by_formula(targets, RANK, copies)
    return Projected(
        pass_s=pass_operations(job.model, tokens, job.sequence, completion) / rate,
        products_s=(
            measured.product_cost * product_operations(targets, tokens) / rate
            + product_bytes(targets, own) / device.memory_rate
            + measured.call_s * len(targets) * own
        ),
        bases_s=(
            measured.svd_cost * max(svds / copies, largest) / device.single_rate
            + measured.basis_s * ceil(len(targets) / copies)
        ),
        exchange_s=sent / device.link_rate + messages * device.latency_s,
        sums_bytes=FLOAT32_BYTES * entries(targets) / job.gpus_a_copy,
    )


def exchanged_gradients(num_values: int, copies: int, device: Device) -> float:
    """Seconds to sum float32 gradients over all copies: ``2(R - 1)/R`` of the bytes, there and back through a tree."""
    sent = 2 * (copies - 1) / copies * FLOAT32_BYTES * num_values
    return sent / device.link_rate + 2 * num_rounds(copies) * device.latency_s


def core_values(model: Architecture) -> int:
    return RANK**2 * len(model.targets())


def lora_values(model: Architecture) -> int:
    return RANK * sides(model.targets())


JOBS = (
    Job("Qwen2.5-3B, the paper's device", QWEN_3B, H20, sequence=128),
    Job("Qwen2.5-7B", QWEN_7B, H100),
    Job("Qwen2.5-7B", QWEN_7B, H100, num_gpus=8),
    Job("Qwen2.5-7B", QWEN_7B, H100, num_gpus=128),
    Job("Qwen2.5-7B", QWEN_7B, H100, num_gpus=1000, num_examples=1000),
    Job("Llama-3.1-70B", LLAMA_70B, H100, num_gpus=4, gpus_a_copy=4),
    Job("Llama-3.1-70B", LLAMA_70B, H100, num_gpus=64, gpus_a_copy=4),
    Job("Llama-3.1-70B", LLAMA_70B, H100, num_gpus=512, gpus_a_copy=4),
    Job("Llama-3.1-70B", LLAMA_70B, H100, num_gpus=1000, gpus_a_copy=4, num_examples=1000),
)
