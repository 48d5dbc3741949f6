"""A sound file of every kind that frozencore reads, with its loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import torch
from peft import PeftModel, get_peft_model
from pyarrow import parquet
from transformers import AutoTokenizer

from frozencore import FrozenCoreConfig, export_lora, load_basis, save_basis
from frozencore.adapter.export.base_model import export_merged
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.adapter.saved.folder import read_adapter
from frozencore.calibration.moments_file import MomentsFingerprint, load_moments, save_moments
from frozencore.files.strict_yaml import read_yaml
from frozencore.files.whole_file import write_json, write_lines
from frozencore.maths.moments import LayerMoments
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.own_rows import read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_files import read_file
from frozencore.tune.run.record import read_record
from frozencore.tune.tasks.described_task import read_own_task
from frozencore.tune.training.checkpoints import newest_complete_checkpoint, seal_checkpoint
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.results import load_results, status_lines
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.reports.tables.comparison import read_task_means
from fuzz_ways import CONFIG, WEIGHTS, tiny_base

ASKED, SAID = {"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris"}
ROWS = {
    "prompts": {"prompt": "a b", "completion": " c"},
    "messages": {"messages": [ASKED, SAID], "tools": "[]"},
    "instructions": {"instruction": "a", "input": "b", "output": "c"},
    "conversations": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "preferences": {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID | {"content": "Lyon"}]},
}
CAMPAIGN = """name: small
models: {pocket: pocket}
base: {batch_size: 8, epochs: 1}
studies:
  main:
    title: Two methods
    axes: {model: [pocket], task: [pocket-sentiment], method: [fcca, eva], seed: [42]}
    search: {grids: [{for: [fcca], warmup: [0.03, 1e-1]}]}
    report: {reference: fcca}
