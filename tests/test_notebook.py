"""The notebook runs from its first cell to its last, and says what it promises."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


def cells(kind: str) -> list[str]:
    held: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in held if cell["cell_type"] == kind]


def test_the_notebook_is_of_its_format_and_holds_no_outputs_of_another_day() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(cell["outputs"] or cell["execution_count"] for cell in notebook["cells"] if "outputs" in cell)
    for source in cells("code"):
        ast.parse(source)


def test_the_first_hour_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for i, source in enumerate(cells("code")):
        exec(compile(source, f"{NOTEBOOK.name}, cell {i}", "exec"), names)
    said = capsys.readouterr().out
    assert names["after"] < 0.5 * names["before"]
    assert "the same loss: True" in said
    assert "taken by vLLM" in said
    assert "further from it than rounding: False" in said
    assert (tmp_path / "first-hour" / "lora" / "adapter_model.safetensors").is_file()
