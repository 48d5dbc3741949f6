"""What the command line refuses: in one line, with status 2, before anything is written, and mostly before torch."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures import LAB
from frozencore import __version__
from frozencore.tune.training.trainer import CompletionTrainer
from tiny import adapted, refuse_by_device, refuse_by_machine, tiny_qwen2

Command = Callable[..., tuple[int, str, str]]
HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "matplotlib", "scipy", "torchao", "bitsandbytes"}


def lines(*rows: dict[str, str]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SUMS = lines(*({"prompt": f"How many is {i} and 2?", "completion": f" {i + 2}"} for i in range(8)))
FILES = {
    "rows.jsonl": SUMS, "rows.txt": "rows", "empty.jsonl": "", "odd.jsonl": lines({"a": "b"}),
    "blank.jsonl": lines({"prompt": "a", "completion": ""}), "full/file": "", "many/anna/result.json": "{}",
    "run/result.json": "{}", "tenants/anna.jsonl": SUMS, "few/anna.jsonl": SUMS,
    "few/ben.jsonl": lines({"prompt": "How many?", "completion": " 3"}), "mute/anna.jsonl": SUMS,
    "mute/ben.jsonl": lines(*({"prompt": f"{i}?", "completion": ""} for i in range(9))),
    "modl.yaml": "modl: pocket", "zzz.yaml": "zzz: 1", "twice.yaml": "lr: 1\nlearning-rate: 2",
    "deep.yaml": "data: rows.jsonl\nmodel: pocket\nout: {name: a}", "list.yaml": "- model",
    "again.yaml": "rank: 2\nrank: 3",
    "stopped run/inputs.json": json.dumps({"model": 64 * "0"}), "stopped run/run.yaml": "model: pocket",
    "config.yaml": "config: other.yaml", "lora.yaml": "lora_r: 8\nrnk: 8\nsample_packing: true",
    "strayed/adapter_config.json": '{"base_model_name_or_path": "./moved"}',
}  # fmt: skip


def write_files(folder: Path) -> None:
    """The files above, an adapter in ``run`` and its base model in ``base``."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    adapted("random", target_modules=["q_proj"]).save_pretrained(str(folder / "run/adapter"))
    tiny_qwen2().save_pretrained(folder / "base")
    (folder / "a-basis").mkdir()
    (folder / "a-basis" / "basis.json").write_text("{}")
    (folder / "gone").symlink_to("nowhere")


