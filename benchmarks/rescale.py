"""The same function in uneven channels: copies of a model whose channels are rescaled, for lab/campaigns/outliers.yaml.

    python benchmarks/rescale.py --model DIR --out runs/spreads     # spread-0, spread-1, spread-2

Each RMSNorm before attention multiplies channel i by t_i more, and column i of q, k and v is divided by it; row j of v
is multiplied by u_j, and the columns of o that read it are divided by it. With log t and log u normal of a standard
deviation, the spread, q, k, v and o see inputs and output errors as uneven as asked; the model computes what it did.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore.files.atomic_write import atomic_folder

SPREADS = (0.0, 1.0, 2.0)


@torch.no_grad()
def rescale(model: nn.Module, spread: float, *, seed: int = 0) -> None:
    """Rescale the channels that attention reads and writes, in place; the function stays, to rounding.

    Args:
        model: Blocks with ``input_layernorm`` and ``self_attn`` of separate q, k, v and o, as of Llama and Qwen2; in
            float32 at least, as 16 bits round the quotients.
        spread: Standard deviation of log t and log u; 0 changes nothing.

    Raises:
        SystemExit: It has no such blocks, or 16-bit weights.
    """
    blocks: list[Any] = [m for m in model.modules() if hasattr(m, "input_layernorm") and hasattr(m, "self_attn")]
    if not blocks or next(model.parameters()).dtype.itemsize < 4:
        raise SystemExit("Rescaling needs float32 weights and blocks with input_layernorm and self_attn, as of Llama.")
    generator = torch.Generator().manual_seed(seed)

    def factors(like: Tensor) -> Tensor:
        drawn = torch.randn(len(like), generator=generator, dtype=torch.float64)
        return torch.exp(spread * drawn).to(like.device)

    for block in blocks:
        attention = block.self_attn
        t = factors(block.input_layernorm.weight)
        times(block.input_layernorm.weight, t)
        for product in (attention.q_proj, attention.k_proj, attention.v_proj):
            times(product.weight, 1 / t)
        u = factors(attention.v_proj.weight)
        times(attention.v_proj.weight, u[:, None])
        if attention.v_proj.bias is not None:
            times(attention.v_proj.bias, u)
        times(attention.o_proj.weight, 1 / as_read(u, attention))


def times(weight: Tensor, factor: Tensor) -> None:
    """Multiply in float64, so that it is rounded once."""
    weight.copy_((weight.double() * factor).to(weight.dtype))


def as_read(u: Tensor, attention: Any) -> Tensor:
    """The factor of each column of o: that of its channel of v, which the heads of a group share."""
    heads = u.view(-1, attention.head_dim)
    return heads.repeat_interleave(attention.o_proj.in_features // len(u), dim=0).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a transformers folder")
    parser.add_argument("--out", type=Path, required=True, help="gets a folder spread-S for each spread S")
    parser.add_argument("--spreads", type=float, nargs="+", default=SPREADS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    for spread in asked.spreads:
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
        rescale(model, spread, seed=asked.seed)
        with atomic_folder(asked.out / f"spread-{spread:g}", overwrite=True) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    print(" ".join(f"--model-path spread-{spread:g}={asked.out / f'spread-{spread:g}'}" for spread in asked.spreads))


if __name__ == "__main__":
    main()
