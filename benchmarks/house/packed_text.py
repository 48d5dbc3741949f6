"""The corpus as one row of tokens: documents one after the other, each ended, in a file that is mapped, not read.

Kept in a folder, each file written whole, and made only where it is missing: ``tokenizer.json``, ``train.bin`` and
``valid.bin`` (16-bit ids). The tokenizer splits text as Qwen2's does, so whatever serves Qwen2 reads it.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from frozencore.whole_file import whole_file

END = "<|endoftext|>"
PATTERNS = {"train": "train-*.jsonl.xz", "valid": "valid.jsonl.xz"}


@dataclass(frozen=True)
class PackedText:
    """Token ids of training and held-out text, memory-mapped, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: NDArray[np.uint16]
    valid: NDArray[np.uint16]


def packed_text(corpus: Path, folder: Path, *, vocabulary: int) -> PackedText:
    """Read the tokens in ``folder``, made from ``corpus`` first where they are missing.

    Raises:
        SystemExit: No corpus is there, or the folder's tokenizer has another size.
    """
    made = folder / "tokenizer.json"
    if not made.exists():
        with whole_file(made) as aside:
            _trained(corpus, vocabulary).save(str(aside))
    tokenizer = Tokenizer.from_file(str(made))
    if tokenizer.get_vocab_size() != vocabulary:
        raise SystemExit(
            f"{made} has {tokenizer.get_vocab_size()} tokens, but {vocabulary} are asked for. Choose another folder."
        )
    for part, pattern in PATTERNS.items():
        if not (folder / f"{part}.bin").exists():
            with whole_file(folder / f"{part}.bin") as aside, aside.open("wb") as file:
                for ids in _encoded(tokenizer, _documents(corpus, pattern)):
                    file.write(ids.tobytes())
    train, valid = (np.memmap(folder / f"{part}.bin", dtype=np.uint16, mode="r") for part in PATTERNS)
    return PackedText(tokenizer, train, valid)


def _documents(corpus: Path, pattern: str) -> Iterator[str]:
    files = sorted(corpus.glob(pattern))
    if not files:
        raise SystemExit(
            f"The corpus is read from {pattern} in {corpus}, but none is there. Name its folder: --corpus."
        )
    for name in files:
        with lzma.open(name, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def _trained(corpus: Path, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every text has a row of tokens that decodes to it (up to NFC)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(corpus, PATTERNS["train"]), trainer)
    return tokenizer


def _encoded(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[NDArray[np.uint16]]:
    end = tokenizer.token_to_id(END)
    while several := list(islice(documents, 64 * (os.cpu_count() or 1))):
        for encoding in tokenizer.encode_batch_fast(several):
            yield np.array([*encoding.ids, end], dtype=np.uint16)


@dataclass(frozen=True)
class Rows:
    """Batches of ``num_rows`` rows of ``length`` tokens; which rows a step has depends on seed and step alone.

    Each pass over the tokens cuts them at other places and in another order.
    """

    tokens: NDArray[np.uint16]
    num_rows: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_pass < 1:
            raise SystemExit(
                f"One step takes {self.num_rows} rows of {self.length} tokens and one more row to shift them, but the "
                f"text has {len(self.tokens)} tokens. Take fewer or shorter rows, or more text."
            )

    @property
    def steps_per_pass(self) -> int:
        return (len(self.tokens) // self.length - 1) // self.num_rows

    def batch(self, step: int) -> torch.Tensor:
        """Token ids of one step, num_rows x length, int64 on the CPU."""
        this_pass, place = divmod(step, self.steps_per_pass)
        shift, order = _order(self.seed, this_pass, len(self.tokens) // self.length - 1, self.length)
        starts = shift + self.length * order[place * self.num_rows : (place + 1) * self.num_rows]
        return in_rows(self.tokens, starts, self.length)


def in_rows(tokens: NDArray[np.uint16], starts: NDArray[np.int64], length: int) -> torch.Tensor:
    """The rows that begin at ``starts``, int64."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length)].astype(np.int64))


@lru_cache(maxsize=2)
def _order(seed: int, this_pass: int, num_rows: int, length: int) -> tuple[int, NDArray[np.int64]]:
    generator = np.random.default_rng([seed, this_pass])
    return int(generator.integers(length)), generator.permutation(num_rows)
