"""The provenance of a run: versions, commit and machine, so that its record can be trusted later."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Self

from frozencore.device import torch
from frozencore.tune.record_part import Count, RecordPart

STEPS_VERSION = 2
"""Part of a checkpoint's identity and of a record. It changes with the order of rows or the schedule, because a resumed
training must go on with those it began with, and a campaign compares runs of one kind."""
PACKAGES = ("frozencore", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy")


class Provenance(RecordPart):
    """Versions, source commit and machine of a run.

    Attributes:
        steps_version: Runs with another number train on rows in another order, or with another schedule.
    """

    versions: dict[str, str]
    python: str
    commit: str | None
    steps_version: Count
    platform: str
    device: str
    num_threads: Count

    @classmethod
    def here(cls, device: object = "auto") -> Self:
        """The provenance of a run in this process.

        Args:
            device: The device of the run, by torch or by name; ``auto`` is the first GPU, or the CPU.
        """
        return cls(
            versions=dict(_versions()),
            python=platform.python_version(),
            commit=source_commit(),
            steps_version=STEPS_VERSION,
            platform=platform.platform(),
            device=_hardware_name(str(device)),
            num_threads=torch.get_num_threads(),
        )


def _hardware_name(device: str) -> str:
    """The name of the GPU of this device; for other devices the processor's, with the instructions that torch uses."""
    with suppress(RuntimeError, AssertionError):  # there is no such device; a failed run has this as its reason
        place = torch.device("cuda" if device == "auto" else device)
        if place.type == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_name(place)
    return f"{_processor_name()} ({torch.backends.cpu.get_cpu_capability()})"


@cache
def _processor_name() -> str:
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named and named[0]:
            return named[0]
    return platform.processor() or platform.machine()


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


@cache  # a process keeps running the code it has loaded
def source_commit() -> str | None:
    """The git commit of the running source, marked ``-dirty`` if there are uncommitted changes; None outside of git."""
    folder = Path(__file__).parents[1]  # the package
    try:
        inside = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if inside and changes else commit


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