"""
RECORD = {
    "format": 1, "config": {"task": "x"}, "method": "fcca", "task": "x", "seed": 42, "accuracy": 0.5,
    "accuracy_before": 0.25, "held_out_loss": 1.5, "held_out_loss_before": 2.5, "hashes": {"model": "0" * 64},
    "total_s": 2.0, "values_at_once": 8,
    "values_in_all": 8, "state_held_bytes": 96, "saved_bytes": 32, "model_bytes": 1000,
    "calibration_s": 0.5, "training_s": 1.0, "peak_memory_bytes": 1000,
    "training": {"num_steps": 4, "losses": [2.0]},
}  # fmt: skip
PREDICTIONS = """{"id": "a", "prediction": "1", "gold": "1", "correct": true}
{"id": "b", "prediction": null, "gold": "2", "correct": false}
"""
OWN_TASK = """name: capitals
scoring: choice
evaluation: rows.jsonl
prompt: "Q: {question}\\nA:"
choices: [it is, "no"]
answer: answer
"""


@dataclass(frozen=True)
class Target:
    """A kind of file: where a sound one lies, which of its files is mutated, and what reads it."""

    kind: str
    folder: Path
    file: str
    load: Callable[[Path], object]


def make_targets(folder: Path) -> list[Target]:
    """A sound file of every kind, and its loader."""
    base = tiny_base()
    config = FrozenCoreConfig(r=2, target_modules=["q_proj", "v_proj"], constructor="random")
    get_peft_model(tiny_base(), config).save_pretrained(str(folder / "adapter"))
    shutil.copytree(folder / "adapter", folder / "unsealed")
    on_basis = get_peft_model(tiny_base(), config)
    save_basis(on_basis, folder / "cores" / "basis")
    on_basis.save_pretrained(str(folder / "cores"))
    values = json.loads((folder / "unsealed" / CONFIG).read_text())
    (folder / "unsealed" / CONFIG).write_text(json.dumps(values | {"seal": None}))
    export_lora(folder / "adapter", folder / "lora", base=base)

    def load_with_peft(path: Path) -> None:
        model = PeftModel.from_pretrained(base, str(path))
        model.unload()

    def write_lora(path: Path) -> None:
        export_lora(path, folder / "written", base=base, overwrite=True)

    def write_merged(path: Path) -> None:
        export_merged(path, folder / "merged", base=folder / "base", overwrite=True)

    base.save_pretrained(folder / "base")
    (folder / "moments").mkdir()
    moments = {"a.b": LayerMoments(5, input_square=torch.arange(1.0, 9.0), cross=torch.ones(2, 8))}
    save_moments(folder / "moments" / "moments.safetensors", moments, MomentsFingerprint("m", "d", {}))
    for name, text in (("campaign", CAMPAIGN), ("task", OWN_TASK)):
        (folder / name).mkdir()
        (folder / name / "a.yaml").write_text(text)
    rows = "".join(
        json.dumps({"prompt": f"Q{i}", "question": f"{i}?", "answer": i % 2, "more": "é"}) + "\n" for i in range(4)
    )
    (folder / "task" / "rows.jsonl").write_text(rows)
    (folder / "rows").mkdir()
    for name, row in ROWS.items():
        (folder / "rows" / f"{name}.json").write_text(json.dumps([row, row]))
    (folder / "run").mkdir()
    (folder / "run" / "result.json").write_text(json.dumps(RECORD))
    (folder / "run" / "predictions.jsonl").write_text(PREDICTIONS)
    finished = _finish_campaign(folder)
    parquet.write_table(
        pyarrow.table({"prompt": ["a", "é"] * 9, "completion": ["b", "c"] * 9}), folder / "rows.parquet"
    )
    (folder / "means.csv").write_text("task,fcca,eva\nsvamp,60.5,61\ngsm8k,1e1,-2\n")
    step = folder / "checkpoints" / "checkpoint-4"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    seal_checkpoint(step, {"seed": 1})
    return [
        Target("adapter weights", folder / "adapter", WEIGHTS, read_adapter),
        Target("adapter weights without a seal", folder / "unsealed", WEIGHTS, read_adapter),
        Target("adapter configuration", folder / "adapter", CONFIG, read_adapter),
        Target("adapter configuration without a seal", folder / "unsealed", CONFIG, read_adapter),
        Target("adapter weights, through PEFT", folder / "unsealed", WEIGHTS, load_with_peft),
        Target("adapter weights, as LoRA", folder / "unsealed", WEIGHTS, write_lora),
        Target("adapter configuration, as LoRA", folder / "unsealed", CONFIG, write_lora),
        Target("adapter configuration, merged", folder / "unsealed", CONFIG, write_merged),
        Target("basis", folder / "cores" / "basis", "basis.safetensors", load_basis),
        Target("basis header", folder / "cores" / "basis", "basis.json", load_basis),
        Target("cores alone", folder / "cores", WEIGHTS, read_adapter),
        Target("cores alone, configuration", folder / "cores", CONFIG, read_adapter),
        Target("cores alone, through PEFT", folder / "cores", WEIGHTS, load_with_peft),
        Target("cores alone, basis header", folder / "cores", "basis/basis.json", read_adapter),
        Target("moments", folder / "moments", "moments.safetensors", lambda p: load_moments(p / "moments.safetensors")),
        Target("LoRA weights", folder / "lora", WEIGHTS, check_lora_directory),
        Target("LoRA configuration", folder / "lora", CONFIG, check_lora_directory),
        Target("campaign YAML", folder / "campaign", "a.yaml", lambda p: read_campaign(p / "a.yaml")),
        Target("YAML", folder / "campaign", "a.yaml", lambda p: read_yaml(p / "a.yaml")),
        Target("task YAML", folder / "task", "a.yaml", lambda p: read_own_task(p / "a.yaml")),
        Target("JSONL rows", folder / "task", "rows.jsonl", lambda p: read_file(p / "rows.jsonl", option="--data")),
        *(Target(f"rows of {name}", folder / "rows", f"{name}.json", _reads(name)) for name in ROWS),
        Target("Parquet rows", folder, "rows.parquet", lambda p: read_file(p / "rows.parquet", option="--data")),
        Target("table of means", folder, "means.csv", lambda p: read_task_means(p / "means.csv")),
        Target("campaign index", folder / "results", "records.jsonl", load_results),
        Target("run record of a campaign", folder / "driven", finished, lambda p: list(status_lines(p))),
        Target(
            "checkpoint seal",
            folder / "checkpoints",
            "checkpoint-4/complete.json",
            lambda p: newest_complete_checkpoint(p, {"seed": 1}),
        ),
    ]


def _reads(name: str) -> Callable[[Path], object]:
    """The reader of rows of one form, from the file to tokens."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = PromptEncoder(tokenizer, preferences=name == "preferences")
    encode = encoder.preference_rows if encoder.preferences else encoder.training_rows
    return lambda path: encode(read_rows(str(path / f"{name}.json"), encoder).texts)


def _finish_campaign(folder: Path) -> str:
    """A campaign by its index in ``results``, and by its runs in ``driven``; the file of one of those."""
    campaign = read_campaign(folder / "campaign" / "a.yaml")
    jobs = plan(campaign, lambda _: read_record(json.dumps(RECORD)))
    files = [f"runs/{run.job.id}/result.json" for run in jobs if run.job]
    for name in ("results", "driven"):
        write_json(folder / name / "campaign.json", campaign.model_dump(mode="json"))
    write_lines(folder / "results" / "records.jsonl", ({**RECORD, "run_id": file.split("/")[1]} for file in files))
    for file in files:
        write_json(folder / "driven" / file, RECORD)
    return files[0]
