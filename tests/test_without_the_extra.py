"""Without the packages of the extra ``frozencore[tune]`` the PEFT method works, and the command names the extra."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fixtures import ROOT, SOURCES
from frozencore.tune.pocket import pocket_model_path
from frozencore_command import NEEDED
from input_files import write_rows

EXTRA = ("datasets", "matplotlib", "pandas", "pyarrow", "pydantic", "rich", "scipy", "typer")
BLOCKED = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {EXTRA} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process where nothing of the extra can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", BLOCKED + program, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_adapter_is_calibrated_trained_by_the_trainer_saved_and_loaded(tmp_path: Path) -> None:
    rows = [{"prompt": f"Tom has {i} cats .", "completion": " two cats"} for i in range(8)]
    write_rows(tmp_path / "rows.jsonl", rows)
    example = ROOT / "examples/finetune.py"
    program = f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    options = ("--model", pocket_model_path(), "--data", tmp_path / "rows.jsonl", "--output", tmp_path, "--rank", "4")
    done = run(program, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pocket_model_path()), tmp_path / "adapter")
    assert any(value.any() for name, value in model.named_parameters() if "frozencore_R" in name)


@pytest.mark.parametrize("module", ["frozencore_command", "frozencore.__main__"])
def test_the_command_names_what_is_missing_and_how_to_install_it_in_one_line(module: str) -> None:
    done = run(f"import {module} as command; command.main()" if "__" not in module else f"import {module}", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("Install it: pip install 'frozencore[tune]'")
    assert all(name in line for name in ("datasets", "matplotlib", "typer"))


def test_the_command_looks_for_every_package_that_the_extra_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {Requirement(line).name for line in extras["tune"]}
    assert {"yaml" if name == "pyyaml" else name for name in named} - {"tokenizers"} == {*NEEDED}
