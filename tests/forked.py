"""Commands and scripts in processes forked from a server that has imported everything and computed nothing.

A process that has computed must not be forked to compute: the child copies the locks of MKL and OpenMP as they are at
that moment, and one in thousands hangs. A new interpreter for each command would take seconds to import.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TIMEOUT_S = 270
# One server for each process of pytest. What it starts is pickled: functions of modules, `partial` for their arguments.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["frozencore.cli.run_screen", "frozencore_lab.cli.campaign", "matplotlib.pyplot"])
# For processes that have computed nothing themselves: what the server started may start others.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Ended:
    """Exit status of a process, and the text of its two streams."""

    status: int
    out: str
    err: str


def ended(call: Callable[[], object], folder: Path, *, timeout_s: float = TIMEOUT_S + 10) -> Ended:
    """Run ``call`` in a process of its own, to its end.

    Args:
        call: A function of a module, or a ``partial`` of one.
        folder: Receives its streams as the files ``out`` and ``err``.
    """
    process = in_a_process(call, folder)
    process.join(timeout_s)
    assert process.exitcode is not None, f"not at its end after {timeout_s:.0f} s"
    return Ended(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def start(words: list[str], folder: Path) -> Any:
    """Start ``frozencore`` with those words; if it has workers, they are forked from it.

    Args:
        folder: Receives its streams as the files ``out`` and ``err``.
    """
    return in_a_process(partial(command, words), folder)


def in_a_process(call: Callable[[], object], folder: Path) -> Any:
    """Start ``call`` in a process of its own, with the working directory and the environment of this moment."""
    process = SERVER.Process(target=_enter, args=(call, folder, Path.cwd(), dict(os.environ)))
    process.start()
    return process


def _enter(call: Callable[[], object], folder: Path, cwd: Path, environment: Mapping[str, str]) -> None:
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    for descriptor, name in ((1, "out"), (2, "err")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=2)
    call()


def command(words: list[str]) -> None:
    """Run ``frozencore`` with those words here, where nothing was computed before: its workers are forked from it."""
    from frozencore.cli import app

    multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
    sys.argv = ["frozencore", *words]
    app.main()


def script(path: Path, *words: object) -> Callable[[], object]:
    """A call that does the same as ``python path words``."""
    return partial(_script, path, [str(word) for word in words])


def _script(path: Path, words: list[str]) -> None:
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def as_ranks(size: int, call: Callable[[int], object]) -> None:
    """Call it with its rank in so many processes, whose environments are those of ``torchrun``.

    They are forked from this process, so it must have computed nothing: call it through ``ended``.

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
    os.environ.update(environment)
    call(rank)
