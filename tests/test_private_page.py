"""docs/private.md: its Python and the README's lines run, and every promise on it names a test that exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from adapted import EXAMPLES, adapted
from places import ROOT, smollm2_or_skip
from tiny import batch_of

PAGE = (ROOT / "docs" / "private.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_exist() -> None:
    promised = PAGE.split("## What is promised")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!promise|---)(.+) \|$", promised, flags=re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), test


@pytest.mark.parametrize("model", ["pocket", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_the_readmes_lines_train_privately(  # type: ignore[no-untyped-def]
    model: str, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    if model == "smollm2":
        smollm2_or_skip()
    monkeypatch.chdir(tmp_path)
    for name, first in (("public", 0), ("private", 100)):
        sums = ((number, number + 2) for number in range(first, first + 64))
        rows = [{"prompt": f"How many is {a} and {b}?", "completion": f" {a + b}"} for a, b in sums]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (lines,) = re.findall(r"```\n((?:frozencore .*\n)+)```", readme.split("## Private training")[1].split("\n## ")[0])
    assert lines.count("--model smollm2") == 2
    for line in lines.replace("smollm2", model).splitlines():
        status, out, err = command(*line.split()[1:])
        assert (status, err) == (0, "")
    assert re.search(r"epsilon [78]\.\d", out), out
    assert Path("private", "adapter", "adapter_config.json").is_file()


def test_the_python_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opacus")
    monkeypatch.chdir(tmp_path)
    from transformers import Trainer

    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, report_to="none", disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False, num_train_epochs=2, save_strategy="no",
    )  # fmt: skip
    names = {"Trainer": Trainer, "model": adapted(), "arguments": arguments, "rows": EXAMPLES, "collator": batch_of}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "private.md", "exec"), names)
    assert 7.9 < float(capsys.readouterr().out.split()[-1]) <= 8
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
