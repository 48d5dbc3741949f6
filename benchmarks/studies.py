"""The common parts of studies of quality: the model, what each line of results says, rows, bases and scores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from contestants import ATTENTION
from frozencore import frozen_core_layers
from frozencore.files.fingerprint import fingerprint_model
from frozencore.tune.load import load_model
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.provenance import source_commit
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.forward import take_off
from harness import RESULTS, Record


def begun(
    parser: argparse.ArgumentParser, *packages: str
) -> tuple[argparse.Namespace, PreTrainedModel, PromptEncoder, Record]:
    """The options of a study, its model on a CPU, the model's encoder, and what every line of the results says."""
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("--quick needs --out FILE, because nothing of it belongs into the results.")
    options.out = options.out or RESULTS / f"{options.name}.jsonl"
    torch.set_num_threads(1)
    name, dtype = ("pocket", "float32") if options.quick else (options.model, "bfloat16")
    model, tokenizer = load_model(name, dtype=dtype, device="cpu")
    model.set_attn_implementation("eager")  # on a CPU faster for short rows
    common = {
        "model": fingerprint_model(model),
        "dtype": dtype,
        "commit": source_commit(),
        "versions": {package: version(package) for package in ("torch", "transformers", "peft", *packages)},
    }
    return options, model, PromptEncoder(tokenizer, style="plain"), common


def token_rows(encoder: PromptEncoder, examples: Sequence[Example]) -> list[TokenRow]:
    """Examples as a training reads them."""
    return encoder.training_rows([encoder.render(example) for example in examples])


def attention_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The projections that adapters of these studies sit on, by name."""
    bare = METHODS["random"].add(model, AdapterOptions(1, ATTENTION, 0, {}), None)
    names = list(frozen_core_layers(bare, "default"))
    take_off(bare)
    return {name: model.get_submodule(name) for name in names}


def score(model: Any, encoder: PromptEncoder, examples: Sequence[Example]) -> Record:
    """Loss in nats per token of the right answers, and the share of rows whose right answer is the likeliest."""
    predictions = predict_choices(model, encoder, examples)
    tokens = encoder.choice_rows([encoder.render(example) for example in examples])
    gold = [example.choices.index(example.completion) for example in examples]
    nats = -sum(one.logprobs[place] for one, place in zip(predictions, gold, strict=True))
    count = sum(len(row.choice_ids[place]) for row, place in zip(tokens, gold, strict=True))
    return {"loss": nats / count, "accuracy": fmean(one.correct for one in predictions)}
