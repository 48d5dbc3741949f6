"""The names of files and folders: PEFT's and transformers', and those of a basis, a run and many tenants."""

from __future__ import annotations

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
CARD_FILE, MODEL_CONFIG, TOKENIZER_FILE = "README.md", "config.json", "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
HEADER_FILE, FACTORS_FILE = "basis.json", "basis.safetensors"  # the files of a basis
ADAPTER, BASIS = "adapter", "basis"  # the folders of an adapter and of a basis inside a run's
RUN_FILE = "run.yaml"  # the given options of a run, in the form of --config
HASHES = "inputs.json"  # of what a run reads, in its folder from its beginning to its end
COMPRESSION_FILE = "compress.json"  # what each adapter keeps, beside the basis of `frozencore compress`
MANIFEST_FILE = "tenants.json"  # beside the basis that many tenants share: what it was made of
UNFINISHED_FOLDER = "unfinished"  # tenants between two steps
