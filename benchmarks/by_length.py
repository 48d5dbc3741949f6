"""A training step of rows of many lengths: in groups of similar length, and as one batch; processor time, alternating.

OMP_NUM_THREADS=1 python benchmarks/by_length.py MODEL --task TASK [--data-root DATA]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from peft import get_peft_model

from frozencore import FrozenCoreConfig
from frozencore.tune.run.bench import prepare
from frozencore.tune.run.config import make_config
from frozencore.tune.run.execute import recipe_of
from frozencore.tune.run.targets import resolve_targets
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train

ROUNDS, STEPS = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--task", required=True)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--rows-a-step", type=int, nargs="+", default=[8, 32])
    asked = parser.parse_args()
    config = make_config(
        model=asked.model, task=asked.task, data_root=asked.data_root, method="random", device="cpu", truncate=True,
        skip_long=True, num_evaluation=1,
    )  # fmt: skip
    bench = prepare(config, lambda *_: None)
    adapter = FrozenCoreConfig(r=16, constructor="random", target_modules=resolve_targets(config, bench.model))
    model = get_peft_model(bench.model, adapter)
    for rows_a_step in asked.rows_a_step:
        rows = bench.rows.train[: STEPS * rows_a_step]
        auto = config.model_copy(update={"batch_size": "auto", "accumulation": rows_a_step, "epochs": 1})
        groups = recipe_of(auto, bench.rows, model)
        ways: dict[str, Recipe] = {"one batch": replace(groups, pass_tokens=None), "groups": groups}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, recipe in ways.items():
                began = time.process_time()
                train(model, rows, recipe, pad_id=bench.encoder.pad_id)
                seconds[name].append(time.process_time() - began)
        ratios = [a / b for a, b in zip(seconds["one batch"][1:], seconds["groups"][1:], strict=True)]
        lengths = [len(row.input_ids) for row in rows]
        print(
            json.dumps({
                "model": Path(asked.model).name, "task": asked.task, "rows a step": rows_a_step,
                "at once": groups.batch_size, "pass tokens": groups.pass_tokens,
                "tokens of a row": [min(lengths), statistics.median(lengths), max(lengths)],
                "times as fast": [round(x, 3) for x in (min(ratios), statistics.median(ratios), max(ratios))],
            })
        )  # fmt: skip


if __name__ == "__main__":
    main()
