"""README and docs: commands and code run, generated blocks are those of the results, and what a page names is there."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import iter_modules
from random import Random
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments, default_data_collator
from typer.main import get_command

import forked
import frozencore
from fixtures import LAB, PAPER_TABLES, ROOT
from frozencore import CONSTRUCTORS, FrozenCoreConfig
from frozencore.cli.app import program
from frozencore.cli.verbs import all_verbs
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore_lab.tasks.paper import PAPER_TASKS
from input_files import tiny_model, write_gguf, write_hub_folder

PAGES = [*(ROOT / place / "README.md" for place in (".", "lab", "examples")), *sorted((ROOT / "docs").glob("*.md"))]
HUB_ID, POCKET = "Qwen/Qwen2.5-0.5B-Instruct", str(pocket_model_path())
STARTED = re.compile(r"^(?:frozencore|(?:torchrun|accelerate launch) .*?(?:-m frozencore|examples/\S+)) ")
AS_HERE = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of each block of a page."""
    return [(language, dedent(block)) for _, language, block in FENCE.findall(page.read_text(encoding="utf-8"))]


def commands_in(language: str, block: str) -> list[str]:
    """The command lines of a block without comments."""
    if language not in ("", "bash"):
        return []
    joined = re.sub(r"\\\n\s*", "", block)
    lines = [line.split(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if STARTED.match(line)]


def command_lines(page: Path) -> list[str]:
    return [line for block in blocks(page) for line in commands_in(*block)]


def in_sentences(page: Path) -> list[str]:
    """The commands between backquotes in prose; they may leave out required options."""
    return re.findall(r"`(frozencore [^`\n]*)`", FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def verbs() -> Any:
    return get_command(program([verb.name for verb in all_verbs()]))


def flags_of(line: str, verbs: Any) -> tuple[set[str], set[str]]:
    """Those that it has, and those that it could have."""
    words = shlex.split(line[line.index("frozencore") :].split(" > ")[0])[1:]
    command = verbs
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    return {word.partition("=")[0] for word in words if word.startswith("--")}, known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_verbs_and_flags_of_the_pages_are_the_programs(page: Path, verbs: Any) -> None:
    for line in [*(line for line in command_lines(page) if "frozencore" in line), *in_sentences(page)]:
        given, known = flags_of(line, verbs)
        assert given <= known, line


RUN_ELSEWHERE = {
    r"campaign rehearse": "test_rehearsal.py",  # it takes minutes
    r"campaign run lab/campaigns/demo.yaml": "cli/test_demo.py",  # it takes minutes
    r"--ray ": "campaign/test_ray_pool.py",
    r"\$(spec|folder)": "cli/test_campaign.py",
}
FEW = {"--num-train": "64", "--num-evaluation": "8", "--epochs": "1", "--calibration-size": "16"}
SAID_AS = {
    r"(?<=--model )(Qwen/Qwen2.5-0.5B-Instruct|tiny1m|smollm2)": "pocket",
    r"(?:(?<=--model )|(?<=--base ))(DIR|MODEL|\$MODEL|\$BASE)(?= )": str(pocket_model_path()),
    r"(?<=--data-root )(DIR|DATA|\.\./shared/data)": "DATA",
    r"(?<=--tenants )ROWS": "rows",
    r"(?<=--adapter )LORA": "runs/mine/adapter",
}


def lay_out(place: Path) -> None:
    """The inputs that the pages assume: rows, data sets of the hub, finished campaigns."""
    drawn = Random(0)
    sums = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(60)]
    rows = [json.dumps({"prompt": f"How many is {a} and {b}?", "completion": f" {a + b}"}) + "\n" for a, b in sums]
    (place / "rows").mkdir()
    for name in ("everybody", "train", "rows", "public", "anna", "ben", "dora", "rows/anna", "rows/ben"):
        (place / f"{name}.jsonl").write_text("".join(rows))
    pairs = [json.dumps({"prompt": f"{a} and {b}?", "chosen": f" {a + b}", "rejected": " 99"}) + "\n" for a, b in sums]
    (place / "pairs.jsonl").write_text("".join(pairs))
    for name in PAPER_TASKS:
        write_hub_folder(place / "DATA", name, num_train=80, num_evaluation=80, num_validation=80)
    for name in ("anna", "ben"):
        lora = get_peft_model(pocket(), LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
        lora.save_pretrained(str(place / "loras" / name))
    for name in ("lab", "examples"):
        (place / name).symlink_to(ROOT / name)
    results = LAB / "results" / "smollm2"
    shutil.copytree(results, place / "runs" / "demo")
    shutil.copy(PAPER_TABLES / "paper_q3.csv", place / "means.csv")
    write_gguf(tiny_model("llama"), place / "SmolLM2-135M-Instruct.Q4_1.gguf")


def run_command(line: str, verbs: Any, command: Callable[..., tuple[int, str, str]]) -> None:
    """Run a line of a page on the pocket model; a task gets few rows."""
    said = line
    for written, stands_for in SAID_AS.items():
        said = re.sub(written, stands_for, said)
    if "frozencore" in line:
        if "--task" in said:  # the data sets that lay_out makes are small
            _, known = flags_of(line, verbs)
            said += "".join(f" {flag} {few}" for flag, few in FEW.items() if flag in known and flag not in said)
        if "--task" in said and "--task pocket" not in said and "--data-root" not in said:
            said += " --data-root DATA"
    if line.startswith("frozencore"):
        status, _, err = command(*shlex.split(said)[1:])
    else:
        done = subprocess.run(shlex.split(said), capture_output=True, text=True, env=AS_HERE)
        status, err = done.returncode, done.stderr[-3000:]
    assert status == 0, (line, err)


def pocket(*, other: bool = False) -> nn.Module:
    """The pocket model, or another one of its shapes."""
    model, _ = load_model(POCKET, dtype="float32", device="cpu")
    if other:
        nn.init.normal_(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), std=0.02)
    return model


def given_to(page: str) -> dict[str, Any]:
    """The names that the code of a page leaves to its reader, made anew for each block."""
    tokenizer = load_model(POCKET, device="cpu")[1]
    encoded = tokenizer([f"How many is {i} and {i % 3}?" for i in range(8)], return_tensors="pt", padding=True)
    rows = [{"input_ids": ids, "labels": ids} for ids in encoded["input_ids"]]
    batches = [default_data_collator(rows[i : i + 4]) for i in (0, 4)]
    config = FrozenCoreConfig(r=16, constructor="random", task_type="CAUSAL_LM")
    common = {
        "torch": torch, "cross_entropy": nn.functional.cross_entropy, "Trainer": Trainer, "tokenizer": tokenizer,
        "BASE": POCKET, "rows": rows, "dataloader": batches, "collator": default_data_collator,
        "batch": {name: encoded[name][:3] for name in ("input_ids", "attention_mask")},
        "arguments": TrainingArguments(
            "trained", max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True, save_strategy="no",
            remove_unused_columns=False,
        ),
        "embed": lambda out: out.logits[:, -1], "pairs": [dict.fromkeys(("anchor", "positive"), batches[0])],
        "rows_of_clients": [batches, batches[:1]], "new_base": pocket,
        "rows_of_tenants": {
            name: [{"prompt": f"{name} and {i}", "completion": f" {i}"} for i in range(8)] for name in ("anna", "ben")
        },
    }  # fmt: skip
    if page == "docs/python":  # it makes a model where it needs one
        pocket().save_pretrained("base")
        return common | {"base": pocket, "another_base": lambda: pocket(other=True)}
    models = {name: get_peft_model(pocket(), config) for name in ("model", "other_model")}
    return common | {"base": pocket(), "another_base": pocket(), "trainer": SimpleNamespace(**models), **models}


def run_code(code: str, page: str, names: dict[str, Any], given: dict[str, Any]) -> None:
    """Run a block. Names that earlier blocks have set stay; the others are given anew, and ``given`` holds them."""
    mine = {name: value for name, value in names.items() if name not in given or given[name] is not value}
    given |= given_to(page)
    names |= given | mine
    for written in (f'"{HUB_ID}"', '"DIR"', '"../shared/models/tiny1m"'):
        code = code.replace(written, repr(POCKET))
    few = 'max_steps=2, use_cpu=True, bf16=False, report_to="none", '
    code = re.sub(r'(?<=TConfig\(|OConfig\()("\w+")(, )?', rf"\1, {few}", code)
    exec(compile(code, f"{page}.md", "exec"), names)


def sides(diff: str) -> list[str]:
    """A script before and after a change."""
    return ["\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)) for sign in "-+"]


IN_ONNX = "docs/devices"  # a page whose commands need the extra
IN_AN_ENGINE = "LLM("  # code that tests/engines/test_vllm_memory.py runs in vLLM
ALONE = ("docs/from-lora", "docs/python", "examples/README")  # pages of code, without long commands


@pytest.fixture
def _same_constructors() -> Iterator[None]:
    """A page that registers a constructor does not change those of later tests."""
    before = dict(CONSTRUCTORS)
    yield
    CONSTRUCTORS.clear()
    CONSTRUCTORS.update(before)


@pytest.mark.usefixtures("as_a_user", "_same_constructors")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[] if name_of(page) in ALONE else [pytest.mark.slow])
        for page in PAGES
        if blocks(page)
    ],
)
def test_commands_and_code_of_a_page_do_their_work_one_after_the_other(  # type: ignore[no-untyped-def]
    page: Path, verbs: Any, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name_of(page) == IN_ONNX:
        pytest.importorskip("onnxruntime_genai", reason="pip install 'frozencore[onnx]'")
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("How many is 1 and 2?\n"))  # for `chat`
    names: dict[str, Any] = {}
    given: dict[str, Any] = {}
    diffs = [sides(block) for language, block in blocks(page) if language == "diff"]
    for side in zip(*diffs, strict=True):
        for script in side:
            run_code(script, name_of(page), {}, {})
    for language, block in blocks(page):
        for line in commands_in(language, block):
            if not any(re.search(said, line) for said in RUN_ELSEWHERE):
                run_command(line, verbs, command)
        if language == "python" and IN_AN_ENGINE not in block:
            run_code(block, name_of(page), names, given)


