"""docs/in-python.md runs from its first line to its last, and every public name has an example somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch import nn

import frozencore
from adapted import BATCHES
from frozencore.constructors import CONSTRUCTORS
from places import ROOT
from tiny import tiny_qwen2

PAGE = ROOT / "docs" / "in-python.md"
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # whose code is run by tests of their own


def code_of(page: Path) -> list[str]:
    return re.findall(r"```(?:python|diff)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def another_base() -> nn.Module:
    model = tiny_qwen2()
    nn.init.normal_(model.get_parameter("model.layers.0.self_attn.q_proj.weight"))
    return model


@pytest.mark.usefixtures("as_a_user")
def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_qwen2().save_pretrained("base")
    names = {"base": tiny_qwen2, "another_base": another_base, "dataloader": BATCHES}
    try:
        for block in code_of(PAGE):
            exec(compile(block, "in-python.md", "exec"), names)
    finally:
        CONSTRUCTORS.pop("top_inputs", None)
    said = capsys.readouterr().out
    assert "made on another base model" in said
    assert names["fcca"].P.shape == (32, 4)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "adapter",
        "lora",
        "merged",
        "both",
        "basis-model",
        "anna-tenant",
    }


def test_every_public_name_has_one_place_in_the_reference() -> None:
    tree = ast.parse((ROOT / "docs" / "pages.py").read_text(encoding="utf-8"))
    (groups,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "BY_TASK")  # type: ignore[attr-defined]
    names = [name for own in ast.literal_eval(groups).values() for name in own]
    assert sorted(names) == sorted(frozencore.__all__)


def test_every_public_name_stands_in_the_code_of_a_guide() -> None:
    code = "\n".join(block for page in GUIDES for block in code_of(page))
    assert [name for name in frozencore.__all__ if not re.search(rf"\b{name}\b", code)] == []
