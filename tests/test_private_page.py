"""docs/private.md: its Python runs, and every promise on it names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from adapted import EXAMPLES, adapted
from places import ROOT
from tiny import batch_of

PAGE = (ROOT / "docs" / "private.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!promise|---)(.+) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), test


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
