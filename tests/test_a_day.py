"""A working day: real commands, real files, one after the other, as someone who fine-tunes would type them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from frozencore.errors import ModelError
from frozencore.tune.locate import model_location

FROZENCORE = [sys.executable, "-m", "frozencore"]
FEW = "--epochs 1 --rank 4 --calibration-size 16 --device cpu"
MODELS = {"pocket": (FEW, 40, 60, 16), "smollm2": (f"{FEW} --samples 1 --exact-match no", 12, 12, 120)}
"""By model, the words that make a run short, how many rows there are, many epochs, and the number of its layers."""
CAMPAIGN = """
name: mine
base: {batch_size: 8, accumulation: 1, num_train: 16, num_evaluation: 8, epochs: 1, calibration_size: 8, rank: 4}
models: {pocket: MODEL}
studies:
  two: {title: Two constructors, axes: {model: [pocket], task: [pocket-sentiment], method: [fcca, random], seed: [1]}}
"""
GENERATE = """
import frozencore
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained("PLACE")
tokenizer = AutoTokenizer.from_pretrained("PLACE")
model = PeftModel.from_pretrained(base, "runs/first/adapter")
print(tokenizer.decode(model.generate(**tokenizer("Tom has 3 cats .", return_tensors="pt"), max_new_tokens=2)[0]))
"""


class Day:
    """A folder to work in, the model of its commands, and how many steps were taken."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model, self.steps = folder, model, 0

    def command(self, words: str) -> list[str]:
        return [*FROZENCORE, *words.replace("--model pocket", f"--model {self.model}").split()]

    def do(self, words: str, says: str = "", *, status: int = 0, stdin: IO[str] | None = None) -> str:
        """Run a verb and look at its status and its words; what it printed."""
        command, narrow = self.command(words), os.environ | {"COLUMNS": "80"}
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=narrow, stdin=stdin)
        self.steps += 1
        said = done.stdout + done.stderr
        assert done.returncode == status, f"{words}: {said[-2000:]}"
        assert re.search(says, said), f"{words}: {said[-2000:]}"
        assert "Traceback" not in said
        if status == 2 and done.stderr:
            assert done.stderr.count("\n") == 1 or "Usage" in done.stderr
        return done.stdout

    def write(self, name: str, rows: list[dict[str, object]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_day_of_many_steps(model: str, tmp_path: Path) -> None:
    try:
        place = model_location(model)
    except ModelError as error:
        pytest.skip(str(error))
    day, (few, num_rows, many, num_layers) = Day(tmp_path, model), MODELS[model]
    rows = [{"prompt": f"Tom has {i} cats .", "completion": " two cats"} for i in range(num_rows)]
    day.write("rows.jsonl", rows)

    # Looking around
    day.do("--version", r"frozencore \d")
    day.do("--help", "Calibrate, train, score and save")
    day.do("tasks", "svamp")
    day.do("tune --model nowhere --data rows.jsonl --out runs/x", "nowhere", status=2)
    day.do("tune --model pocket --data nothing.jsonl --out runs/x", "there is no file", status=2)

    # The first run
    day.do(
        f"tune --model pocket --data rows.jsonl {few} --out runs/first --dry-run",
        f"{round(0.9 * num_rows)} rows to train on",
    )
    assert not (tmp_path / "runs").exists()
    day.do(f"tune --model pocket --data rows.jsonl {few} --out runs/first", r"steps? of 8 rows")
    written = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert written >= {"adapter", "result.json", "run.yaml", "training.png"}
    mode = (tmp_path / "runs" / "first" / "adapter" / "adapter_model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == 0o666 & ~_umask()
    day.do(f"tune --model pocket --data rows.jsonl {few} --out runs/first", "already holds a finished run", status=2)
    day.do("inspect runs/first", "run.yaml")
    assert day.do("inspect runs/first/adapter") == day.do("inspect runs/first/adapter")
    day.do("tune --config runs/first/run.yaml --out runs/again", "Adapter: runs/again/adapter")
    first, again = (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors" for run in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()

    said = [json.loads(line) for line in (tmp_path / "runs" / "first" / "samples.jsonl").read_text().splitlines()]
    assert {sample["wanted"] for sample in said} == {"two cats"}

    # An interruption
    words = f"tune --model pocket --data rows.jsonl {few} --epochs {many} --out runs/cut"
    _interrupt_when_it_trains(day.command(words), tmp_path)
    day.do(words, "holds an interrupted run", status=2)
    day.do(f"{words} --resume", "Goes on from its step")

    # Rows of other kinds
    day.write("long.jsonl", [*rows, {"prompt": "Tom has " + "many " * 200 + "cats .", "completion": " two cats"}])
    day.do(f"tune --model pocket --data long.jsonl {few} --max-length 64 --out runs/long", "are longer than", status=2)
    day.do(
        f"tune --model pocket --data long.jsonl {few} --max-length 64 --too-long cut --out runs/long", "1 prompt cut"
    )
    day.do(
        f"tune --model pocket --data long.jsonl {few} --max-length 64 --too-long skip --out runs/less",
        "1 left out",
    )
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["question", "answer"])
        table.writeheader()
        table.writerows({"question": row["prompt"], "answer": row["completion"]} for row in rows)
    day.do(f"tune --model pocket --data rows.csv {few} --out runs/csv", "needs the columns", status=2)
    columns = "--columns prompt=question,completion=answer"
    day.do(f"tune --model pocket --data rows.csv {columns} {few} --out runs/csv", "steps? of")
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": f"Count {i}", "output": "two cats"} for i in range(30)])
    )
    day.do(f"tune --model pocket --data alpaca.json {few} --out runs/alpaca", "steps? of")

    with (tmp_path / "rows.jsonl").open() as piped:
        day.do(
            f"tune --model pocket --data - {few} --out runs/piped",
            f"Read {num_rows} rows by prompt and completion",
            stdin=piped,
        )
    (tmp_path / "cats").mkdir()
    day.write("cats/train.jsonl", [*rows, {"prompt": "Tom", "completion": None}])
    day.do(f"tune --model pocket --data cats:train {few} --out runs/split", "must hold text", status=2)
    day.do(f"tune --model pocket --data cats:train --skip-bad {few} --out runs/split", "1 left out")

    # Other ways to train
    day.do(f"tune --model pocket --data rows.jsonl {few} --method lora --out runs/lora", "lora on rows.jsonl")
    patient = f"{few} --epochs 9 --select-checkpoint 2 --patience 1"
    day.do(f"tune --model pocket --data rows.jsonl {patient} --out runs/patient", r"Kept step \d+ of \d+")
    day.do(f"tune --model pocket --data rows.jsonl {few} --method lora --damping 1 --out runs/x", "damping", status=2)

    # One basis, several tenants
    day.do("calibrate --model pocket --data rows.jsonl --rank 4 --calibration-size 16 --out shop", "Basis: shop/basis")
    (tmp_path / "tenants").mkdir()
    for name in ("anna", "ben"):
        day.write(f"tenants/{name}.jsonl", rows[: num_rows // 2 if name == "anna" else num_rows])
    day.do("tune-many --model pocket --tenants tenants --basis shop/basis --epochs 1 --out many", "anna")
    cores = tmp_path / "many" / "anna" / "adapter" / "adapter_model.safetensors"
    assert cores.stat().st_size < 4 * num_layers * 4**2 + 1024
    day.do("merge many/anna/adapter many/ben/adapter --out both", "both")

    # Leaving
    day.do("export runs/first/adapter --out lora", "vLLM")
    day.do("export nobody/nothing --out x", "neither a folder nor in the offline cache", status=2)
    day.do("check lora", "vLLM")
    day.do("export runs/first/adapter --to merged --out merged", "Merged model: merged")
    day.do(f"export shop/basis --to basis-model --base {place} --out served", "Basis model: served")
    day.do("export both --to tenant --base served --out tenant", "tenant")
    day.do("evaluate --model merged --task pocket-sentiment --num-evaluation 8 --out scores", "pocket-sentiment")
    loaded = subprocess.run(
        [sys.executable, "-c", GENERATE.replace("PLACE", place)], cwd=tmp_path, capture_output=True, text=True
    )
    assert "Tom has 3 cats" in loaded.stdout, loaded.stderr[-1000:]

    # A small campaign
    (tmp_path / "mine.yaml").write_text(CAMPAIGN.replace("MODEL", model))
    day.do("campaign plan mine.yaml", "2 runs")
    day.do("campaign run mine.yaml --output mine --workers 0")
    day.do("campaign status mine", "2")
    day.do("campaign report mine")
    assert (tmp_path / "mine" / "report" / "index.html").exists()
    assert day.steps >= 36


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def _interrupt_when_it_trains(words: list[str], folder: Path) -> None:
    """Ctrl-C, once some steps are done: it says which step is saved and ends with 130."""
    started = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list((folder / "runs" / "cut" / "checkpoints").glob("checkpoint-*")) and time.monotonic() < deadline:
        assert started.poll() is None, started.stderr
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 130, said[-2000:]
    assert re.search(r"step \d+ of \d+ is saved", said), said[-2000:]
