"""Commands in forked processes: without the seconds that a new one needs for its imports."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")


def forget_cuda() -> None:
    """In a forked process: where its parent has used a GPU, it cannot; it computes on the CPU."""
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def start(words: list[str], said: Path) -> Any:
    """Start ``frozencore`` with those words; its workers, if it has any, are forked from it.

    Args:
        said: A folder, for what it says: ``out`` and ``err``.
    """
    process = FORK.Process(target=_run, args=(words, said))
    process.start()
    return process


def _run(words: list[str], said: Path) -> None:
    from frozencore.cli import app as cli

    forget_cuda()
    torch.set_num_threads(1)
    multiprocessing.get_context = lambda method=None: FORK
    sys.argv = ["frozencore", *words]
    sys.stdout, sys.stderr = ((said / name).open("w", buffering=1) for name in ("out", "err"))
    cli.main()
