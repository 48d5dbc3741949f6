"""What decides the pocket model's weights, and what a finished pretraining did: all that its card tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PretrainingRecipe:
    """Everything that decides the weights, apart from the number of steps.

    Attributes:
        window: Tokens per training window; documents are packed into it one after another.
        batch: Windows per step.
        num_corpus_tokens: Distinct tokens generated; a longer run passes over them again.
        lr_matrices: Peak learning rate of Muon, for the weight matrices of the layers.
        lr_rest: Peak learning rate of AdamW, for embeddings, biases and norms.
    """

    seed: int = 20
    window: int = 128
    batch: int = 16
    num_corpus_tokens: int = 6_000_000
    num_tokenizer_documents: int = 40_000
    lr_matrices: float = 0.015
    lr_rest: float = 2e-3
    warmup: float = 0.03
    weight_decay: float = 0.05


@dataclass(frozen=True)
class Pretraining:
    """What a finished run did.

    Attributes:
        loss: Mean over the last steps, nats per token.
        time_s: Wall-clock time of the steps alone.
    """

    num_parameters: int
    num_steps: int
    num_tokens: int
    loss: float
    time_s: float
