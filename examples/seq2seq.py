"""Sequence to sequence: a frozen core on an encoder-decoder model.

    python examples/seq2seq.py --model DIR --data rows.jsonl --output out

``rows.jsonl`` holds one ``{"source": ..., "target": ...}`` a line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from frozencore import FrozenCoreConfig, calibrate


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = load_dataset("json", data_files=str(options.data), split="train").map(
        lambda row: tokenizer(row["source"], text_target=row["target"], truncation=True, max_length=512),
        remove_columns=["source", "target"],
    )
    base = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    model = get_peft_model(base, FrozenCoreConfig(r=options.rank, constructor="fcca", task_type="SEQ_2_SEQ_LM"))
    arguments = Seq2SeqTrainingArguments(
        str(options.output / "trainer"), num_train_epochs=options.epochs,
        per_device_train_batch_size=8, logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(tokenizer, model=base)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
    found = calibrate(model, trainer.get_train_dataloader(), num_examples=128)
    trainer.args.learning_rate = found.learning_rate
    trainer.train()
    model.save_pretrained(options.output / "adapter")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of an encoder-decoder model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with source and target.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
