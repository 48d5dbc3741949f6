"""Adapt a causal language model with a frozen core on any number of processes.

    python examples/finetune.py --model DIR --data rows.jsonl --output out
    torchrun --nproc-per-node 2 examples/finetune.py --model DIR --data rows.jsonl --output out
    accelerate launch --multi_gpu --num_processes 2 examples/finetune.py --model DIR --data rows.jsonl --output out

(``--multi_gpu`` is how accelerate starts several processes on one machine, also without a GPU.)

``rows.jsonl`` holds one ``{"prompt": ..., "completion": ...}`` a line. Every process calibrates on its own share of the
examples; the sums are reduced once and all processes get the same bases. Only the cores' gradients are exchanged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import PartialState
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from frozencore import FrozenCoreConfig, calibrate


def main() -> None:
    options = parse()
    processes = PartialState(cpu=not torch.cuda.is_available())  # starts the process group
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    collator = DataCollatorForSeq2Seq(tokenizer)
    rows = []
    for row in map(json.loads, options.data.open(encoding="utf-8")):
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})

    model = AutoModelForCausalLM.from_pretrained(options.model).to(processes.device)
    config = FrozenCoreConfig(r=options.rank, constructor=options.constructor, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    rate = 1e-2  # of constructors that read no data
    if config.needs_calibration:
        share = rows[: options.calibration_size][processes.process_index :: processes.num_processes]
        found = calibrate(model, share, collator=collator, batch_size=8, progress=processes.is_main_process)
        rate = found.learning_rate or rate

    arguments = TrainingArguments(
        str(options.output),
        learning_rate=rate,
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        per_device_train_batch_size=options.batch_size,
        num_train_epochs=options.epochs,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        seed=options.seed,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    if processes.is_main_process:
        model.save_pretrained(str(options.output / "adapter"))
    processes.wait_for_everyone()
    processes.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--constructor", default="fcca")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calibration-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


if __name__ == "__main__":
    main()
