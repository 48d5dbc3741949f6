"""Commands and scripts in forked processes: without the seconds that a new one needs for its imports."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import frozencore.cli.run_screen  # noqa: F401 - so that no forked process imports anew: beartype hides a signal then

TIMEOUT_S = 270
FORK = multiprocessing.get_context("fork")


def forget_cuda() -> None:
    """In a forked process: where its parent has used a GPU, it cannot; it computes on the CPU.

    A copied lock may hold it for ever (MKL's, once in thousands), so it ends with its stack after some minutes.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=2)
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


@dataclass(frozen=True)
class Ended:
    """Exit status of a process, and what it said."""

    status: int
    out: str
    err: str


def ended(call: Callable[[], object], said: Path, *, timeout_s: float = TIMEOUT_S + 10) -> Ended:
    """Call it in a forked process, to its end.

    Args:
        said: A folder, for what it says: ``out`` and ``err``.
    """
    process = FORK.Process(target=_call, args=(call, said))
    process.start()
    process.join(timeout_s)
    assert process.exitcode is not None, f"not at its end after {timeout_s:.0f} s"
    return Ended(process.exitcode, (said / "out").read_text(), (said / "err").read_text())


def study(program: Path, out: Path) -> list[dict[str, Any]]:
    """The lines of a study at its tiniest; a second run must find them all, and measure nothing."""
    command = script(program, "--quick", "--out", out)
    first = ended(command, out.parent)
    assert first.status == 0, first.err[-2000:]
    before = out.read_bytes()
    assert ended(command, out.parent).status == 0
    assert out.read_bytes() == before
    return [json.loads(line) for line in before.decode().splitlines()]


def as_ranks(size: int, call: Callable[[int], object]) -> None:
    """Call it with its rank in so many forked processes, whose environments are those of ``torchrun``.

    Raises:
        RuntimeError: Not all of them ended well.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(size):
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(FORK.Process(target=_be_rank, args=(call, rank, {name: str(v) for name, v in values.items()})))
        ranks[-1].start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"exit status of the ranks: {[process.exitcode for process in ranks]}")


def _be_rank(call: Callable[[int], object], rank: int, environment: dict[str, str]) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a training before the fork left it one process's
    os.environ.update(environment)
    call(rank)


def script(path: Path, *words: object) -> Callable[[], object]:
    """A call that does the same as ``python path words``."""

    def run() -> None:
        sys.argv = [str(path), *map(str, words)]
        sys.path.insert(0, str(path.parent))
        for neighbour in path.parent.glob("*.py"):  # a folder of tests may bear the name of a module beside the script
            sys.modules.pop(neighbour.stem, None)
        runpy.run_path(str(path), run_name="__main__")

    return run


def _call(call: Callable[[], object], said: Path) -> None:
    forget_cuda()
    torch.set_num_threads(1)
    for descriptor, name in ((1, "out"), (2, "err")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    call()


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
