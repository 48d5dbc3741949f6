"""Flags of other trainers: the names of the Trainer, TRL and PEFT, with the flag of ours that does the same."""

from __future__ import annotations

OURS = {
    "--model": "model_name_or_path base_model_name_or_path model_name base_model model_id",
    "--dtype bfloat16": "bf16 bf16_full_eval",
    "--dtype float16": "fp16 fp16_full_eval",
    "--dtype": "torch_dtype",
    "--device cpu": "use_cpu no_cuda",
    "--data": "dataset_name dataset dataset_path train_file data_path dataset_train_split",
    "--eval-data": "eval_dataset validation_file dataset_test_split",
    "--columns": "dataset_text_field text_column",
    "--max-length": "max_seq_length cutoff_len model_max_length",
    "--num-train": "max_train_samples",
    "--num-evaluation": "max_eval_samples val_set_size",
    "--loss-on all": "assistant_only_loss",
    "--rank": "r lora_r lora_rank",
    "--alpha": "lora_alpha",
    "--targets": "target_modules lora_target_modules",
    "--layers": "layers_to_transform",
    "--method": "init_lora_weights peft_type",
    "--method dora": "use_dora",
    "--learning-rate": "lr",
    "--epochs": "num_train_epochs num_epochs",
    "--batch-size": "per_device_train_batch_size train_batch_size micro_batch_size per_gpu_train_batch_size",
    "--batch-size auto": "auto_find_batch_size train_sampling_strategy group_by_length",
    "--accumulation": "gradient_accumulation_steps grad_accum",
    "--warmup": "warmup_ratio",
    "--seed": "data_seed random_state",
    "--out": "output_dir",
    "--resume": "resume_from_checkpoint",
    "--select-checkpoint": "eval_strategy eval_steps evaluation_strategy load_best_model_at_end",
    "--select-by": "metric_for_best_model greater_is_better",
    "--patience": "early_stopping_patience",
    "--save-steps": "save_strategy",
    "--push-to-hub": "hub_model_id",
}
REASONS = {
    "max_steps": "a training is measured in --epochs",
    "warmup_steps": "--warmup is a share of the steps",
    "lora_dropout": "cores have no dropout",
    "weight_decay": "cores are trained without weight decay",
    "use_rslora": "--alpha is divided by the rank",
    "completion_only_loss": "the loss is always on completions; texts carry it everywhere",
    "packing": "rows of similar length share a pass",
    "trust_remote_code": "code of a repository is never run",
    "per_device_eval_batch_size": "scoring takes as many rows as fit",
    "logging_steps": "every step is recorded",
    "use_peft": "every method but `--method full` trains an adapter",
    "load_in_4bit": "give the folder of a quantised model as --model",
    "load_in_8bit": "give the folder of a quantised model as --model",
    "gradient_checkpointing": "the passes keep their activations; a smaller --batch-size or --max-length needs less",
}
_WITHOUT = """
lr_scheduler_type lr_scheduler_kwargs optim optim_args adam_beta1 adam_beta2 adam_epsilon optim_target_modules
average_tokens_across_devices max_grad_norm label_smoothing_factor tf32 activation_checkpointing
activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode
use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps logging_strategy
logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
disable_tqdm run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay
prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
include_for_metrics batch_eval_metrics save_only_model save_on_each_node save_total_limit enable_jit_checkpoint
hub_token hub_private_repo hub_strategy hub_always_push hub_revision ignore_data_skip
restore_callback_states_from_checkpoint full_determinism accelerator_config parallelism_config dataloader_drop_last
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names length_column_name
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
fsdp_config deepspeed skip_memory_metrics do_train do_eval do_predict local_rank model_init_kwargs
router_aux_loss_coef chat_template_path dataset_kwargs dataset_num_proc eos_token truncation_mode shuffle_dataset
packing_strategy padding_free pad_to_multiple_of eval_packing loss_type activation_offloading pad_token
model_revision attn_implementation lora_target_parameters lora_modules_to_save lora_task_type bnb_4bit_quant_type
use_bnb_nested_quant bnb_4bit_quant_storage dataset_config dataset_streaming ignore_bias_buffers task_type
auto_mapping peft_version revision inference_mode exclude_modules fan_in_fan_out bias modules_to_save layers_pattern
rank_pattern alpha_pattern megatron_config megatron_core trainable_token_indices loftq_config eva_config
corda_config lora_ga_config velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config
layer_replication runtime_config lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying
"""
OTHERS = frozenset(_WITHOUT.split())
"""Names without a counterpart and without a reason of their own."""
_OURS_OF = {name: ours for ours, names in OURS.items() for name in names.split()}


def counterpart(given: str) -> str | None:
    """Say what a flag of another trainer is called here, or that it has no counterpart; None for any other name."""
    name = given.lstrip("-").replace("-", "_").casefold()
    if name in _OURS_OF:
        return f"The flag {given} is called {_OURS_OF[name]} here."
    if name in REASONS:
        return f"The flag {given} has no counterpart here: {REASONS[name]}. Leave it out."
    return f"The flag {given} has no counterpart here. Leave it out." if name in OTHERS else None
