"""Preferences: DPO with TRL on a frozen core, from a trained adapter or from the base model.

    python examples/dpo.py --model DIR --adapter runs/sft/adapter --data pairs.jsonl --output out

``pairs.jsonl`` holds one ``{"prompt": ..., "chosen": ..., "rejected": ...}`` a line. A trained adapter keeps its basis,
and the reference is the adapter as it came: TRL adds a second core on the same basis. Without ``--adapter`` the
reference is the base model, and the bases are chosen by DPO's own loss on its own pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from frozencore import FrozenCoreConfig, calibrate


def main() -> None:
    options = parse()
    arguments = DPOConfig(
        str(options.output / "trainer"), learning_rate=options.learning_rate, num_train_epochs=options.epochs,
        per_device_train_batch_size=8, logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(options.model)
    core = FrozenCoreConfig(r=options.rank, constructor="fcca", task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        PeftModel.from_pretrained(base, options.adapter, is_trainable=True) if options.adapter else base,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=None if options.adapter else core,
    )
    if not options.adapter:
        # A core of zeros is the reference itself: every margin is 0, and the gradient is that of DPO's first step.
        # 256 texts are 128 pairs.
        calibrate(trainer.model, trainer.get_train_dataloader(), num_examples=256, loss_fn=trainer.compute_loss)
    trainer.train()
    trainer.model.save_pretrained(options.output / "adapter", selected_adapters=["default"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a causal language model.")
    parser.add_argument("--adapter", type=Path, help="Folder of a trained frozen core to start from.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt, chosen and rejected.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16, help="Of a new core.")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
