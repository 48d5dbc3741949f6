"""Fixtures of the tests of engines: one base, its adapters in every form, and one start of each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from frozencore import export_lora
from serving import ADAPTERS, VllmServer, write_adapter, write_base

MAX_RANK, SLOTS = 16, 3


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of native adapters by name; ``NAME-lora`` and ``NAME-bfloat16`` are their LoRA exports."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, options in ADAPTERS.items():
        write_adapter(base, folder / name, **options)
        export_lora(folder / name, folder / f"{name}-lora")
        export_lora(folder / name, folder / f"{name}-bfloat16", dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="session")
def vllm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    flags = ["--enable-lora", "--max-lora-rank", str(MAX_RANK), "--max-loras", str(SLOTS), "--max-cpu-loras", "64"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with VllmServer(base, log, "--max-model-len", "256", *flags) as server:
        yield server
