"""The flags of the Trainer, TRL, PEFT, Axolotl and LLaMA-Factory that people type most, with ours of that meaning."""

from __future__ import annotations

_THEIRS = {
    "--model": "model_name_or_path base_model",
    "--data": "dataset_name dataset",
    "--columns text=NAME": "dataset_text_field",
    "--num-train": "max_samples max_train_samples",
    "--num-evaluation or --eval-data": "val_set_size val_size",
    "--max-length": "max_seq_length sequence_len cutoff_len",
    "--loss-on all": "assistant_only_loss",
    "--rank": "lora_r lora_rank",
    "--alpha": "lora_alpha",
    "--method dora": "use_dora",
    "--targets": "target_modules lora_target lora_target_modules lora_target_linear",
    "--epochs": "num_train_epochs num_epochs",
    "--batch-size": "per_device_train_batch_size micro_batch_size",
    "--accumulation": "gradient_accumulation_steps",
    "--warmup": "warmup_ratio",
    "--warmup (a share of the steps)": "warmup_steps",
    "--select-checkpoint": "eval_steps eval_strategy load_best_model_at_end",
    "--patience": "early_stopping_patience",
    "--out": "output_dir",
    "--resume": "resume_from_checkpoint",
    "--dtype bfloat16": "bf16",
    "--dtype float16": "fp16",
}
_WHY_NONE = {
    "cores have no dropout": "lora_dropout",
    "a training is measured in --epochs": "max_steps",
    "give the folder of a quantised model as --model": "load_in_4bit load_in_8bit quantization_bit",
    "rows with a column text have loss on all of it": "train_on_inputs",
    "rows are not packed": "packing sample_packing neat_packing",
    "chats are written with the chat template of the model's tokenizer": "template chat_template",
    "the learning rate rises (--warmup) and falls as a cosine": "lr_scheduler lr_scheduler_type",
    "the optimizer is AdamW": "optim optimizer",
    "there is no weight decay": "weight_decay",
    "embeddings get no noise": "neftune_noise_alpha",
    "each process holds the whole model": "deepspeed fsdp",
    "a smaller --batch-size takes less memory": "gradient_checkpointing",
    "a run takes a new --out": "overwrite_output_dir",
}
OURS = {name: ours for ours, names in _THEIRS.items() for name in names.split()}
REASONS = {name: why for why, names in _WHY_NONE.items() for name in names.split()}


def counterpart(given: str) -> str | None:
    """Say what a flag of another trainer is called here, or that it has no counterpart; None for any other name.

    Args:
        given: The flag; or a key of a file, without dashes, for which ours have none either.
    """
    name, kind = given.lstrip("-").replace("-", "_").casefold(), "flag" if given.startswith("-") else "key"
    if name in OURS:
        said = f"The {kind} {given} is called {OURS[name]} here."
    elif name in REASONS:
        said = f"The {kind} {given} has no counterpart here: {REASONS[name]}. Leave it out."
    else:
        return None
    return said if kind == "flag" else said.replace("--", "")
