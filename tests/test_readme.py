"""The README's Python runs as it stands, on the pocket model in place of the hub's."""

from __future__ import annotations

import io
import json
import random
import re
from operator import itemgetter
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from rich.console import Console
from scipy.stats import ttest_rel
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore import CoreBank, FrozenCoreConfig
from frozencore.cli.run_summary import run_summary
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.record import TunedRecord, read_record
from places import LAB, ROOT

README = ROOT / "README.md"
HUB_ID = "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_ten_lines_train_save_and_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    code, _ = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert code.count(HUB_ID) == 1
    names: dict[str, Any] = {}  # nothing that the reader must write
    exec(compile(code.replace(HUB_ID, str(pocket_model_path())), "README.md", "exec"), names)

    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pocket_model_path()), "adapter")
    trained = names["model"].cpu().eval()  # Trainer takes it to a GPU where there is one
    prompts = names["tokenizer"](names["rows"]["prompt"][:2], return_tensors="pt")
    assert (trained(**prompts).logits == reloaded(**prompts).logits).all()
    assert any(parameter.any() for parameter in trained.parameters() if parameter.requires_grad)


def blocks_of(heading: str) -> list[str]:
    """The blocks without a language below a heading."""
    page = README.read_text(encoding="utf-8")
    section = page[page.index(f"\n## {heading}\n") :].split("\n## ")[1]
    return re.findall(r"```\n(.*?)```", section, flags=re.DOTALL)


def test_the_first_command_prints_what_the_readme_shows(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line after line, others between them left out; numbers may differ by a twentieth."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first, shown, *_ = blocks_of("Install")
    (line,) = re.findall(r"^frozencore (.*?) +#", first, flags=re.MULTILINE)
    status, out, err = command(*line.split())
    assert (status, err) == (0, "")
    printed = iter(out.splitlines())
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    for wanted in shown.splitlines():
        same = number.sub("#", wanted).split()
        found = next(one for one in printed if number.sub("#", one).split() == same)
        pairs = [[float(one.replace(",", "")) for one in number.findall(text)] for text in (found, wanted)]
        assert pairs[0] == pytest.approx(pairs[1], rel=0.05), wanted


def test_the_command_on_the_real_model_is_the_recorded_one_and_printed_what_the_readme_shows() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "tune-smollm2.json").read_text(encoding="utf-8"))
    *_, line, shown = blocks_of("Install")
    assert found["command"] == line.strip()
    record = read_record(json.dumps(found["record"]))
    assert isinstance(record, TunedRecord)
    console = Console(width=160, file=io.StringIO())
    console.print(run_summary(record))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()
    asked = record.config
    assert (asked.model, asked.task, asked.num_train) == ("smollm2", "sst2", 640)
    assert found["wall_s"] > record.total_s


