"""The six lines on the first page of docs/ train, and print what the page shows."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from places import ROOT
from tiny import tiny_qwen2

PAGE = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_lines_of_the_first_page_train_the_cores(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    assert len([line for line in CODE.splitlines() if line]) == 6
    tokens = torch.arange(2, 18).view(2, 8)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    names = {"base": tiny_qwen2(), "dataloader": [{"input_ids": tokens, "labels": tokens}], "rows": rows}
    here = names | {"Trainer": Trainer, "arguments": arguments}
    exec(compile(CODE, "index.md", "exec"), here)
    trained = [core for core in here["model"].parameters() if core.requires_grad]
    assert all(core.shape == (16, 16) for core in trained)
    assert any(core.any() for core in trained)
    assert f"trainable params: {256 * len(trained):,} || " in capsys.readouterr().out


def test_the_counts_of_the_first_page_are_those_of_smollm2() -> None:
    num_layers = 30
    shapes = LlamaConfig(
        hidden_size=576, num_hidden_layers=num_layers, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        num_weights = LlamaForCausalLM(shapes).num_parameters()
    num_trained = num_layers * 4 * 16**2
    share = 100 * num_trained / (num_weights + num_trained)
    counts = (
        f"trainable params: {num_trained:,} || all params: {num_weights + num_trained:,} || trainable%: {share:.4f}"
    )
    assert counts in PAGE


def test_the_first_page_has_an_install_line_and_one_figure_and_guides_stand_in_three_groups() -> None:
    assert PAGE.index("pip install") < PAGE.index("```python") < PAGE.index("![")
    (figure,) = re.findall(r"!\[.+\]\((.+)\)", PAGE)
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (logo,) = re.findall(r"^  logo: (.+)$", site, flags=re.MULTILINE)
    assert all((ROOT / "docs" / file).is_file() for file in (figure, logo))
    groups = re.findall(r"^  - ([\w ]+):$", site.partition("\nnav:\n")[2], flags=re.MULTILINE)
    assert groups[:3] == ["Start", "Many tenants", "Going further"]
