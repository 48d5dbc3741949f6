"""The cost of a real model on this CPU: step, calibration, scoring and memory of SmolLM2, with cores, LoRA and neither.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/smollm2.py --data-root DIR     # ten minutes; --quick: tiny
    ... --model DIR --dtypes float32 --calibration 32 --rounds 2 --out benchmarks/results/NAME.json    # a larger model

Rows of SST-2, in float32 and in bfloat16. A step is of eight rows: forward, the loss over the completion, backward,
clipping, fused AdamW. The floor of calibration is a forward and backward pass over its rows, 128 by default, that
computes the same logits. Scoring is ``predict_choices`` on evaluation rows. The contestants take turns; ratios are
quartiles over the rounds. Memory is what the process holds at most above what it held before, in a round that is not
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn

from contestants import FLOOR, LABELS, UNCALIBRATED, Stepper, adapter_config, completions_only, with_adapter
from frozencore import calibrate
from frozencore.progress import no_progress
from frozencore.tune.config import make_config
from frozencore.tune.load import Inputs, prepare
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.scoring.choice import predict_choices
from harness import load_average, medians, memory_of, parser_of, ratios, table, take_turns, with_range, write_found

NAMES = {FLOOR: FLOOR, "lora": "lora", "frozencore": UNCALIBRATED}
DTYPES = ("float32", "bfloat16")
ROWS = 8


def race(runs: Mapping[str, Callable[[], Any]], models: Mapping[str, nn.Module], rounds: int) -> dict[str, Any]:
    """Seconds and peak memory of each contestant, and its ratios to the floor and to LoRA where they take part."""
    times = take_turns(runs, rounds)
    return {
        name: {
            "processor_s": seconds,
            "memory_bytes": memory_of(models[name], runs[name]),
            **{f"over_{other}": ratios(times[name], times[other]) for other in (FLOOR, "lora") if other in times},
        }
        for name, seconds in medians(times).items()
    }


def measure(prepared: Inputs, rounds: int, num_scored: int) -> dict[str, Any]:
    """A step, calibration and scoring on one base model."""
    base, pad_id = prepared.model, prepared.encoder.pad_id
    batches = [completions_only(batch) for batch in calibration_batches(prepared.rows.calibration, pad_id)]
    models = {who: with_adapter(base, name) for who, name in NAMES.items()}
    steppers = {who: Stepper(model) for who, model in models.items()}
    batch = batches[len(batches) // 2]  # they are sorted by length
    found = {"step": race({who: partial(one.step, batch) for who, one in steppers.items()}, models, rounds)}
    choices = [row.choices for row in prepared.rows.held_out[:num_scored]]
    scoring = {who: partial(predict_choices, model.eval(), choices, pad_id=pad_id) for who, model in models.items()}
    found["scoring"] = race(scoring, models, rounds)
    adapted = get_peft_model(base, adapter_config("frozencore"))

    def floor() -> None:
        for one in batches:
            models[FLOOR](**one).loss.backward()

    def ours() -> None:
        calibrate(adapted, calibration_batches(prepared.rows.calibration, pad_id), learning_rate=False, progress=False)

    found["calibration"] = race({FLOOR: floor, "frozencore": ours}, {FLOOR: base, "frozencore": adapted}, rounds)
    adapted.unload()
    return found


def table_of(found: Mapping[str, Any]) -> str:
    """A real model's step, scoring and calibration."""
    calibration = f"calibration, {found.get('calibration_rows', 128)} rows"
    names = {"step": "training step, 8 rows", "scoring": "scoring 64 rows", "calibration": calibration}
    body = [
        [dtype, names[what], LABELS[who], f"{row['processor_s']:.2f} s",
         *(with_range(row[over], ".3f") if over in row else "" for over in ("over_floor", "over_lora")),
         f"{row['memory_bytes'] / 1e6:,.0f} MB"]
        for dtype, parts in found["dtypes"].items()
        for what, rows in parts.items()
        for who, row in rows.items()
    ]  # fmt: skip
    heads = ["weights", "what", "", "processor", "over no adapter", "over LoRA", "memory above the model"]
    return table(heads, body)


def main() -> None:
    parser = parser_of(__doc__, "smollm2")
    parser.add_argument("--model", default="smollm2", help="Another model folder.")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=DTYPES, help="Default: both.")
    parser.add_argument("--calibration", type=int, default=128, help="Calibration rows.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, task, rounds = (
        ("pocket", "pocket-sentiment", 1) if options.quick else (options.model, "sst2", options.rounds)
    )
    num_train, calibration_rows = (16, 16) if options.quick else (256, options.calibration)
    few = {"num_train": num_train, "calibration_size": calibration_rows}
    found: dict[str, Any] = {"dtypes": {}, "rounds": rounds, "calibration_rows": calibration_rows}
    found["load"] = load_average()
    for dtype in options.dtypes:
        config = make_config(model=model, task=task, data_root=options.data_root, dtype=dtype, device="cpu", **few)
        inputs = prepare(config.model, config.rows, config.scoring, no_progress)
        found["dtypes"][dtype] = measure(inputs, rounds, 8 if options.quick else 64)
    print(table_of(found))
    write_found(options, **found)


if __name__ == "__main__":
    main()