@pytest.mark.parametrize("num_tenants", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_one_basis_and_32_tenants_in_ten_lines(  # type: ignore[no-untyped-def]
    num_tenants: int, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"```\n(frozencore calibrate .* --tenants (?:.*\n)+?)```", README.read_text())
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[1]
    drawn = random.Random(0)
    names = ["anna", *(f"tenant-{i}" for i in range(num_tenants - 1))]
    Path("rows").mkdir()
    for more, name in enumerate([*names, "dora"]):
        sums = ((drawn.randrange(30), drawn.randrange(30)) for _ in range(4))
        rows = [{"prompt": f"How many is {a} and {b}?", "completion": f" {a + b + more}"} for a, b in sums]
        place = Path() if name == "dora" else Path("rows")
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for line in lines.splitlines():
        status, _, err = command(*line.replace("--model DIR", f"--model {pocket_model_path()}").split()[1:])
        assert status == 0, err
    values = 16 * 16 * 16
    folders = {**{name: Path("tenants", name, "adapter") for name in names}, "dora": Path("dora", "adapter")}
    for folder in folders.values():
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 4 * values + 8192
    (exports,) = re.findall(r"```\n(frozencore export .*basis-model.*\nfrozencore export .*\n)", README.read_text())
    for line in exports.splitlines():
        status, _, err = command(*line.split()[1:])
        assert status == 0, err
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "left"
    batch = tokenizer(["How many is 1 and 2?"] * 3, return_tensors="pt", padding=True)
    here = {
        "AutoModelForCausalLM": AutoModelForCausalLM, "get_peft_model": get_peft_model, "Path": Path, "batch": batch,
        "FrozenCoreConfig": FrozenCoreConfig, "CoreBank": CoreBank,
    }  # fmt: skip
    exec(compile(code.replace('"DIR"', repr(str(pocket_model_path()))), "README.md", "exec"), here)
    assert set(here["bank"]) == set(folders)
    for row, name in enumerate(("anna", "dora", None)):
        alone = AutoModelForCausalLM.from_pretrained(pocket_model_path())
        if name is not None:
            alone = PeftModel.from_pretrained(alone, str(folders[name]))
        with torch.no_grad():
            tokens = alone.eval().generate(**{key: X[row : row + 1] for key, X in batch.items()}, max_new_tokens=8)
        assert here["tokens"][row, : tokens.shape[1]].tolist() == tokens[0].tolist()
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("shop/model"), "served/anna").eval()
    tokens = served.generate(**{key: X[:1] for key, X in batch.items()}, max_new_tokens=8)
    assert here["tokens"][0, : tokens.shape[1]].tolist() == tokens[0].tolist()


def test_the_table_of_a_core_beside_lora_is_that_of_the_committed_runs() -> None:
    lines = (LAB / "results" / "frontier" / "records.jsonl").read_text().splitlines()
    finals = [record for record in map(json.loads, lines) if record["config"].get("evaluate_on") != "validation"]
    runs: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for record in finals:
        if record["task"] == "hellaswag-text":
            asked = record["config"]
            where = (asked.get("targets") or "attention") if record["method"] == "lora" else asked.get("refresh", 1)
            runs.setdefault((where, asked.get("rank_budget") or asked.get("rank", 16)), []).append(record)
    page = (ROOT / "docs" / "from-lora.md").read_text(encoding="utf-8")
    table = page[page.index("<!-- use:begin -->") : page.index("<!-- use:end -->")].splitlines()[1:]
    _, _, base, *rows = [[cell.strip(" *") for cell in row.split("|")[1:-1]] for row in table]
    (model_bytes,) = {one["model_bytes"] for own in runs.values() for one in own}
    loss = mean(one["held_out_loss_before"] for own in runs.values() for one in own)
    assert base[4:] == [f"{model_bytes / 1000:,.0f} KB", f"{loss:.3f}"]
    loras = [("attention", 1), ("attention", 16), ("all-linear", 1), ("all-linear", 7)]
    cores = [(1, 4096), (1, 65536)]
    for shown, kind in zip(rows, [*loras, *cores], strict=True):
        own = runs[kind]
        assert len(own) == 3
        at_once, in_all, state = (
            median(record[count] for record in own) for count in ("values_at_once", "values_in_all", "state_held_bytes")
        )
        alone = [record["resources"]["saved_bytes_without_bases"] for record in own]
        kept = median(alone if kind[0] == 1 else [record["saved_bytes"] for record in own])
        assert shown[1:4] == [f"{at_once:,}", f"{in_all:,}", f"{state / 1000:,.0f} KB"]
        assert shown[4].removesuffix(" beside the basis") == f"{kept / 1000:,.0f} KB"
        assert shown[5] == f"{mean(record['held_out_loss'] for record in own):.3f}"
        assert stdev(record["held_out_loss"] for record in own) < 0.007  # as its heading says