@pytest.mark.usefixtures("as_a_user")
def test_the_cells_of_the_notebook_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_hour.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"first_hour.ipynb, cell {number}", "exec"), names)


def test_the_first_python_of_the_readme_trains_saves_and_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    code = next(block for language, block in blocks(ROOT / "README.md") if language == "python")
    names: dict[str, Any] = {}  # the reader must write nothing more, but without a GPU what the comment says
    code = code.replace(HUB_ID, POCKET).replace('SFTConfig("out")', 'SFTConfig("out", use_cpu=True, bf16=False)')
    exec(compile(code, "README.md", "exec"), names)
    trainer = names["trainer"]
    reloaded, trained = PeftModel.from_pretrained(pocket(), "adapter").eval(), trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    found, expected = (model(batch["input_ids"], batch["attention_mask"]).logits for model in (reloaded, trained))
    torch.testing.assert_close(found, expected)
    assert any(parameter.any() for parameter in trained.parameters() if parameter.requires_grad)
    ends = batch["input_ids"] == trainer.processing_class.eos_token_id
    assert (batch["labels"][ends & batch["attention_mask"].bool()] != -100).all()  # stopping is learned
    assert (batch["labels"] != -100).any(dim=1).all()


def test_generated_blocks_are_those_of_the_committed_results(tmp_path: Path) -> None:
    done = forked.ended(forked.script(ROOT / "benchmarks" / "tables.py", "--check"), tmp_path)
    assert done.status == 0, done.out + done.err[-2000:]


