"""The notebook runs from its first cell to its last, and says what it promises and what its outputs say.

jupyter nbconvert --to notebook --execute --inplace examples/first_hour.ipynb    # writes the outputs again
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def code_cells() -> list[dict[str, Any]]:
    held: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in held if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """The stored output of a cell."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def test_the_notebook_is_of_its_format_and_was_run_from_top_to_bottom() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert [cell["execution_count"] for cell in code_cells()] == [*range(1, len(code_cells()) + 1)]
    for cell in code_cells():
        ast.parse("".join(cell["source"]))
        assert all((output["output_type"], output["name"]) == ("stream", "stdout") for output in cell["outputs"])


def test_the_first_hour_runs_in_order_and_prints_its_stored_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are equal; numbers of the method are within a tenth, and seconds are whatever they are."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    said = ""
    for i, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {i}", "exec"), names)
        now, stored = capsys.readouterr().out, printed(cell)
        assert NUMBER.sub("#", now) == NUMBER.sub("#", stored)
        for line, before in zip(now.splitlines(), stored.splitlines(), strict=True):
            if "train_runtime" not in line:
                numbers = [[float(one) for one in NUMBER.findall(text)] for text in (line, before)]
                assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.011)
        said += now
    assert names["after"] < 0.5 * names["before"]
    assert all(int(share) <= 100 for share in re.findall(r"(\d+)%", said))
    assert "the same loss: True" in said
    assert "taken by vLLM" in said
    assert "further from it than rounding: False" in said
    assert (tmp_path / "first-hour" / "lora" / "adapter_model.safetensors").is_file()
