"""The README's Python runs as it stands, on the pocket model in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore.lab.pocket import POCKET_TASKS, pocket_model_path
from frozencore.lab.rows.batches import make_batches
from frozencore.lab.rows.prompts import PromptEncoder
from frozencore.lab.tasks.splits import split_task
from places import ROOT

README = ROOT / "README.md"
HUB_ID = "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_ten_lines_train_save_and_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert HUB_ID in code
    splits = split_task(POCKET_TASKS["pocket-sentiment"], num_train=16, num_evaluation=4)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(pocket_model_path()))
    rows = encoder.training_rows([encoder.render(example) for example in splits.train])
    batches = make_batches(rows, pad_id=encoder.pad_id, batch_size=8)
    single = [{key: value[0] for key, value in batch.items()} for batch in make_batches(rows, pad_id=0, batch_size=1)]
    same_length = [row for row in single if len(row["input_ids"]) == len(single[0]["input_ids"])]
    names = {"dataloader": batches, "rows": same_length}
    exec(compile(code.replace(HUB_ID, str(pocket_model_path())), "README.md", "exec"), names)

    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pocket_model_path()), "adapter")
    trained = names["model"].cpu().eval()  # Trainer takes it to a GPU where there is one
    assert (trained(**batches[0]).logits == reloaded(**batches[0]).logits).all()
    assert any(parameter.any() for parameter in trained.parameters() if parameter.requires_grad)
