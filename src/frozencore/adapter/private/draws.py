"""The random numbers of private training: which rows a step takes, and its noise.

Both follow from a secret and the number of the step. A training that goes on from a checkpoint therefore repeats the
draws of the steps since, to the bit, and never uses a step's noise for another one. Who knows the secret can take the
noise out again, so it comes from the system's randomness and never from the seed of a run.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch
from torch import Tensor


def new_secret() -> str:
    """256 bits from the system's randomness, as hexadecimal digits."""
    return secrets.token_hex(32)


def drawn_rows(secret: str, step: int, num_rows: int, rate: float) -> list[int]:
    """Indices of the rows of a step, in order: each row is among them with probability ``rate``, by itself."""
    return np.flatnonzero(_generator(secret, "rows", step).random(num_rows) < rate).tolist()


def noise_of(secret: str, step: int, size: int) -> Tensor:
    """Independent standard normal numbers (size), float32, on the CPU."""
    return torch.from_numpy(_generator(secret, "noise", step).standard_normal(size).astype(np.float32))


def _generator(secret: str, purpose: str, step: int) -> np.random.Generator:
    """Its key has 128 bits; torch's own generator on a CPU would use 32 bits of a seed, which can be tried through."""
    digest = hashlib.sha256(f"{secret} {purpose} {step}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
