"""Calibrate a random model under a budget in a process of its own; prints passes and bytes taken as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import CalibrationOptions, FrozenCoreConfig, calibrate
from frozencore.adapter import calibrate as calibration
from frozencore.calibration.budget import PassPlan
from frozencore.maths.linalg import truncated_svd
from tiny import batches_of, draw_examples, tiny_qwen2


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(constructor: str, budget: str, hidden: int, intermediate: int, num_layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=num_layers,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = get_peft_model(
        Qwen2ForCausalLM(config),
        FrozenCoreConfig(r=16, constructor=constructor, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    batches = batches_of(draw_examples(num_examples=8, seed=0, longest=16), 4)
    for batch in batches:  # what a plain pass takes is no extra
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        with model.disable_adapter():
            model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.backward()
    warm = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, constructor=constructor))
    calibrate(warm, batches, progress=False)  # library code that is paged in is no sum
    truncated_svd(torch.randn(600, 600), 16)
    plans: list[PassPlan] = []
    plan = calibration.plan_passes
    calibration.plan_passes = lambda *args, **options: plans.append(plan(*args, **options)) or plans[-1]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    options = CalibrationOptions(memory_budget=budget)
    calibrate(model, batches, options=options, progress=False)
    taken = resident("VmHWM") - before
    print(json.dumps({"passes": plans[0].num_passes, "taken": taken}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
