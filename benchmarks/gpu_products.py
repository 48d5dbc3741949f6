"""What fewer, larger calls would save: parts of a step and of a calibration, many at a time against one by one.

On a GPU each part is captured as a CUDA graph and replayed, so that what is compared is the device's time: launching
from Python is another matter, which the steps themselves show. On a CPU they are simply run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from frozencore.maths.batched_svd import truncated_svds
from frozencore.maths.linalg import truncated_svd
from gpu_contest import RANK, WARM_UP, Bench, timed

READ_TOGETHER = 3  # q, k and v


def products(bench: Bench) -> dict[str, Any]:
    """Three x·Q of each block against one of all columns; the r x r gradients of all layers against one batch."""
    blocks, tokens, device = bench.base.config.num_hidden_layers, bench.job.long, bench.device
    width = bench.base.config.hidden_size
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, width, device=device, dtype=half)
    Q = torch.randn(blocks, width, READ_TOGETHER * RANK, device=device, dtype=half)
    apart = Q.unflatten(2, (READ_TOGETHER, RANK)).permute(0, 2, 1, 3).contiguous()
    h, z = (torch.randn(4 * blocks, tokens, RANK, device=device, dtype=half) for _ in range(2))
    return {
        "blocks": blocks,
        "tokens": tokens,
        "inputs_apart_s": replayed(bench, lambda: [[x @ one for one in block] for block in apart]),
        "inputs_together_s": replayed(bench, lambda: [x @ block for block in Q]),
        "gradients_apart_s": replayed(bench, lambda: [one.mT @ other for one, other in zip(h, z, strict=True)]),
        "gradients_together_s": replayed(bench, lambda: h.mT @ z),
    }


def svds(bench: Bench) -> dict[str, Any]:
    """The truncated SVDs of a calibration's whitened moments, one by one and those of a shape at once."""
    sizes = bench.base.config
    head = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    found = {}
    for shape in ((queries, sizes.hidden_size), (keys, sizes.hidden_size)):
        batch = min(8, 2 * sizes.num_hidden_layers)
        decay = torch.arange(1, min(shape) + 1, device=bench.device, dtype=torch.float32).pow(-0.5)
        U, V = (torch.linalg.qr(torch.randn(batch, size, min(shape), device=bench.device))[0] for size in shape)
        T = (U * decay) @ V.mT
        seeds = list(range(batch))
        runs: dict[str, Callable[[], Any]] = {
            "apart_s": lambda T=T: [truncated_svd(one, RANK) for one in T],
            "together_s": lambda T=T, seeds=seeds: truncated_svds(T, RANK, seeds=seeds),
        }
        times = {name: median([timed(bench.device, run) for _ in range(3)][1:]) / batch for name, run in runs.items()}
        found[f"{shape[0]} x {shape[1]}"] = times | {"matrices": batch}
    return found


def replayed(bench: Bench, run: Callable[[], Any]) -> float:
    """Median seconds of one replay."""
    if bench.device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    return median([timed(bench.device, run) for _ in range(bench.job.repeats + 1)][1:])
