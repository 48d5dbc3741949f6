"""The flags of the Trainer, TRL and PEFT that people type most, with the flag of ours that does the same."""

from __future__ import annotations

OURS = {
    "model_name_or_path": "--model",
    "dataset_name": "--data",
    "max_seq_length": "--max-length",
    "lora_r": "--rank",
    "lora_alpha": "--alpha",
    "target_modules": "--targets",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--accumulation",
    "warmup_ratio": "--warmup",
    "output_dir": "--out",
    "bf16": "--dtype bfloat16",
}
REASONS = {
    "lora_dropout": "cores have no dropout",
    "max_steps": "a training is measured in --epochs",
    "load_in_4bit": "give the folder of a quantised model as --model",
}


def counterpart(given: str) -> str | None:
    """Say what a flag of another trainer is called here, or that it has no counterpart; None for any other name."""
    name = given.lstrip("-").replace("-", "_").casefold()
    if name in OURS:
        return f"The flag {given} is called {OURS[name]} here."
    return f"The flag {given} has no counterpart here: {REASONS[name]}. Leave it out." if name in REASONS else None
