"""Sentence embeddings: a frozen core whose bases and training follow one contrastive loss.

    python examples/embeddings.py --model DIR --data pairs.jsonl --output out

``pairs.jsonl`` holds one ``{"text": ..., "like": ...}`` a line: two sentences that mean the same. In a batch every
other sentence is a negative.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from frozencore import FrozenCoreConfig, calibrate

TEMPERATURE = 0.05


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states of a sentence, of length 1."""
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive(model: nn.Module, pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
    """The mean over the sentences of a batch; each has the others' likes as its negatives."""
    here, like = (embed(model, side) for side in pair)
    return cross_entropy(here @ like.T / TEMPERATURE, torch.arange(len(here), device=here.device))


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = load_dataset("json", data_files=str(options.data), split="train")
    model = get_peft_model(
        AutoModel.from_pretrained(options.model), FrozenCoreConfig(r=options.rank, constructor="fcca")
    )

    def collate(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
        sides = ([row[side] for row in rows] for side in ("text", "like"))
        return tuple(dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt")) for texts in sides)

    batches = DataLoader(rows, batch_size=16, collate_fn=collate, shuffle=True, drop_last=True)
    found = calibrate(model, batches, num_examples=128, loss_fn=contrastive)
    cores = (p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(cores, lr=found.learning_rate, weight_decay=0.0)
    for epoch in range(options.epochs):
        losses = []
        for pair in batches:
            loss = contrastive(model.train(), pair)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}")
    model.save_pretrained(options.output / "adapter")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of an encoder or a language model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with text and like.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
