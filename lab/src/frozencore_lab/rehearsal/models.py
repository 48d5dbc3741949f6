"""Stand-ins for a campaign's models: tiny, random, with the same architecture and tokenizer class."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from frozencore.errors import ModelError
from frozencore.files.hub import without_hub
from frozencore.quiet import quiet_loading
from frozencore.tune.run.models import load_config, load_tokenizer
from frozencore.words import one_line

KNOWN = Path(__file__).with_name("known")
"""The models of the shipped campaigns: configurations from their cards, and tokenizers of their classes that know
only letters. Their chat templates support conversations without tools."""
RESCALED = "-spread-"  # benchmarks/rescale.py: the model's shapes are those of the model named before it
WIDTH, HEAD_WIDTH, HEADS = 64, 32, 4  # every projection is at least as wide as the paper's largest rank
LAYERS = 2
PIECES = 2000
SHORTEST_CONTEXT = 4096  # the small tokenizer makes rows longer than the real one
SEED = 0


@dataclass(frozen=True)
class Original:
    """A model that a campaign names.

    Attributes:
        tokenizer: The place of its tokenizer: its own, or a folder of frozencore.
    """

    config: PretrainedConfig
    tokenizer: str

    def load_tokenizer(self) -> Any:
        """Load the tokenizer without the hub."""
        with without_hub():
            return load_tokenizer(self.tokenizer)


def find_original(location: str) -> Original:
    """Find a model's configuration and tokenizer without the hub: in a folder, the offline cache, or the known models.

    Args:
        location: Hub id, folder or ``pocket``, as in a specification.

    Raises:
        ModelError: The model is not found.
    """
    models = json.loads((KNOWN / "models.json").read_text(encoding="utf-8"))
    known = models.get(location.partition(RESCALED)[0])
    folder = str(KNOWN / known["tokenizer"]) if known else location
    with without_hub():
        try:
            config = load_config(location)
        except ModelError as error:
            if known is not None:
                return Original(AutoConfig.for_model(**known["config"]), folder)
            raise ModelError(
                f"The architecture of {location!r} is not known here: it is no folder, not in the offline cache, and "
                "is no model of the shipped campaigns. Give any small model of its kind: --model-path NAME=DIR."
            ) from error
        try:
            load_tokenizer(location)
        except ModelError:  # only the configuration was cached
            return Original(config, folder)
    return Original(config, location)


def make_stand_in(original: Original, texts: Sequence[str], folder: Path, num_layers: int = LAYERS) -> None:
    """Write a small model and tokenizer of the original's kind with ``save_pretrained``; always the same.

    Args:
        texts: Training texts of the tokenizer.

    Raises:
        ModelError: transformers cannot make a small model of this architecture.
    """
    blank = original.load_tokenizer()
    tokenizer = blank.train_new_from_iterator(list(texts), PIECES, show_progress=False)
    tokenizer.chat_template = blank.chat_template  # training drops the template
    tokenizer.model_max_length = max(SHORTEST_CONTEXT, tokenizer.model_max_length)
    try:
        with quiet_loading(), torch.random.fork_rng():
            torch.manual_seed(SEED)
            small = small_config(original.config, tokenizer, num_layers)
            AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(folder)
    except Exception as error:  # each architecture checks its numbers in its own way
        reason = one_line(error, 200)
        raise ModelError(
            f"No small {original.config.model_type!r} model could be made: {reason} Give one: --model-path NAME=DIR."
        ) from error
    tokenizer.save_pretrained(folder)


def small_config(config: PretrainedConfig, tokenizer: Any, num_layers: int = LAYERS) -> PretrainedConfig:
    """The same architecture with few, narrow layers; tied weights and grouped heads as in the real one."""
    small = copy.deepcopy(config)
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    changes = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if shared == heads else HEADS // 2,
        "max_position_embeddings": max(SHORTEST_CONTEXT, getattr(config, "max_position_embeddings", 0)),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(small, name, value)
    if shared is not None:
        small.head_dim = HEAD_WIDTH
    if getattr(config, "layer_types", None):
        small.layer_types = config.layer_types[:num_layers]
    return small
