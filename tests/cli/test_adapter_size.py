"""The size that the end of a run says, against the files of each form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from adapted import adapted
from frozencore import export_lora
from frozencore.cli.adapter_size import size_lines
from frozencore.files.adapter_folder import WEIGHTS_FILE
from tiny import tiny_qwen2

UNITS = {"KiB": 2**10, "MiB": 2**20}
HEADERS = 0.2  # share of a small file that names and shapes take


def sizes(line: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (KiB|MiB)", line)]


def test_a_cores_size_is_that_of_its_file_of_its_pack_and_of_its_lora(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = Path("run/adapter")
    adapted("fcca", trained=True, r=16).save_pretrained(str(adapter))
    line, way = size_lines(adapter)
    values = int(re.search(r"Size of ([\d,]+) trained values", line)[1].replace(",", ""))  # type: ignore[index]
    words = way.removeprefix("Smaller: frozencore ").split()
    assert command(*words)[0] == 0
    export_lora(adapter, "lora")
    files = [adapter / WEIGHTS_FILE, Path("shared/run") / WEIGHTS_FILE, Path("lora") / WEIGHTS_FILE]
    for said, file in zip(sizes(line), files, strict=True):
        assert said == pytest.approx(file.stat().st_size, rel=HEADERS)
    assert files[1].stat().st_size == pytest.approx(4 * values, rel=HEADERS)
    assert list(size_lines(Path("shared/run"))) == [
        f"Size: {files[1].stat().st_size / 2**10:.1f} KiB, cores alone on their basis."
    ]


def test_another_methods_size_is_that_of_its_file(tmp_path: Path) -> None:
    get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    (line,) = size_lines(tmp_path)
    assert line == f"Size: {(tmp_path / WEIGHTS_FILE).stat().st_size / 2**10:.1f} KiB."
