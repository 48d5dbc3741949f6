"""The truncated SVD against torch: time, and worst mean principal cosine with the full SVD, on hard spectra.

    python benchmarks/svd.py            # minutes;  --quick leaves out the largest full SVDs

Rank 16, singular values i^-0.3 under random singular vectors, float32. Times are seconds of CPU: run with one thread.
Contestants alternate; the full SVD runs once. Without one, the singular vectors that a matrix was made of stand in.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from frozencore.files.whole_file import write_json
from frozencore.maths.linalg import principal_cosines, truncated_svd
from frozencore.tune.run.provenance import provenance

RANK = 16
DECAY = 0.3
SHAPES = [(256, 2048), (2048, 2048), (3584, 3584), (18944, 3584)]
LARGEST_QUICK_FULL = 256 * 2048
Factors = tuple[Tensor, Tensor]


def hard_matrix(shape: tuple[int, int]) -> tuple[Tensor, Factors]:
    """A matrix and its leading singular vectors."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(size, min(shape), generator=generator)).Q for size in shape)
    return (U * torch.arange(1, min(shape) + 1) ** -DECAY) @ V.mT, (U[:, :RANK].clone(), V[:, :RANK].clone())


def ours(M: Tensor) -> Factors:
    U, _, V = truncated_svd(M, RANK)
    return U, V


def lowrank(M: Tensor) -> Factors:
    """``torch.svd_lowrank`` as it comes: two rounds; q = r."""
    U, _, V = torch.svd_lowrank(M, q=RANK)
    return U, V


def full(M: Tensor) -> Factors:
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U[:, :RANK], Vh[:RANK].mT


def timed(run: Callable[[Tensor], Factors], M: Tensor) -> tuple[float, Factors]:
    started = time.process_time()
    found = run(M)
    return time.process_time() - started, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Small shapes, one run.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--largest-full", type=int, default=3584 * 3584, help="Entries of the largest full SVD.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "svd.json")
    options = parser.parse_args()

    num_runs = 1 if options.quick else options.runs
    largest_full = LARGEST_QUICK_FULL if options.quick else options.largest_full
    table = Table("shape", "method", "median s", "slowest s", "of the full SVD", "mean principal cosine")
    rows = []
    for shape in SHAPES[:2] if options.quick else SHAPES:
        M, true = hard_matrix(shape)
        whole_s = None
        if M.numel() <= largest_full:
            whole_s, true = timed(full, M)
            rows.append({"shape": shape, "method": "torch.linalg.svd", "runs_s": [whole_s], "cosine": 1.0})
        seconds: dict[str, list[float]] = {"frozencore": [], "torch.svd_lowrank": []}
        cosines = {}
        for _ in range(num_runs):
            for name, run in (("frozencore", ours), ("torch.svd_lowrank", lowrank)):
                elapsed, found = timed(run, M)
                seconds[name].append(elapsed)
                cosines[name] = min(float(principal_cosines(*pair).mean()) for pair in zip(found, true, strict=True))
        for name, runs in seconds.items():
            rows.append({"shape": shape, "method": name, "runs_s": runs, "cosine": cosines[name]})
        for row in rows:
            if row["shape"] == shape:
                taken = row["runs_s"]
                share = f"{median(taken) / whole_s:.3f}" if whole_s else "-"
                columns = (f"{median(taken):.4g}", f"{max(taken):.4g}", share, f"{row['cosine']:.6f}")
                table.add_row(f"{shape[0]} x {shape[1]}", row["method"], *columns)
    Console(width=max(100, Console().width)).print(table)
    setting = {"quick": options.quick, "rank": RANK, "decay": DECAY, "cpus": sorted(os.sched_getaffinity(0))}
    write_json(options.out, {"benchmark": "truncated SVD", **setting, "rows": rows, "provenance": provenance()})


if __name__ == "__main__":
    main()
