"""Tables of docs/cost.md on growth, ranks and projection, from what ``make bench`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from harness import table
from projection import (
    H100,
    JOBS,
    LLAMA_70B,
    QWEN_3B,
    QWEN_7B,
    Measured,
    core_values,
    exchanged_gradients,
    lora_values,
    project,
)
from shapes import FLOAT32_BYTES

SWEPT = {"num_examples": "examples", "width": "width", "num_layers": "layers", "rank": "rank"}
Found = Mapping[str, Any]


def blocks(found: Found) -> dict[str, str]:
    """The generated blocks of docs/cost.md by name, but for those of speed_tables.py."""
    growth, ranks = found["parts"]["growth"], found["parts"]["ranks"]
    measured = Measured.of(growth, ranks)
    return {
        "machine": machine(growth, ranks),
        **growth_blocks(growth),
        "constants": _constants(growth),
        "ranks": of_ranks(ranks),
        "taken": _taken(measured),
        "projection": _projection(measured),
        "gradients": _gradients(),
    }


def growth_blocks(growth: Found) -> dict[str, str]:
    """A table for each letter of a calibration, and two of a step."""
    return {
        **{f"calibration-{word}": _sweep(growth, name) for name, word in SWEPT.items()},
        "step-rank": _steps(growth, "rank"),
        "step-targets": _steps(growth, "targets"),
    }


def over_floor(row: Found, contestant: str) -> float:
    """Median over the runs of a contestant's step over the floor's in the same round."""
    return median(run[f"{contestant}_s"] / run["floor_s"] for run in row["runs"])


def machine(growth: Found, ranks: Found) -> str:
    rates, torch_version = growth["rates"], growth["provenance"]["versions"]["torch"]
    return (
        f"{growth['processor']}, {growth['num_cores']} cores, torch {torch_version}. One thread does "
        f"{rates['matmul_operations_per_s'] / 1e9:.0f} billion operations a second in a float32 matrix product, and "
        f"copies {rates['copy_bytes_per_s'] / 1e9:.0f} GB a second (read and written). Times are medians of "
        f"{growth['runs']} runs of a calibration, {growth['step_runs']} of a step, {ranks['runs']} with several ranks. "
        f"The load average at the start and at the end was {_loads(growth)} for growth and {_loads(ranks)} for ranks. "
        "A machine that does nothing else has 1, and up to 4 with ranks. A higher load lengthens wall time, and hardly "
        "processor time.\n"
    )


def _loads(found: Found) -> str:
    return " and ".join("unknown" if load is None else f"{load:.1f}" for load in found["load_average"])


def rows_of_sweep(growth: Found, name: str) -> list[Found]:
    """The rows in which only that letter differs from the first job."""
    job = {key: value for key, value in growth["plan"]["job"].items() if key != name}
    rows = [row for row in growth["calibration"] if all(row[key] == value for key, value in job.items())]
    return sorted(rows, key=lambda row: row[name])


def calibration_over_floor(row: Found) -> float:
    """Median over the runs of a calibration over its floor, which computes the same logits."""
    return median((run["collect_s"] + run["build_s"]) / run["floor_s"] for run in row["runs"])


def _sweep(growth: Found, name: str) -> str:
    def cells(row: Found) -> list[str]:
        added = median(run["collect_s"] / run["floor_s"] for run in row["runs"])
        return [f"{row[name]}", *(f"{row[part]:.3g}" for part in ("floor_s", "collect_s", "build_s")),
                f"{added:.3f}", f"{calibration_over_floor(row):.3f}"]  # fmt: skip

    headings = [SWEPT[name], "floor, s", "pass with sums, s", "bases, s", "pass / floor", "all / floor"]
    return table(headings, map(cells, rows_of_sweep(growth, name)))


def _steps(growth: Found, name: str) -> str:
    rows = rows_of_steps(growth, name)
    ratios = [[f"{over_floor(row, who):.3f}" for who in ("frozencore", "lora")] for row in rows]
    body = [[str(row[name]), f"{row['floor_s'] * 1e3:.0f}", *own] for row, own in zip(rows, ratios, strict=True)]
    return table([name, "floor, ms", "frozen core / floor", "LoRA / floor"], body)


def rows_of_steps(growth: Found, name: str) -> list[Found]:
    rows = growth["step"]
    if name == "rank":
        return sorted((row for row in rows if row["targets"] == "q, k, v, o"), key=lambda row: row["rank"])
    return [row for row in sorted(rows, key=lambda row: row["num_targets"]) if row["rank"] == 16]


def _constants(growth: Found) -> str:
    peak, constants = growth["rates"]["matmul_operations_per_s"], growth["constants"]

    def rate(part: str, name: str) -> str:
        seconds = constants[part][name]
        return f"{1e12 * seconds:.2f} ps, {100 / (seconds * peak):.0f} %" if seconds else "0"

    def call(part: str, name: str) -> str:
        return f"{1e6 * constants[part][name]:.0f} µs"

    def errors(part: str) -> list[str]:
        return [f"{100 * constants[part][name]:.1f} %" for name in ("median_error", "largest_error")]

    activation = f"{1e9 * constants['pass']['per_activation_s']:.2f} ns"
    return table(
        ["part", "an operation, share of the matrix product's rate", "other terms", "median error", "largest"],
        [
            ["plain pass", rate("pass", "per_operation_s"),
             f"{activation} an activation, {call('pass', 'per_layer_and_batch_s')} a block and batch", *errors("pass")],
            ["sums", rate("products", "per_operation_s"),
             f"{call('products', 'per_target_and_batch_s')} a target and batch", *errors("products")],
            ["bases, Krylov", rate("bases", "per_krylov_operation_s"), f"{call('bases', 'per_target_s')} a target",
             *errors("bases")],
            ["bases, Gram (float64)", rate("bases", "per_gram_operation_s"), "the same", *errors("bases")],
            ["core in a step", rate("core", "per_operation_s"), f"{call('core', 'per_target_s')} a target",
             *errors("core")],
            ["LoRA in a step", rate("lora", "per_operation_s"), f"{call('lora', 'per_target_s')} a target",
             *errors("lora")],
        ],
    )  # fmt: skip


def of_ranks(ranks: Found) -> str:
    """Wall time is left out where one rank alone had to wait for its processor: it would say who else was at work."""
    one = ranks["rows"][0]
    is_quiet = one["wall_s"] < 1.1 * one["cpu_s"]

    def cells(row: Found) -> list[str]:
        return [
            f"{row['num_ranks']}",
            *((f"{row['wall_s']:.2f}", f"{one['wall_s'] / row['wall_s']:.2f}") if is_quiet else ("busy", "busy")),
            f"{row['cpu_s']:.2f}", f"{one['cpu_s'] / row['cpu_s']:.2f}", f"{row['sent_by_formula_bytes']:,.0f}",
            f"{row['sent_by_payload_bytes']:,.0f}", f"{row['wire_bytes']:,.0f}",
        ]  # fmt: skip

    return table(
        [
            "ranks",
            "wall, s",
            "speed-up",
            "busiest rank, CPU s",
            "speed-up",
            "bytes a rank, formula",
            "counted",
            "on the wire",
        ],
        map(cells, ranks["rows"]),
    )


def _taken(measured: Measured) -> str:
    return table(
        ["constant", "value", "measured as"],
        [
            ["κ", f"{measured.product_cost:.2f}", "time of an operation in the sums over one in the pass"],
            ["σ", f"{measured.svd_cost:.2f}", "time of an operation in the Krylov SVD over one in a matrix product"],
            ["h", f"{1e6 * measured.call_s:.0f} µs", "a target and batch: calls and vector sums"],
            ["b", f"{1e6 * measured.basis_s:.0f} µs", "a target in its basis: calls, QR, copies"],
            ["w", f"{measured.wire_factor:.2f}", "bytes on the wire over the formula's, most ranks"],
            ["c", f"{measured.collectives:.1f}", "collectives a target"],
        ],
    )


def _projection(measured: Measured) -> str:
    def cells(job: Any) -> list[str]:
        found = project(job, measured)
        parts = (found.pass_s, found.products_s, found.bases_s, found.exchange_s, found.total_s)
        return [
            f"{job.title}, {job.device.name}", f"{job.num_gpus:,}", f"{job.num_copies:,}",
            f"{job.num_examples:,} x {job.sequence}", *(f"{part:.2g} s" for part in parts),
            f"{found.sums_bytes / 1e9:.1f} GB",
        ]  # fmt: skip

    headings = ["model", "GPUs", "copies", "examples", "pass", "sums", "bases", "exchange", "all", "sums a GPU"]
    return table(headings, map(cells, JOBS))


def _gradients() -> str:
    def cells(name: str, model: Any, copies: int) -> list[str]:
        body = [name, f"{copies:,}"]
        for values in (core_values(model), lora_values(model)):
            seconds = exchanged_gradients(values, copies, H100)
            body += [f"{values:,}", f"{3 * FLOAT32_BYTES * values / 1e6:,.1f} MB", f"{1e3 * seconds:.2f} ms"]
        return body

    headings = [
        "model",
        "copies",
        "core values",
        "gradient + states",
        "exchange",
        "LoRA values",
        "gradient + states",
        "exchange",
    ]
    jobs = (("Qwen2.5-3B", QWEN_3B, 8), ("Qwen2.5-7B", QWEN_7B, 1000), ("Llama-3.1-70B", LLAMA_70B, 250))
    return table(headings, [cells(*job) for job in jobs])
