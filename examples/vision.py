"""Classify images: a frozen core on a vision transformer, under a new head.

    python examples/vision.py --model DIR --data FOLDER --output out

``FOLDER`` holds a folder of images for each class.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import get_peft_model
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

from frozencore import FrozenCoreConfig, calibrate


def main() -> None:
    options = parse()
    processor = AutoImageProcessor.from_pretrained(options.model)
    images = load_dataset("imagefolder", data_dir=str(options.data), split="train")
    base = AutoModelForImageClassification.from_pretrained(
        options.model, num_labels=images.features["label"].num_classes, ignore_mismatched_sizes=True
    )
    targets = ["q_proj", "v_proj"]  # as transformers 5 calls them in ViT, DINOv2 and their kin
    config = FrozenCoreConfig(r=options.rank, target_modules=targets, modules_to_save=["classifier"])
    model = get_peft_model(base, config)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = processor([row["image"].convert("RGB") for row in rows], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}

    arguments = TrainingArguments(
        str(options.output / "trainer"), num_train_epochs=options.epochs, logging_steps=1,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=8, remove_unused_columns=False, report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=images, data_collator=collate)
    calibrate(model, trainer.get_train_dataloader(), num_examples=128, learning_rate=False)
    trainer.train()
    model.save_pretrained(options.output / "adapter")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of an image model.")
    parser.add_argument("--data", type=Path, required=True, help="A folder of images for each class.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    # The measured rate is found under a head that has learned nothing; on one data set it was ten times too large.
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="Of the cores and the new head.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
