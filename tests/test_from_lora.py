"""The page "From LoRA to a frozen core": both sides of its diff run, and its table names tests that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from transformers import AutoModelForCausalLM

from frozencore.tune.pocket import pocket_model_path
from works_with import CLAIMS, PAGE, ROOT, named_on_page

HUB_ID = "Qwen/Qwen2.5-0.5B-Instruct"


def scripts(sign: str) -> list[str]:
    """The scripts of the page before (``-``) or after (``+``) the change: training, and loading."""
    diffs = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return ["\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)) for diff in diffs]


def run(code: str, *, steps: int = 4) -> dict[str, Any]:
    """Run a script on the pocket model, in the working directory, for a few steps and without reports."""
    assert HUB_ID in code
    code = code.replace(HUB_ID, str(pocket_model_path()))
    code = code.replace('"out", ', f'"out", max_steps={steps}, use_cpu=True, bf16=False, report_to="none", ')
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    return names


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"tom has {i} apples and", "completion": f" tom has {i % 3} ."}) for i in range(16)]
    Path("train.jsonl").write_text("\n".join(lines))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(("sign", "trained"), [("-", "lora_"), ("+", "frozencore_R")])
def test_the_scripts_before_and_after_train_save_and_load(sign: str, trained: str) -> None:
    train, load = scripts(sign)
    model = run(train)["model"].eval()
    assert all(trained in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    batch = {"input_ids": torch.arange(1, 13)[None]}
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    expected = model(**batch).logits
    assert torch.equal(run(load)["model"](**batch).logits, expected)
    assert not torch.equal(base(**batch).logits, expected)


@pytest.mark.usefixtures("rows")
def test_without_the_import_loading_ends_in_the_error_that_the_page_names(monkeypatch: pytest.MonkeyPatch) -> None:
    run(scripts("+")[0], steps=1)
    for table in (PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING):
        monkeypatch.delitem(table, "FROZENCORE")  # all that the import enters there
    with pytest.raises(KeyError) as caught:
        run(scripts("-")[1])
    assert f"KeyError: {caught.value}" == "KeyError: 'FROZENCORE'"
    assert "KeyError: 'FROZENCORE'" in PAGE.read_text()


def test_the_bases_of_the_page_go_from_one_model_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adapted import adapted
    from frozencore import get_bases

    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("## Options")[0], flags=re.DOTALL)
    names: dict[str, PeftModel] = {"model": adapted("fcca"), "other_model": adapted("fcca", calibrated=False)}
    exec(code, names)
    one, other = get_bases(names["model"]), get_bases(names["other_model"])
    assert all(torch.equal(basis, other[key]) for key, basis in one.items())


def test_the_table_of_what_works_names_tests_that_exist_and_are_not_skipped() -> None:
    assert named_on_page() == CLAIMS
    for test in CLAIMS.values():
        path, name = test.split("::")
        functions = {f.name: f for f in ast.parse((ROOT / path).read_text()).body if isinstance(f, ast.FunctionDef)}
        assert name in functions, test
        marks = " ".join(ast.unparse(decorator) for decorator in functions[name].decorator_list)
        assert "skip" not in marks, test
        assert "xfail" not in marks, test


def test_every_row_of_the_table_works() -> None:
    table = PAGE.read_text().split("<!-- works:begin -->")[1]
    assert "| NO |" not in table