def test_the_table_of_the_real_model_is_that_of_the_committed_runs() -> None:
    campaigns = ("smollm2", "smollm2-rest", "smollm2-more")
    files = (LAB / "results" / name / "records.jsonl" for name in campaigns)
    lines = [line for file in files for line in file.read_text().splitlines()]
    finals = [record for record in map(json.loads, lines) if record["config"]["evaluate_on"] == "evaluation"]
    by_method: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def named(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["method"], *(run["config"].get(field) for field in ("rank", "targets", "refresh"))

    def risen(run: dict[str, Any]) -> float:
        return mean(other["loss"] - other["loss_before"] for other in run["forgetting"].values())

    for run in finals:
        by_method.setdefault(named(run), []).append(run)
    losses = {name: [run["held_out_loss"] for run in runs] for name, runs in by_method.items()}
    cores = {
        "SignGrad": "signgrad", "RawGrad": "rawgrad", "FiLoRA": "filora", "EVA": "eva", "FCCA": "fcca",
        "LoRA-XS": "lora_xs", "MiLoRA": "milora", "VeRA's bases": "vera", "Random": "random",
    }  # fmt: skip
    names = {name: (method, 16, None, 1) for name, method in cores.items()} | {
        "FCCA, 4 rounds": ("fcca", 16, None, 4),
        "LoRA, r = 1": ("lora", 1, None, 1),
        "LoRA, r = 1, 4 rounds": ("lora", 1, None, 4),
        "LoRA, r = 1, all linear layers": ("lora", 1, "all-linear", 1),
        "LoRA, r = 16": ("lora", 16, None, 1),
        "DoRA, r = 16": ("dora", 16, None, 1),
        "PiSSA, r = 16": ("pissa", 16, None, 1),
        "full fine-tuning": ("full", 16, None, 1),
        "(IA)³": ("ia3", 16, None, 1),
        "Uni-LoRA": ("unilora", 4, None, 1),
        "TinyLoRA": ("tinylora", 2, None, 1),
    }
    page = README.read_text(encoding="utf-8")
    table = page[page.index("<!-- smollm2-sst2:begin -->") : page.index("<!-- smollm2-sst2:end -->")].splitlines()[1:]
    _, _, base, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    assert base[4:6] == [f"{100 * finals[0]['accuracy_before']:.1f}", f"{finals[0]['held_out_loss_before']:.3f}"]
    assert [names[row[0]] for row in rows] == sorted(losses, key=lambda name: mean(losses[name]))
    for shown in rows:
        runs = by_method[names[shown[0]]]
        assert sorted(run["seed"] for run in runs) == [42, 43, 44]
        accuracies = [100 * run["accuracy"] for run in runs]
        rises = [risen(run) for run in runs]
        assert float(shown[1]) == runs[0]["config"]["learning_rate"]
        assert shown[2] == f"{runs[0]['values_at_once']:,}"
        assert shown[4] == f"{mean(accuracies):.1f} ± {stdev(accuracies):.1f}"
        assert shown[5] == f"{mean(losses[names[shown[0]]]):.3f} ± {stdev(losses[names[shown[0]]]):.3f}"
        assert shown[7] == f"{mean(rises):.2f} ± {stdev(rises):.2f}"
        for column, value in ((6, itemgetter("held_out_loss")), (8, risen)):
            own, fcca = (
                [value(run) for run in sorted(r, key=itemgetter("seed"))] for r in (runs, by_method[names["FCCA"]])
            )
            interval = ttest_rel(own, fcca).confidence_interval(0.95)
            half = (interval.high - interval.low) / 2
            said = f"{(interval.high + interval.low) / 2:+.3f} ± {half:.3f}"
            assert shown[column] == ("" if shown[0] == "FCCA" else said)


def test_its_first_figure_is_that_of_the_committed_campaign() -> None:
    drawn = LAB / "results" / "frontier" / "report" / "figures" / "frontier.png"
    assert (ROOT / "docs" / "figures" / "frontier.png").read_bytes() == drawn.read_bytes()
