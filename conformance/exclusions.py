"""The tests of PEFT's suite that do not apply to frozen cores, by name, each with its reason."""

from __future__ import annotations

import re
from typing import Any

NOT_LORA = "tests another method's own tensors, options or names, not the shared behaviour"
PROMPTS = "tests prompt learning, which has no adapter layers"
EMBEDDING = "puts an adapter on an embedding; a frozen core sits on linear layers"
CONVOLUTION = "puts an adapter on a convolution; a frozen core sits on linear layers"
MHA = "puts an adapter on nn.MultiheadAttention; a frozen core sits on linear layers"
DORA = "tests DoRA, a LoRA variant"
BIAS = "trains biases (bias='all'), which a frozen core does not"
TRAINED_TOGETHER = "expects adapter_names to raise in training; cores on one basis train through it"
WEIGHTED = "add_weighted_adapter of adapters on different bases, which cores do not offer"
DISPATCH = "registers custom LoRA layer classes, a mechanism of LoraConfig"
MIXED_MODEL = "PeftMixedModel admits only the tuner types on its own list"
WIDER = "asks for ranks above the layer's width; a frozen core takes the rank that fits and says so"
TRUNCATED = "asks a rank-4 LoRA to stand for a rank-8 core on this model; at rank 8 the other models pass"
CARD = "counts the characters of PEFT's unfilled card template; ours states its few facts in less"
MAPPING = "edits PEFT's per-method table of default targets, or reads its error; ours are found in the model"

PICKLE = "saves a pickle and loads it; frozen cores are never read from one"
EMBEDDINGS = "expects the base model's embeddings in the adapter's file; a frozen core leaves them out"
OTHER_BASE = "loads onto a base model with other random weights, which a frozen core refuses unless told otherwise"

# File, test name (full match), reason. The first match counts.
EXCLUDED: list[tuple[str, str, str]] = [
    ("test_custom_models", r"test_requires_grad_lora_(conv2d|emb_conv1d)", "puts LoRA on convolutions and embeddings"),
    ("test_custom_models", r"test_requires_grad_(?!lora_|modules_to_save|follows).*", NOT_LORA),
    ("test_custom_models", r"test_.*dora.*", DORA),
    ("test_custom_models", r"test_.*(ia3|glora|gralora|monteclora|pvera|_osf).*", NOT_LORA),
    ("test_custom_models", r"test_(lora_safe_merge_does_not|merge_with_lora_bias).*", "tests the bias of LoRA's B"),
    ("test_custom_models", r"test_trainable_tokens_random_init.*|test_set_requires_grad_trainable_tokens",
     "tests the method TrainableTokens alone"),
    ("test_custom_models", r"test_mixed_adapter_batches_training_mode_raises.*", TRAINED_TOGETHER),
    ("test_custom_models", r"test_add_weighted_adapter.*|test_multiple_adapters_.*merging_adapters.*", WEIGHTED),
    ("test_custom_models", r"test_.*(mha|multihead).*", MHA),
    ("test_custom_models", r"test_mixed_adapter_batches_lora_conv.*", CONVOLUTION),
    ("test_custom_models", r"test_save_pretrained_targeting_lora_to_embedding_layer.*", EMBEDDING),
    ("test_custom_models", r"test_load_resized_embedding_ignore_mismatched_sizes", EMBEDDING),
    ("test_custom_models", r"test_repr_lora_.*", "compares the text of LoRA's layers"),
    ("test_custom_models", r"test_(custom_lora_layer|override_lora|training_works|saving_and_loading).*", DISPATCH),
    ("test_custom_models", r"test_target_layer_without.*", DISPATCH),
    ("test_custom_models", r"test_default_target_modules_(list_of_str|str|not_set_.*)", MAPPING),
    ("test_custom_models", r"test_multirank_2", WIDER),
    ("test_custom_models", r"test_non_existing_model_card", CARD),
    ("test_decoder_models", r"test_(prompt|prefix)_.*|test_set_requires_grad_prompt_learning.*", PROMPTS),
    ("test_decoder_models", r"test_generate_adalora_no_dropout", NOT_LORA),
    ("test_decoder_models", r"test_lora_layer_replication", "layer_replication is an option of LoraConfig"),
    ("test_decoder_models", r"test_(lora_embed_scale|save_pretrained_targeting_lora_to_embedding).*", EMBEDDING),
    ("test_decoder_models", r"test_merge_and_unload_fixes_tie_word_embeddings_config", EMBEDDING),
    ("test_encoder_decoder_models", r"test_(active_adapters_prompt|prompt_).*", PROMPTS),
    ("test_encoder_decoder_models", r"test_save_shared_tensors", BIAS),
    ("test_seq_classifier", r"test_prompt_.*", PROMPTS),
    ("test_feature_extraction_models", r"test_passing_input_embeds_works", PROMPTS),
    (r"test_.*", r"test_save_pretrained_(selected_adapters_)?pickle", PICKLE),
    ("test_custom_models", r"test_save_embedding_layers_excludes_similarly_named_sibling", EMBEDDINGS),
    ("test_custom_models", r"test_load_does_not_overwrite_similarly_named_sibling", OTHER_BASE),
    ("test_custom_models", r"test_ignore_mismatched_sizes_with_scalar_modules_to_save", OTHER_BASE),
    ("test_custom_models", r"test_loading_(model|adapter)_.*requires_grad.*", OTHER_BASE),
    (r"test_.*", r"test_training_prompt_learning_tasks", PROMPTS),
    (r"test_.*", r"test_weighted_combination_of_adapters", WEIGHTED),
    ("test_config", r"test_.*(adalora|prompt_encoder|ia3).*", NOT_LORA),
    ("test_config", r"test_nested_config.*", "tests the nested options of LoraConfig"),
    ("test_config", r"test_save_pretrained_with_runtime_config", "runtime_config is an option of LoraConfig"),
    ("test_config", r"test_from_pretrained_cache_dir_remote", "downloads from the hub"),
    ("test_config", r"test_from_peft_type", "walks PEFT's own enum, which is closed; ours is registered beside it"),
]  # fmt: skip


def reason_to_exclude(file: str, test: str, parameters: dict[str, Any]) -> str | None:
    """Why a collected case cannot hold for a frozen core; None if it must."""
    if test == "test_add_adapter_rejects_duplicate_name_without_mutation" and parameters.get("mixed"):
        return MIXED_MODEL
    model_id = parameters.get("model_id", "")
    if test == "test_lora_conversion" and "qwen2" in model_id:
        return TRUNCATED
    matches = (why for where, name, why in EXCLUDED if re.fullmatch(where, file) and re.fullmatch(name, test))
    return next(matches, None)
