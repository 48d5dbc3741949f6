"""The truncated SVD against torch: time, and worst mean principal cosine with the full SVD, on hard spectra.

    python benchmarks/svd.py            # minutes;  --quick leaves out the largest full SVDs

Rank 16, singular values i^-0.3 under random singular vectors, float32. Times are seconds of CPU: run with one thread.
Contestants alternate; the full SVD runs once. Without one, the singular vectors that a matrix was made of stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import speed_tables
from frozencore.maths.linalg import principal_cosines, truncated_svd
from harness import cpu_s, parser_of, write_found

RANK = 16
DECAY = 0.3
SHAPES = [(256, 2048), (2048, 2048), (3584, 3584), (18944, 3584)]
LARGEST_FULL, LARGEST_QUICK_FULL = 3584 * 3584, 256 * 2048  # entries of a matrix whose full SVD is computed too
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


def main() -> None:
    parser = parser_of(__doc__, "svd")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()

    num_runs, largest_full = (1, LARGEST_QUICK_FULL) if options.quick else (options.runs, LARGEST_FULL)
    rows = []
    for shape in SHAPES[:2] if options.quick else SHAPES:
        M, true = hard_matrix(shape)
        found: dict[str, Factors] = {}

        def run(name: str, method: Callable[[Tensor], Factors], M: Tensor = M, found: Any = found) -> float:
            return cpu_s(lambda: found.update({name: method(M)}))

        if M.numel() <= largest_full:
            rows.append({"shape": shape, "method": "torch.linalg.svd", "runs_s": [run("full", full)], "cosine": 1.0})
            true = found.pop("full")
        methods = {"frozencore": ours, "torch.svd_lowrank": lowrank}
        rounds = [{name: run(name, method) for name, method in methods.items()} for _ in range(num_runs)]
        for name, factors in found.items():
            cosine = min(float(principal_cosines(*pair).mean()) for pair in zip(factors, true, strict=True))
            rows.append({"shape": shape, "method": name, "runs_s": [one[name] for one in rounds], "cosine": cosine})
    print(speed_tables.svds({"rows": rows}))
    write_found(options, rank=RANK, decay=DECAY, rows=rows)


if __name__ == "__main__":
    main()
