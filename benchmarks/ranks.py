"""Calibration on 1, 2 and 4 processes (gloo, this machine): time, and bytes sent, against the formula.

    python benchmarks/ranks.py            # about two minutes;  --quick: one tiny round that only shows that it runs

The same examples are divided among the ranks. ``wall_s`` is the time until the slowest is done; with more ranks than
cores it cannot fall further. ``cpu_s`` is the processor time of the busiest rank, waiting left out: what the ranks
would take with a core each. One thread a rank, medians over the runs.

Every collective of a calibration is counted by its payload. From the payloads, bytes sent a rank, on average over the
ranks and at least: ``(R - 1)/R`` of what is reduced or broadcast, twice that of what is reduced for all. The formula
gives the same from the layers' shapes alone (``sent_by_formula`` in benchmarks/shapes.py). ``wire_bytes`` is what
the loopback device carried meanwhile, divided by the ranks: gloo's own algorithms, headers, and any other program.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import Tensor, nn

import cost_tables
from contestants import Batch, adapter_config, labelled_batch, random_ids, random_qwen2
from frozencore import calibrate
from harness import load_average, parser_of, write_found
from shapes import sent_by_formula

ROWS = 8
LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


@dataclass(frozen=True)
class Scale:
    """The size of the job; ``sequence`` is the number of tokens of an example."""

    width: int = 512
    num_layers: int = 4
    num_examples: int = 128
    sequence: int = 64
    rank: int = 16


QUICK = Scale(width=64, num_layers=1, num_examples=16, sequence=16, rank=4)


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """Bytes of the tensors that are reduced for all, reduced, and broadcast meanwhile, and the calls made."""
    names = ("all_reduce", "reduce", "broadcast")
    payload = dict.fromkeys((*names, "calls"), 0)
    plain = {name: getattr(dist, name) for name in names}

    def counting(name: str, collective: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        payload[name] += tensor.nbytes
        payload["calls"] += 1
        return collective(tensor, *args, **options)

    try:
        for name, collective in plain.items():
            setattr(dist, name, partial(counting, name, collective))
        yield payload
    finally:
        for name, collective in plain.items():
            setattr(dist, name, collective)


def sent_by_payload(payload: dict[str, int], num_ranks: int) -> float:
    """Bytes that a rank sends, on average and at least."""
    return (num_ranks - 1) / num_ranks * (2 * payload["all_reduce"] + payload["reduce"] + payload["broadcast"])


def loopback_bytes() -> int | None:
    """The bytes that the loopback device has sent so far; None if the system does not tell."""
    counter = Path(f"/sys/class/net/{LOOPBACK}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else None


def own_batches(scale: Scale, rank: int, num_ranks: int) -> list[Batch]:
    ids = random_ids(scale.num_examples, scale.sequence, 24 * scale.width)[rank::num_ranks]
    return [labelled_batch(some) for some in ids.split(ROWS)]


def adapted(scale: Scale) -> nn.Module:
    return get_peft_model(random_qwen2(scale.num_layers, scale.width), adapter_config("frozencore", rank=scale.rank))


def hash_of_bases(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.named_buffers():
        if "frozencore_" in name:
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def calibrate_once(model: nn.Module, batches: list[Batch]) -> dict[str, Any]:
    dist.barrier()
    carried, wall, cpu = loopback_bytes(), time.perf_counter(), time.process_time()
    with counted_collectives() as payload:
        calibrate(model, batches, progress=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    dist.barrier()
    wire = None if carried is None else (loopback_bytes() or 0) - carried
    return {"wall_s": wall, "cpu_s": cpu, "wire_bytes": wire, "payload": payload}


def work(rank: int, num_ranks: int, scale: Scale, num_runs: int, folder: str) -> None:
    """One process: a run before, untimed, then the runs; rank 0 writes down what all found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    model, batches = adapted(scale), own_batches(scale, rank, num_ranks)
    runs = [calibrate_once(model, batches) for _ in range(num_runs + 1)][1:]
    mine = {"runs": runs, "hash": hash_of_bases(model)}
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, mine)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(num_ranks: int, scale: Scale, num_runs: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(num_ranks, scale, num_runs, folder), nprocs=num_ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    if len({one["hash"] for one in found}) > 1:
        raise RuntimeError("The ranks hold different bases.")
    rounds = list(zip(*(one["runs"] for one in found), strict=True))
    shapes = [(m.out_features, m.in_features) for m in adapted(scale).modules() if hasattr(m, "frozencore_R")]
    payload = found[0]["runs"][0]["payload"]
    wires = [max(run["wire_bytes"] or 0 for run in one) / num_ranks for one in rounds]
    return {
        "num_ranks": num_ranks,
        "wall_s": median(max(run["wall_s"] for run in one) for one in rounds),
        "cpu_s": median(max(run["cpu_s"] for run in one) for one in rounds),
        "num_collectives": payload["calls"],
        "payload_bytes": {name: size for name, size in payload.items() if name != "calls"},
        "sent_by_payload_bytes": sent_by_payload(payload, num_ranks),
        "sent_by_formula_bytes": sent_by_formula(shapes, scale.rank, num_ranks),
        "wire_bytes": None if LOOPBACK is None else median(wires),
        "runs": [{"wall_s": [run["wall_s"] for run in one], "cpu_s": [run["cpu_s"] for run in one]} for one in rounds],
    }


def main() -> None:
    parser = parser_of(__doc__, "ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    scale, num_runs, ranks = (QUICK, 1, [1, 2]) if options.quick else (Scale(), options.runs, options.ranks)
    first_load = load_average()
    rows = [launch(num_ranks, scale, num_runs) for num_ranks in ranks]
    print(cost_tables.of_ranks({"rows": rows}))
    loads = [first_load, load_average()]
    write_found(options, scale=asdict(scale), runs=num_runs, load_average=loads, rows=rows)


if __name__ == "__main__":
    main()
