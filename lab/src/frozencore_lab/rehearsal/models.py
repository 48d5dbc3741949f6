"""Models that stand for a campaign's: of the same architecture and tokenizer class, tiny, with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from frozencore.errors import ModelError
from frozencore.files.hub import without_hub
from frozencore.tune.run.loading import load_config, load_tokenizer
from frozencore.words import one_line
from frozencore_lab.rehearsal.architectures import known_model

WIDTH, HEAD_WIDTH, HEADS = 64, 32, 4  # no projection is narrower than the largest rank of the paper
LAYERS = 2
PIECES = 2000
SHORTEST_CONTEXT = 4096  # its tokenizer knows few words, so that rows are longer than the real model's
SEED = 0


@dataclass(frozen=True)
class Original:
    """The model that a campaign names.

    Attributes:
        source: Where its configuration was read.
        tokenizer: Loads its tokenizer, or makes one of its class.
    """

    config: PretrainedConfig
    source: Literal["folder or cache", "known"]
    tokenizer: Callable[[], Any]


def find_original(location: str) -> Original:
    """What is known here of a model, without asking the hub.

    Args:
        location: Hub id, folder or ``pocket``, as in a specification.

    Raises:
        ModelError: Nothing is.
    """
    known = known_model(location)
    with without_hub():
        try:
            config = load_config(location)
        except ModelError as error:
            if known is not None:
                return Original(known.config, "known", known.tokenizer)
            raise ModelError(
                f"The architecture of {location!r} is not known here: it is no folder, not in the offline cache, and "
                "is no model of the shipped campaigns. Give any small model of its kind: --model-path NAME=DIR."
            ) from error
    return Original(config, "folder or cache", lambda: _cached_tokenizer(location))


def make_stand_in(original: Original, texts: Sequence[str], folder: Path, num_layers: int = LAYERS) -> None:
    """Write a model and tokenizer of the original's kind, as ``save_pretrained`` does; the same each time.

    Args:
        texts: What the tokenizer learns from.

    Raises:
        ModelError: transformers cannot make a small one of this architecture.
    """
    tokenizer = original.tokenizer()
    template = tokenizer.chat_template
    tokenizer = tokenizer.train_new_from_iterator(list(texts), PIECES, show_progress=False)
    tokenizer.chat_template = template  # it is not taken over
    tokenizer.model_max_length = max(SHORTEST_CONTEXT, tokenizer.model_max_length)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            small = small_config(original.config, tokenizer, num_layers)
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        model.save_pretrained(folder)
    except Exception as error:  # architectures check their numbers each in its own way
        reason = one_line(error, 200)
        raise ModelError(
            f"No small {original.config.model_type!r} model could be made: {reason} Give one: --model-path NAME=DIR."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)


def small_config(config: PretrainedConfig, tokenizer: Any, num_layers: int = LAYERS) -> PretrainedConfig:
    """The same architecture with few, narrow layers: tied as the real one, heads grouped where they are there."""
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


def _cached_tokenizer(location: str) -> Any:
    with without_hub():
        try:
            return load_tokenizer(location)
        except ModelError:  # the configuration alone was cached
            known = known_model(location)
            if known is None:
                raise
            return known.tokenizer()
