"""Private training: Opacus trains a frozen core with differential privacy.

    python examples/private.py --model DIR --data private.jsonl --public public.jsonl --output out

Both files hold one ``{"prompt": ..., "completion": ...}`` a line. P and Q are calibrated on the public rows, or are
random without them, so that only the cores learn from the private rows. R is a linear layer inside the adapted layer,
and Opacus' hooks give the gradient of each row. A step draws each row with the same probability (Poisson sampling),
clips the gradient of each row, and adds noise to their sum. Needs ``pip install opacus``. ``examples/README.md`` says
what this promises and what it does not.
"""

from __future__ import annotations

import argparse
import json
import secrets
from math import inf
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from peft import PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore import FrozenCoreConfig, calibrate

IGNORED = -100  # the label of a token without loss
Row = tuple[Tensor, Tensor, Tensor]  # input_ids, attention_mask and labels


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = read_rows(options.data, tokenizer, options.max_length)
    if options.delta * len(rows) >= 1:
        raise SystemExit(
            f"delta must be below one over the number of rows, 1/{len(rows)}, but {options.delta:g} was given: with it "
            f"a row might be published as it is. Give --delta {0.1 / len(rows):.0e}."
        )
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = on_public_basis(base.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, options)
    train(model, rows, options)
    # The last step is kept. To choose a step, a learning rate or a clip by scores on these rows spends more budget.
    model.save_pretrained(options.output / "adapter")


def read_rows(file: Path, tokenizer: Any, max_length: int) -> list[Row]:
    """Each row as tokens; the loss is on the completion and the end-of-sequence token."""
    rows: list[Row] = []
    for row in map(json.loads, filter(str.strip, file.open(encoding="utf-8"))):
        prompt = tokenizer(row["prompt"])["input_ids"]
        if len(prompt) >= max_length:
            raise SystemExit(
                f"A row has room for its completion, but row {len(rows) + 1} of {file} has a prompt of {len(prompt)} "
                f"tokens, and --max-length is {max_length}. Give more, or leave the row out."
            )
        completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = torch.tensor([*prompt, *completion][:max_length])
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        rows.append((ids, torch.ones_like(ids), labels))
    if not rows:
        raise SystemExit(f"Training takes one row at least, but {file} has none.")
    return rows


def collate(rows: list[Row]) -> list[Tensor]:
    """Pad rows on the right, where no row's own token sees the padding; an empty list if there is none."""
    fills = (0, 0, IGNORED) if rows else ()
    return [pad_sequence(list(part), True, fill) for part, fill in zip(zip(*rows, strict=True), fills, strict=True)]


def on_public_basis(base: Any, tokenizer: Any, options: argparse.Namespace) -> PeftModel:
    """Add cores of zeros on bases that no private row has touched."""
    constructor = "fcca" if options.public else "random"
    model = get_peft_model(base, FrozenCoreConfig(r=options.rank, constructor=constructor, task_type="CAUSAL_LM"))
    if options.public:
        rows = read_rows(options.public, tokenizer, options.max_length)
        names = ("input_ids", "attention_mask", "labels")
        batches = [collate(rows[i : i + 8]) for i in range(0, len(rows), 8)]
        on_device = [{name: part.to(model.device) for name, part in zip(names, b, strict=True)} for b in batches]
        calibrate(model, on_device, num_examples=128)
    return model


def train(model: PeftModel, rows: list[Row], options: argparse.Namespace) -> None:
    """Train the cores within the budget, and print after each epoch what is spent."""
    cores = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = max(round(len(rows) / options.rows_a_step), 1)  # of an epoch
    noise_multiplier = get_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=options.delta, sample_rate=1 / steps, steps=options.epochs * steps
    )
    draws = UniformWithReplacementSampler(
        num_samples=len(rows), sample_rate=1 / steps, steps=steps, generator=secret_generator("cpu")
    )
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.Adam(cores, lr=options.learning_rate),
        data_loader=DataLoader(rows, batch_sampler=draws, collate_fn=collate),
        poisson_sampling=False,  # done by `draws`; Opacus' own may take a step an epoch more than it has counted
        noise_multiplier=noise_multiplier,
        max_grad_norm=options.clip,
        noise_generator=secret_generator(model.device),
    )
    print(f"{len(rows)} rows, {steps} steps an epoch, noise multiplier {noise_multiplier:.3f}")
    for epoch in range(1, options.epochs + 1):
        for batch in loader:
            optimizer.zero_grad()
            if batch:
                row_losses(private, [part.to(model.device) for part in batch]).mean().backward()
            else:  # a step that draws no row is noise alone; to leave it out would reveal that
                for core in cores:
                    core.grad_sample = core.new_zeros(0, *core.shape)  # type: ignore[attr-defined]
            optimizer.step()
        spent = engine.get_epsilon(options.delta)
        print(f"epoch {epoch}: epsilon {spent:.3f} of {options.epsilon:g} spent at delta {options.delta:g}")
    private.to_standard_module()  # removes the hooks


def row_losses(model: Any, batch: list[Tensor]) -> Tensor:
    """The loss of each row (rows): the mean over its own tokens, so that no row changes another's gradient."""
    ids, mask, labels = batch
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    targets = labels[:, 1:]
    nats = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return nats.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


def secret_generator(device: Any) -> torch.Generator:
    """A generator that the system's randomness seeds: whoever knows the seed can remove the noise.

    On a CPU torch uses 32 bits of the seed.
    """
    return torch.Generator(device).manual_seed(secrets.randbits(63))


def above_zero(text: str) -> float:
    """A finite number above zero, for argparse."""
    if not 0 < (value := float(text)) < inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above zero, but is {text}")
    return value


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but is {text}")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a causal language model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of the private rows: prompt and completion.")
    parser.add_argument("--public", type=Path, help="JSONL of rows that may be known, for the bases. Default: random.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epsilon", type=above_zero, default=8.0, help="The budget; smaller is more private.")
    parser.add_argument("--delta", type=above_zero, default=1e-5, help="The probability that the bound fails.")
    parser.add_argument("--clip", type=above_zero, default=1.0, help="The largest norm of a row's gradient.")
    parser.add_argument("--rows-a-step", type=count, default=32, help="On average, about. More need less noise each.")
    parser.add_argument("--epochs", type=count, default=1)
    parser.add_argument("--learning-rate", type=above_zero, default=1e-2)
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--max-length", type=count, default=512, help="Later tokens of a row are cut off.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
