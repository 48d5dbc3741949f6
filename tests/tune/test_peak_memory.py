"""The largest memory of each phase of a run: what must take more does, and no phase answers for another."""

from __future__ import annotations

import gc
import mmap
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frozencore.tune import cost as peak_memory
from frozencore.tune.config import make_config
from frozencore.tune.cost import PeakMemory, process_peak_bytes
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import PhasePeaks
from frozencore.tune.run import execute

MIB = 2**20


@pytest.fixture
def memory() -> PeakMemory:
    gc.collect()  # garbage of other tests, collected within a phase, would be counted as a shrinking of it
    found = PeakMemory(nn.Linear(2, 2))
    if not found._forgets:
        pytest.skip("this system counts over the whole life of a process")
    return found


def held(num_mib: int) -> mmap.mmap:
    """Memory of the system's own, whatever the process has freed before and would use again."""
    pages = mmap.mmap(-1, num_mib * MIB)
    for start in range(0, len(pages), mmap.PAGESIZE):
        pages[start] = 1
    return pages


def beyond(peaks: PhasePeaks | None) -> tuple[float, ...]:
    """MiB of each phase above what was held."""
    assert peaks is not None
    phases = (peaks.calibration_bytes, peaks.training_bytes, peaks.scoring_bytes)
    return tuple((peak - peaks.held_bytes) / MIB for peak in phases)


def test_each_phase_has_its_own_peak_also_after_a_higher_one(memory: PeakMemory) -> None:
    with memory.phase("calibration"):
        held(128).close()
    with memory.phase("training"):
        kept = held(16)
    with memory.phase("scoring"):
        held(48).close()
    assert beyond(memory.peaks) == pytest.approx((128, 16, 16 + 48), abs=8)
    assert memory.peaks is not None
    assert memory.largest == memory.peaks.calibration_bytes
    kept.close()


def test_what_a_phase_has_freed_is_not_held_against_the_next(memory: PeakMemory) -> None:
    with memory.phase("calibration"):
        blocks = [torch.ones(8 * 1024) for _ in range(2000)]  # 32 KiB each: of the C library's own store
        last = blocks[-1]  # above the others: they are a hole in it
        del blocks
    with memory.phase("training"):
        pass
    with memory.phase("scoring"):
        pass
    calibration, training, _ = beyond(memory.peaks)
    assert calibration - training > 50
    assert training < 16
    del last


def test_a_phase_that_failed_leaves_no_peaks(memory: PeakMemory) -> None:
    with pytest.raises(ValueError, match="in the middle"), memory.phase("calibration"):
        raise ValueError("in the middle")
    for name in ("training", "scoring"):
        with memory.phase(name):  # type: ignore[arg-type]
            pass
    assert memory.peaks is None
    assert memory.largest > 0


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The peaks of three GPUs, which reset to 1."""
    most = {0: 99, 1: 5, 2: 7}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: most.update({device: 1}))
    return most


def test_with_gpus_the_fullest_of_those_that_hold_the_model_counts(on_gpus: dict[int, int]) -> None:
    parameters = [SimpleNamespace(device=torch.device("cuda", i)) for i in (2, 1)]
    model: Any = SimpleNamespace(parameters=lambda: iter(parameters))
    memory = PeakMemory(model)
    for name, most in (("calibration", {1: 30, 2: 20}), ("training", {1: 10, 2: 40}), ("scoring", {})):
        with memory.phase(name):  # type: ignore[arg-type]
            on_gpus.update(most)
    assert memory.peaks == PhasePeaks(
        measured="device", held_bytes=1, calibration_bytes=30, training_bytes=40, scoring_bytes=1
    )
    assert memory.largest == 40


def test_where_peaks_cannot_be_forgotten_there_is_one_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peak_memory, "CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    memory = PeakMemory(nn.Linear(2, 2))
    for name in ("calibration", "training", "scoring"):
        with memory.phase(name):  # type: ignore[arg-type]
            pass
    assert memory.peaks is None
    assert memory.largest == pytest.approx(process_peak_bytes(), abs=MIB)


@pytest.mark.parametrize(
    ("status", "platform", "unit"),
    [(None, "linux", 1024), (None, "darwin", 1), ("VmSize:\t  300 kB\nVmRSS:\t  200 kB\n", "linux", 1024)],
)
def test_where_status_has_no_peak_it_is_the_systems_own_count_in_its_unit(
    status: str | None, platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "status")
    if status is not None:
        peak_memory.STATUS.write_text(status)
    monkeypatch.setattr(sys, "platform", platform)
    assert process_peak_bytes() == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_methods_and_phases_of_real_runs_differ_as_they_must(memory: PeakMemory, tmp_path: Path) -> None:
    """Calibrating FCCA runs the model backwards and sums G; a random basis needs neither. Training runs it for both."""
    found = {}
    for method in ("fcca", "random"):
        config = make_config(
            model=str(pocket_model_path()), task="pocket-sentiment", method=method, batch_size=8, accumulation=1,
            epochs=1, num_train=8, num_evaluation=8, calibration_size=8, device="cpu",
        )  # fmt: skip
        record = execute(config, tmp_path / method, lambda *_: None)
        assert record.resources is not None
        found[method] = beyond(record.resources.peaks)
        assert record.peak_memory_bytes == record.resources.peak_memory_bytes
    (fcca, _, _), (random, training, _) = found["fcca"], found["random"]
    assert fcca > random + 4
    assert training > random + 4