M = "--model pocket"
P = f"{M} --task pocket-sentiment"
X = "--out x"
BEFORE_TORCH = {
    f"train {P} {X}": "There is no verb 'train'. Known: tune",
    f"--debug evalute {X}": "There is no verb 'evalute'. Did you mean 'evaluate'",
    f"tune {P} --learning_rate=1e-3 {X}": "no flag --learning_rate. Did you mean --learning-rate",
    f"tune {P} --learing-rate 1 {X}": r"no flag --learing-rate\. Did you mean --learning-rate\?$",
    f"tune {P} --lora-r 8 {X}": "--lora-r is called --rank here",
    f"tune {P} --num_train_epochs 3 {X}": "--num_train_epochs is called --epochs here",
    f"tune {P} --max_steps 100 {X}": "--max_steps has no counterpart here: a training is measured in --epochs",
    f"tune {P} --lora_task_type CAUSAL_LM {X}": "There is no flag --lora_task_type",
    f"tune {P} --rnk 8 {X}": "no flag --rnk. See `frozencore tune --help`|Did you mean --rank",
    f"tune {X}": r"Missing option '--model'\. See `frozencore tune --help`",
    f"tune {P} -r 8 {X}": "No such option: -r",
    f"tune {P} --rank": "'--rank' requires an argument",
    f"tune {P} {X} y": "unexpected extra argument",
    "export": "Missing argument",
    "tune --config lora.yaml": "the keys 'lora_r', 'rnk', 'sample_packing', .*. The key lora_r is called rank here. "
    "Did you mean rank. The key sample_packing has no counterpart here: rows are not packed. Leave it out",
    f"tune {M} --task svmp {X}": "Did you mean 'svamp'",
    f"tune {P} --method fccca {X}": "Did you mean 'fcca'",
    f"tune --model smolm2 --task sst2 {X}": r"Did you mean 'smollm2'\?",
    f"tune --model run --task sst2 {X}": "it has no config.json",
    f"calibrate --model none/at/all --task sst2 {X}": "there is no such folder",
    f"tune {P}": "Give --out DIR, or --dry-run",
    f"tune {M} --data - --eval-data - {X}": "The standard input is one source of rows, but two options name it",
    f"tune {M} --data rows.jsonl --eval-data - --calibration-data - {X}": "one source of rows, but two options name it",
    f"tune {M} --data none.jsonl {X}": "there is no file none.jsonl",
    f"tune {M} --data rows.txt {X}": "Convert it to one of these",
    f"tune {M} --data rows.jsonl --data rows.jsonl {X}": "rows.jsonl comes twice",
    f"tune {M} --data rows.jsonl --eval-data none.jsonl {X}": "--eval-data: there is no file none.jsonl",
    f"tune --model pocket --task sst2 --eval-data rows.jsonl {X}": "--eval-data is for your own rows",
    f"tune {P} --data-root none {X}": "there is no folder none",
    f"tune {P} --basis none {X}": "A basis is a folder with basis.json .* none is no folder. Point at one",
    f"tune {P} --out gone": "gone is not a writable folder",
    "merge run --out gone/sum": "gone is not a writable folder",
    f"tune {P} --out run": "already holds a finished run",
    f"tune {P} --out run --resume": "there is nothing to resume",
    f"tune {X} --resume": "there is nothing to resume in x: it has no run.yaml",
    f"tune-many {X} --resume": "there is nothing to resume in x",
    f"tune {P} --push-to-hub mine {X}": "OWNER/NAME",
    f"tune {P} --push-to-hub anna/mine {X}": "login",
    f"tune {P} --push-to-hub anna/mine --basis a-basis {X}": "a-basis is a folder. Upload it .* --basis OWNER/NAME",
    f"tune {P} --rank 0 {X}": "--rank",
    f"tune {P} --targets , {X}": "--targets",
    f"tune {P} --method lora --alpha 64 {X}": "does not read alpha",
    f"tune {P} --damping -1 {X}": "--damping must be a number above 0 or a list of 2, each a number above 0, but '-1'",
    f"tune {P} --seed 4294967296 {X}": "--seed must be a whole number of at least 0 below 4294967296, but",
    f"calibrate {P} --eva-center {X}": "The method 'fcca' does not read eva_center .it is for eva.",
    f"tune --config modl.yaml {X}": "the key 'modl', which `tune` does not know. Did you mean model",
    f"tune --config zzz.yaml {X}": "the key 'zzz', which `tune` does not know. See `frozencore tune --help`.",
    f"tune --config twice.yaml {X}": "gives learning-rate twice, by its two names",
    "tune --config deep.yaml": "deep.yaml, out: a value is a number, a word, yes or no, or a list of such",
    f"tune --config list.yaml {X}": "must hold flags as `rank: 8`, a line each",
    f"tune --config again.yaml {X}": "the key 'rank' is given twice",
    f"tune --config config.yaml {X}": "has the key 'config'",
    f"tune-many {M} --tenants none {X}": "a folder with .* for each tenant, or a YAML file",
    f"tune-many {M} --tenants tenants --out many": "already holds a finished run of 'anna'",
    f"calibrate {M} --tenants tenants --data x.jsonl {X}": "--tenants and --data name the same thing. Leave one out",
    f"calibrate {P} --tenants tenants {X}": "--tenants and --data name the same thing",
    f"calibrate {P} --out run": "already holds a finished run",
    f"calibrate {P} --out rows.txt": "rows.txt is not a writable folder",
    f"evaluate {M} {X}": "There is nothing to score",
    f"evaluate {M} --task sst3 {X}": "Did you mean 'sst2'",
    f"evaluate --model ./none --task sst2 {X}": "there is no such folder",
    f"evaluate {M} --data none.jsonl {X}": "there is no file none.jsonl",
    f"evaluate {M} --data a.jsonl --data b.jsonl {X}": "--data names one source of rows here, but 2 are given",
    f"tune {M} --data a.jsonl --eval-data=b.jsonl --eval-data c.jsonl {X}": "--eval-data names one source",
    f"evaluate {P} --adapter none {X}": "An adapter is a folder, but none does not exist",
    f"evaluate {P} --adapter 'stopped run' {X}": r"stopped run holds an interrupted run.*--out 'stopped run'`\.$",
    f"evaluate {P} --out rows.txt": "rows.txt is not a writable folder",
    f"evaluate {P} --dtype int8 {X}": "--dtype must be one of auto, float32, bfloat16, float16, but 'int8' was given",
    f"evaluate {P} --num-evaluation 0 {X}": "--num-evaluation must be a whole number of at least 1, but 0 was given",
    f"tune {M} --data Jos\udce9.jsonl {X}": r"must be UTF-8 text, but Jos\\xe9.jsonl is not",
    f"tune {P} --out Jos\udce9": r"must be UTF-8 text, but Jos\\xe9 is not",
    "chat": "Give --model NAME",
    "chat none": "An adapter is a folder, but none does not exist",
    "chat --model ./none": "there is no such folder",
    "chat strayed": "there is no such folder.* The adapter names this model: .* with --model",
    "inspect none": "An adapter is a folder, but none does not exist",
    f"export run --to merge {X}": "Did you mean 'merged'",
    f"export none {X}": "An adapter is a folder, but none does not exist",
    "export run --out many": "many is there already",
    f"export run --base ./none {X}": "no such folder",
    f"export run --to merged --base ./none {X}": "there is no such folder",
    f"export run --to tenant --rank 2 {X}": "--rank is for --to lora, but --to tenant",
    f"export run --to merged --rank 0 {X}": "--rank is for --to lora, but --to merged",
    f"export run --with-code {X}": "--with-code is for --to basis-model, but --to lora",
    f"export run --bits 4 {X}": "--to lora takes no --bits",
    f"export run --to onnx --bits 2 {X}": "--to onnx takes --bits 8, 4, but --bits 2 was given",
    f"export run --to link {X}": "leave --out out",
    "export run --to link --overwrite": "--overwrite is for --to lora, merged, basis-model",
    f"export run --to core --dtype float16 {X}": "--dtype is for .*, but --to core was given: leave one",
    f"export run --to qr --base base {X}": "--base is for .*, but --to qr was given: leave one",
    "export run": "--to lora writes a folder. Give --out",
    "export run --to qr --out many": "many is there already. Choose another file",
    f"compress none {X}": "An adapter is a folder, but none does not exist",
    f"compress . {X}": "no adapter_config.json.* It holds .* of adapters: did you mean",
    "compress run --out many": "many is there already",
    f"compress run --model ./none {X}": "there is no such folder",
    f"compress run --tenants tenants {X}": "give it with --model",
    f"compress run --tenants none {M} {X}": "a folder with .* for each tenant, or a YAML file",
    "merge run run --out many": "many is there already",
    f"merge run none {X}": "An adapter is a folder, but none does not exist",
    f"merge run run --weights=1,x {X}": "--weights are numbers separated by commas, but '1,x' was given",
}
TOLD = {
    "--version": f"frozencore {__version__}",
    "task": "pocket-math",
    "schema": "weighting",
    "campaign --help": "Make many runs from one YAML file",
    "tune --help": "--calibration-size",
    "export --help": "--to",
    f"campaign status {LAB / 'results' / 'smollm2'}": "smollm2: ",
}
ONE_AFTER_THE_OTHER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from frozencore_command import main
ends = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            status = end.code
    packages = {name.partition(".")[0] for name in sys.modules}
    ends.append([sorted(packages), status, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], int, str, str]]:
    """Heavy packages, status and output of each command, all in one process: what one imports is seen from there on."""
    folder = tmp_path_factory.mktemp("refused")
    write_files(folder)
    before = sorted(folder.rglob("*"))
    asked = [*TOLD, *BEFORE_TORCH]
    words = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps([shlex.split(line) for line in asked])]
    no_token = {**os.environ, "HF_TOKEN": "", "HF_TOKEN_PATH": "none"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, env=no_token)
    assert sorted(folder.rglob("*")) == before
    return {
        line: (set(packages) & HEAVY, *rest)
        for line, (packages, *rest) in zip(asked, json.loads(done.stdout), strict=True)
    }


