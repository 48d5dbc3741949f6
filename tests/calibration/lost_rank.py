"""For test_distributed: ranks that calibrate together, the last of which is lost in the middle of a stage."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from calibration.two_ranks import adapted, bases
from frozencore import calibrate
from frozencore.errors import CalibrationError
from tiny import batches_of, draw_examples


def be_rank(rank: int, size: int, out: Path, stage: str, signal_number: int, timeout_s: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    model = adapted("fcca")
    before = bases(model)
    waiting_since = time.monotonic()

    def lose_the_last(now: str, *_: int | None) -> None:
        nonlocal waiting_since
        waiting_since = time.monotonic()
        if now == stage and rank == size - 1:
            os.kill(os.getpid(), signal_number)

    error = ""
    try:
        calibrate(model, batches_of(draw_examples(8, seed=rank), 2), progress=lose_the_last)
    except CalibrationError as caught:
        error = str(caught)
    report = {
        "error": error,
        "waited_s": time.monotonic() - waiting_since,
        "bases as before": all(bool((value == before[name]).all()) for name, value in bases(model).items()),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(report))


def lose_a_rank(size: int, out: Path, stage: str, signal_number: int, timeout_s: int) -> None:
    """Fork the ranks and wait for all but the last."""
    ranks = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                be_rank(rank, size, out, stage, signal_number, timeout_s)
            finally:
                os._exit(0)  # the group cannot be left in order
        ranks.append(child)
    for child in ranks[:-1]:
        os.waitpid(child, 0)
    os.kill(ranks[-1], signal.SIGKILL)
    os.waitpid(ranks[-1], 0)
