"""Every command line of README and docs: the program takes its words, and (slow) it does its work."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from datasets import Dataset
from typer.main import get_command

from frozencore.cli.app import program
from frozencore.cli.verbs import all_verbs
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks.hub_rows import write_hub_folders
from gguf_files import tiny_model, write_gguf
from places import LAB, PAPER_TABLES, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_LANGUAGES = {"python", "diff", "yaml", "json"}
STARTED = re.compile(r"^(?:frozencore|(?:torchrun|accelerate launch) .*?(?:-m frozencore|examples/\S+)) ")
MADE_BEFORE = re.compile(r"^make smollm2 && \.venv/bin/(?=frozencore )")
AS_HERE = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def command_lines(page: Path) -> list[str]:
    """Those of its blocks, in their order, without comments."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in OTHER_LANGUAGES:
            joined = re.sub(r"\\\n\s*", "", block)
            lines = [MADE_BEFORE.sub("", line.split(" #")[0].strip()) for line in joined.splitlines()]
            found += [line for line in lines if STARTED.match(line)]
    return found


def in_sentences(page: Path) -> list[str]:
    """Those between backquotes, which may leave out what must be said."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_verbs_and_flags_of_the_pages_are_the_programs(page: Path, verbs: Any) -> None:
    for line in [*(line for line in command_lines(page) if "frozencore" in line), *in_sentences(page)]:
        given, known = flags_of(line, verbs)
        assert given <= known, line


RUN_ELSEWHERE = {
    r"campaign (plan|rehearse) lab/campaigns/paper-3b.yaml$": "rehearsal/test_campaigns.py",
    r"campaign run lab/campaigns/pocket.yaml": "rehearsal/test_campaigns.py",  # on a tiny model; itself it takes hours
    r"--ray ": "campaign/test_ray_pool.py",
    r"\$(spec|folder)": "cli/test_campaign.py",
}
FEW = {"--num-train": "64", "--num-evaluation": "8", "--epochs": "1", "--calibration-size": "16"}
SAID_AS = {
    r"(?<=--model )(Qwen/Qwen2.5-0.5B-Instruct|tiny1m|smollm2)": "pocket",
    r"(?:(?<=--model )|(?<=--base ))(DIR|MODEL)": str(pocket_model_path()),
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
    for name in ("everybody", "train", "rows", "public", "private", "anna", "ben", "dora", "rows/anna", "rows/ben"):
        (place / f"{name}.jsonl").write_text("".join(rows))
    preferred = [{"prompt": f"How many is {a} and {b}?", "chosen": f" {a + b}", "rejected": " many"} for a, b in sums]
    (place / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in preferred))
    write_hub_folders(
        place / "DATA",
        {
            source: {
                split: Dataset.from_list([source.made_up(drawn, number) for number in range(80)])  # type: ignore[attr-defined, misc]
                for split in source.num_rows  # type: ignore[attr-defined]
            }
            for source in dict.fromkeys(task.source for task in PAPER_TASKS.values())
        },
    )
    for name in ("lab", "examples"):
        (place / name).symlink_to(ROOT / name)
    results = LAB / "results" / "frontier"
    campaign = json.loads((results / "campaign.json").read_text())
    for study in campaign["studies"].values():
        study["report"]["mean"] = True  # a report over several campaigns compares means
    for name in ("pocket", "a", "b", "c"):
        (place / "runs" / name).mkdir(parents=True)
        shutil.copy(results / "records.jsonl", place / "runs" / name)
        (place / "runs" / name / "campaign.json").write_text(json.dumps(campaign | {"name": name}))
    shutil.copy(PAPER_TABLES / "paper_q3.csv", place / "means.csv")
    write_gguf(tiny_model("llama"), place / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if command_lines(page) and page.stem != "serving"],  # engines/test_serving_page.py
    ids=lambda page: page.stem,
)
def test_the_command_lines_of_a_page_do_their_work_one_after_the_other(  # type: ignore[no-untyped-def]
    page: Path, verbs: Any, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("How many is 1 and 2?\n"))  # for `chat`
    for line in command_lines(page):
        elsewhere = [test for said, test in RUN_ELSEWHERE.items() if re.search(said, line)]
        if elsewhere:
            assert (LAB / "tests" / elsewhere[0]).exists()
            continue
        said = line
        for written, stands_for in SAID_AS.items():
            said = re.sub(written, stands_for, said)
        if "frozencore" in line:
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