@pytest.mark.parametrize("line", TOLD)
def test_what_only_tells_imports_no_torch_and_prints_nothing_else(
    line: str, ends: dict[str, tuple[set[str], int, str, str]]
) -> None:
    heavy, status, out, err = ends[line]
    assert TOLD[line] in out
    assert (heavy, status or 0, err) == (set(), 0, "")


@pytest.mark.parametrize("line", BEFORE_TORCH)
def test_wrong_words_are_one_line_before_torch_and_peft_are_imported(
    line: str, ends: dict[str, tuple[set[str], int, str, str]]
) -> None:
    heavy, status, out, err = ends[line]
    assert re.search(BEFORE_TORCH[line], err), err
    assert (heavy, status, out, err.count("\n"), err[:12]) == (set(), 2, "", 1, "frozencore: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"tune {P} --targets nothing {X}", "matches no layer"),
        (f"tune {P} --targets q_proj,v_prj {X}", "'v_prj' matches no layer"),
        (f"tune {P} --max-length 8 {X}", "longer than the limit of 8 tokens"),
        (f"tune {P} --max-length 100000 {X}", "beyond the model's context"),
        (f"tune {P} --device cuda:99 {X}", "no device"),
        (f"tune --model Nobody/has-this --task pocket-math {X}", "hub cannot be reached|no such"),
        (f"tune {M} --data empty.jsonl {X}", "holds no rows"),
        (f"tune {M} --data blank.jsonl {X}", "row-1"),
        (f"tune {M} --data odd.jsonl {X}", "row 1"),
        (f"calibrate {P} --method random {X}", "reads no calibration data"),
        (f"calibrate {M} --tenants few {X}", "Tenant 'ben'.*needs rows to train on"),
        (f"calibrate {M} --tenants mute {X}", "Tenant 'ben'"),
        (f"calibrate {M} --tenants tenants --method random {X}", "'random' reads no calibration data"),
        (f"calibrate {M} --tenants tenants --calibration-task sst2 {X}", "leave --calibration-data out"),
        (f"chat {M} --system x", "--system needs a chat template"),
        (f"export run {X}", "--base on the command line"),
    ],
)
def test_what_cannot_be_done_with_these_files_is_one_line(
    line: str, message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    status, _, err = command(*shlex.split(line))
    assert re.search(message, err), err
    assert (status, err.count("\n"), err[:12]) == (2, 1, "frozencore: ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "stdin", "message"),
    [
        ("chat --model pocket --device cpu", io.TextIOWrapper(io.BytesIO(b"h\xe9\n"), "utf-8"), "reads lines of UTF-8"),
        ("chat --model pocket --device cpu", io.StringIO("h\udce9\n"), "reads lines of UTF-8"),  # as in some locales
        ("chat --model pocket --device cpu", None, "reads the standard input, but that is closed"),
        (f"tune {M} --data - {X}", None, "the standard input is closed"),
    ],
)
def test_a_standard_input_that_is_closed_or_is_no_text_is_one_line(
    line: str, stdin: io.TextIOBase | None, message: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    status, _, err = command(*shlex.split(line))
    assert re.search(message, err), err
    assert (status, err.count("\n"), err[:12]) == (2, 1, "frozencore: ")


@pytest.mark.parametrize("refuse", [refuse_by_device, refuse_by_machine])
def test_memory_that_runs_out_in_training_is_one_line(
    command: Command, refuse: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionTrainer, "compute_loss", lambda *_, **__: refuse())
    few = ("--num-train", 8, "--num-evaluation", 4, "--method", "random")
    status, _, err = command("tune", *shlex.split(P), *few, "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("frozencore: out of memory (")
    assert "smaller --batch-size" in err
