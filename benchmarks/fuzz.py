"""Mutated files against every loader: how many were tried, and that nothing but our own errors came out.

    python benchmarks/fuzz.py                    # a minute; figures go to results/fuzz.json beside this file
    python benchmarks/fuzz.py --seconds 600 --seed 1

A seed file of each kind is made by the library itself. A mutation flips bits, cuts, doubles or overwrites stretches
of bytes, puts in text that breaks parsers, or gives a JSON field (a safetensors header's too) another value. The file
is then read by its loader: it may be taken, or refused with an error of ours in one line. Anything else, or a loader
that computes longer than ``SLOWEST_S``, is a failure, and its file is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import torch
from peft import PeftModel, get_peft_model
from pyarrow import parquet
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from frozencore import FrozenCoreConfig, export_lora, load_basis, save_basis
from frozencore.adapter.directory import read_adapter
from frozencore.adapter.export.merged import export_merged
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.calibration.store import MomentsFingerprint, load_moments, save_moments
from frozencore.cli.campaign_status import status_lines
from frozencore.cli.findings import diagnose
from frozencore.errors import FrozenCoreError
from frozencore.lab.campaign.plan import Outcome, plan
from frozencore.lab.campaign.results import load_results
from frozencore.lab.campaign.spec import read_campaign
from frozencore.lab.reports.tables.task_means import read_task_means
from frozencore.lab.rows.own_task import read_own_task
from frozencore.lab.rows.row_files import read_file
from frozencore.lab.run.provenance import provenance
from frozencore.lab.run.record import read_record
from frozencore.lab.training.checkpoints import newest_complete_checkpoint, seal_checkpoint
from frozencore.maths.moments import LayerMoments
from frozencore.strict_yaml import read_yaml
from frozencore.whole_file import write_json, write_lines

SLOWEST_S = 20.0
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
POISON = (
    b"\x00", b"\xff\xfe", b"NaN", b"1e999", b"-1", b"9" * 400, b"null", b"true", b"[]", b"{}", b'"', b"[" * 3000,
    b"../../", b"\\u0000", b"\\ud800", b"\n", b"\r", b"\t", b"\xe2\x80\xa8", b"18446744073709551615",
    b"&a [*a]", b"!!python/object/apply:os.system [id]", b"---\n", b"!!bool maybe", b"!!timestamp x", b"!!int",
    b"2020-13-45", b"<<: ", b"F64", b"BF16", b"I8", b"FROZENCORE", b"LORA",
)  # fmt: skip
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
    "total_s": 2.0, "trainable_parameters": 8, "calibration_s": 0.5, "training_s": 1.0, "peak_memory_bytes": 1000,
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


@dataclass
class Tally:
    """What became of the files of one kind."""

    tried: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    spent_s: float = 0.0


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four changes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64))
        # Half of the changes go to the beginning, where a header is.
        place = rng.randrange(min(len(data), 400) + 1) if rng.random() < 0.5 else place
        match rng.randrange(8):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = data[place : place + length]
            case 4:
                data[place : place + length] = rng.randbytes(length)
            case 5:
                data[place:place] = rng.choice(POISON)
            case 6:
                poison = rng.choice(POISON)
                data[place : place + len(poison)] = poison
            case _:
                data = _other_value(data, rng)
    return bytes(data)


def _other_value(data: bytearray, rng: random.Random) -> bytearray:
    """Another value somewhere in JSON text: the whole file, or the header of a safetensors file."""
    start = 8 if data[8:9] == b"{" else 0
    length = int.from_bytes(data[:8], "little") if start else len(data)
    try:
        tree = json.loads(bytes(data[start : start + length]))
    except (ValueError, RecursionError):
        return data
    places = list(_places(tree))
    if not places:
        return data
    holder, key = rng.choice(places)
    holder[key] = rng.choice((None, True, -1, 0, 2**63, 1e300, "", "x", "../x", [], {}, [1, 2], {"a": 1}, "F32", "U8"))
    text = json.dumps(tree).encode()
    return bytearray((len(text).to_bytes(8, "little") if start else b"") + text + data[start + length :])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def tiny_base() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


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
        Target("basis header, by doctor", folder / "cores" / "basis", "basis.json", diagnose),
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
        Target("Parquet rows", folder, "rows.parquet", lambda p: read_file(p / "rows.parquet", option="--data")),
        Target("table of means", folder, "means.csv", lambda p: read_task_means(p / "means.csv")),
        Target("run record, by doctor", folder / "run", "result.json", diagnose),
        Target("predictions, by doctor", folder / "run", "predictions.jsonl", diagnose),
        Target("campaign index", folder / "results", "records.jsonl", load_results),
        Target("campaign index, by doctor", folder / "results", "records.jsonl", diagnose),
        Target("run record of a campaign", folder / "driven", finished, lambda p: list(status_lines(p))),
        Target("campaign folder, by doctor", folder / "results", "campaign.json", diagnose),
        Target(
            "checkpoint seal",
            folder / "checkpoints",
            "checkpoint-4/complete.json",
            lambda p: newest_complete_checkpoint(p, {"seed": 1}),
        ),
    ]


def _finish_campaign(folder: Path) -> str:
    """A campaign by its index in ``results``, and by its runs in ``driven``; the file of one of those."""
    campaign = read_campaign(folder / "campaign" / "a.yaml")
    jobs = plan(campaign, lambda _: Outcome(read_record(json.dumps(RECORD))))
    files = [f"runs/{run.job.id}/result.json" for run in jobs if run.job]
    for name in ("results", "driven"):
        write_json(folder / name / "campaign.json", campaign.model_dump(mode="json"))
    write_lines(folder / "results" / "records.jsonl", ({**RECORD, "run_id": file.split("/")[1]} for file in files))
    for file in files:
        write_json(folder / "driven" / file, RECORD)
    return files[0]


def fuzz(seconds: float, seed: int, keep: Path) -> dict[str, Tally]:
    """Try files until the time is over, which all kinds share evenly."""
    rng = random.Random(seed)
    with TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = make_targets(Path(made))
        for target in targets:
            target.load(target.folder)
        contents = {target.kind: (target.folder / target.file).read_bytes() for target in targets}
        outcomes = {target.kind: Tally() for target in targets}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            target = min(targets, key=lambda one: outcomes[one.kind].spent_s)
            path, outcome = target.folder / target.file, outcomes[target.kind]
            mutated = mutate(contents[target.kind], rng)
            path.write_bytes(mutated)
            _try(target, outcome, mutated, keep)
            path.write_bytes(contents[target.kind])
    return outcomes


def _try(target: Target, outcome: Tally, mutated: bytes, keep: Path) -> None:
    started = time.process_time()  # whatever else the machine does
    outcome.tried += 1
    failure = None
    try:
        target.load(target.folder)
        outcome.taken += 1
    except FrozenCoreError as error:
        outcome.refused[type(error).__name__] += 1
        if len(str(error).splitlines()) != 1:
            failure = f"not one line: {str(error)[:200]!r}"
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    took = time.process_time() - started
    outcome.spent_s += took
    outcome.slowest_s = max(outcome.slowest_s, took)
    if took > SLOWEST_S:
        failure = f"took {took:.1f} s"
    if failure is not None:
        outcome.failures.append(failure)
        keep.mkdir(parents=True, exist_ok=True)
        name = f"{target.kind.replace(' ', '_')}-{len(outcome.failures)}-{Path(target.file).name}"
        (keep / name).write_bytes(mutated)


def show(outcomes: dict[str, Tally]) -> None:
    table = Table(title=f"{sum(o.tried for o in outcomes.values()):,} mutated files")
    for heading in ("kind", "tried", "taken", "refused", "failures", "slowest"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, one in outcomes.items():
        table.add_row(
            kind, f"{one.tried:,}", f"{one.taken:,}", f"{one.refused.total():,}", str(len(one.failures)),
            f"{one.slowest_s:.2f} s",
        )  # fmt: skip
    Console(width=120).print(table)
    for kind, one in outcomes.items():
        for failure, count in Counter(one.failures).most_common(5):
            print(f"{kind}: {count} x {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="Folder for files that failed.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    started = time.monotonic()
    outcomes = fuzz(options.seconds, options.seed, options.keep)
    show(outcomes)
    rows = [
        {"kind": kind, "tried": one.tried, "taken": one.taken, "refused": dict(one.refused),
         "failures": len(one.failures), "slowest_s": round(one.slowest_s, 3)}
        for kind, one in outcomes.items()
    ]  # fmt: skip
    run = {"seed": options.seed, "seconds": round(time.monotonic() - started, 1)}
    totals = {name: sum(row[name] for row in rows) for name in ("tried", "taken", "failures")}
    write_json(options.out, {"benchmark": "fuzz", **run, **totals, "rows": rows, "provenance": provenance()})
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
