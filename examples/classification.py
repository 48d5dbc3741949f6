"""Classify texts: a frozen core under a new head, which trains whole.

    python examples/classification.py --model DIR --data rows.jsonl --output out

``rows.jsonl`` holds one ``{"text": ..., "label": 0}`` a line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from frozencore import FrozenCoreConfig, calibrate


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = load_dataset("json", data_files=str(options.data), split="train")
    num_labels = max(rows["label"]) + 1
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns=["text"])
    base = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=num_labels)
    base.config.pad_token_id = tokenizer.pad_token_id
    model = get_peft_model(base, FrozenCoreConfig(r=options.rank, constructor="fcca", task_type="SEQ_CLS"))
    arguments = TrainingArguments(
        str(options.output / "trainer"), num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=8, logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    calibrate(model, trainer.get_train_dataloader(), num_examples=128, learning_rate=False)  # loss of the classes
    trainer.train()
    model.save_pretrained(options.output / "adapter")  # the cores, the bases and the head


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a language model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with text and label.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    # The measured rate is found under a head that has learned nothing; on one data set it was ten times too large.
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="Of the cores and the new head.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