def test_every_public_name_has_one_place_in_the_reference() -> None:
    tree = ast.parse((ROOT / "docs" / "pages.py").read_text(encoding="utf-8"))
    (groups,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "BY_TASK")  # type: ignore[attr-defined]
    names = [name for own in ast.literal_eval(groups).values() for name in own]
    assert sorted(names) == sorted(frozencore.__all__)


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / name for name in ("SECURITY.md", "CONTRIBUTING.md", "tests/README.md"))], ids=name_of
)
def test_files_and_functions_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"(?<![\w/])(?:src|lab|tests|benchmarks|docs)/[\w./-]+\.(?:py|md|json|jsonl|yaml)\b", text)
    assert not [name for name in files if not (ROOT / name).exists() and not (LAB / name).exists()]
    for name in re.findall(r"`(frozencore(?:\.\w+)+)`", text):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_citation_names_the_package_its_version_and_its_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what its format asks for
    assert [citation[name] for name in ("title", "version", "license")] == [
        project["name"], project["version"], project["license"],
    ]  # fmt: skip


ROOMS_WITH_EXAMPLES = ("frozencore.maths", "frozencore.constructors", "frozencore.calibration")
MODULES = [
    name
    for room in ROOMS_WITH_EXAMPLES
    for name in (room, *(f"{room}.{module.name}" for module in iter_modules(importlib.import_module(room).__path__)))
]


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert sum(len(test.examples) > 0 for name in MODULES for test in finder.find(importlib.import_module(name))) > 25


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_show_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch}).failed == 0
