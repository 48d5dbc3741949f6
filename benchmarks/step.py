"""One training step side by side: a frozen model that only passes gradients through, PEFT's LoRA, DoRA and PiSSA, and
frozen cores. One process, one set of base weights, one batch; the contestants take turns step by step.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/step.py             # --quick: does it run?

A step is forward, the loss over the completion (the last quarter of each row), backward, gradients clipped at 1,
fused AdamW, gradients dropped. The floor has no adapter: its input embeddings require a gradient, so that it flows
through every layer, which adapters spare themselves below the first core. Each step is divided by the floor's of the
same round; medians and quartiles of these ratios stand in the table. Saved activations are the bytes of the distinct
storages that autograd holds between forward and backward, weights and bases left out, with input gradients everywhere.

Tried and kept: ``addmm`` onto the base output; ``x @ Q`` instead of ``linear(x, Q.mT)`` (112 us instead of 205 us
for 512 tokens); AdamW ``fused=True`` (0.43 ms instead of 3.7 ms for 144 cores).

Tried and dropped, on a layer of 67 ms: the product by hand, an autograd function that adds in place (1.5 % with all
linear layers, nothing on attention alone); adding in place without a function of its own (nothing); P and Q stored
transposed (0.3 %, against files that need contiguous tensors); one product for the Q of q, k and v (0.25 %, but ties
modules together); one flat storage for all cores (0.7 ms of a 144-layer step, and DDP, FSDP and PEFT's files know
single tensors); P or Q as extra columns of W (a copy of every weight); W + s P R Q' formed at each call (no gain at
512 tokens, and 16-bit weights round the core away).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contestants import (
    ATTENTION,
    CONTESTANTS,
    FLOOR,
    LABELS,
    RANK,
    UNCALIBRATED,
    Batch,
    Stepper,
    completion_batch,
    random_ids,
    random_qwen2,
    with_adapter,
)
from harness import medians, parser_of, ratios, table, take_turns, with_range, write_found


@dataclass(frozen=True)
class Setting:
    """The adapted layers, and the batch: rows x tokens."""

    targets: str
    num_rows: int
    num_tokens: int

    @property
    def modules(self) -> Any:
        return ATTENTION if self.targets == "attention" else self.targets


SETTINGS = [
    Setting(targets, rows, tokens) for targets in ("attention", "all-linear") for rows, tokens in ((4, 128), (1, 512))
]


def saved_bytes(model: Any, batch: Batch) -> int:
    """Bytes that autograd holds between forward and backward beside weights and bases."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    model.enable_input_require_grads()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    model.disable_input_require_grads()
    del loss
    return sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in own)


def race(base: nn.Module, batch: Batch, modules: Any, num_rounds: int) -> list[dict[str, Any]]:
    """Steps of all contestants in turns.

    ``over_floor`` has median, lower and upper quartile of a step over the floor's of the same round.
    """
    ours = {"frozencore": UNCALIBRATED}
    steppers = {name: Stepper(with_adapter(base, ours.get(name, name), modules)) for name in CONTESTANTS}
    times = take_turns({name: partial(stepper.step, batch) for name, stepper in steppers.items()}, num_rounds)
    step_s = medians(times)
    saved = {name: saved_bytes(stepper.model, batch) for name, stepper in reversed(steppers.items())}
    return [
        {
            "contestant": name,
            "step_s": step_s[name],
            "over_floor": ratios(times[name], times[FLOOR]),
            "saved_bytes": saved[name],
            "saved_over_floor": saved[name] / saved[FLOOR] - 1,
        }
        for name, stepper in steppers.items()
    ]


def table_of(found: Mapping[str, Any]) -> str:
    """Steps over the floor, median with quartiles, in every setting; and what is kept for the backward pass."""
    settings = list(dict.fromkeys((row["targets"], row["num_rows"], row["num_tokens"]) for row in found["rows"]))
    rows = []
    for contestant in dict.fromkeys(row["contestant"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["contestant"] == contestant]
        kept = " / ".join(f"{row['saved_over_floor']:+.1%}" for row in (own[0], own[-1]))
        rows.append([LABELS[contestant], *(with_range(row["over_floor"], ".3f") for row in own), kept])
    heads = [f"{targets}, {num_rows} x {num_tokens}" for targets, num_rows, num_tokens in settings]
    return table(["step over no adapter's", *heads, "kept activations, attention / all linear"], rows)


def main() -> None:
    parser = parser_of(__doc__, "step")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    base, rounds, settings = random_qwen2(8, 512), options.rounds, SETTINGS
    if options.quick:
        base, rounds, settings = random_qwen2(2, 64), 3, [Setting("attention", 2, 16)]
    rows = []
    for setting in settings:
        batch = completion_batch(random_ids(setting.num_rows, setting.num_tokens, base.config.vocab_size))
        rows += [asdict(setting) | one for one in race(base, batch, setting.modules, rounds)]
    print(table_of({"rows": rows}))
    write_found(options, rank=RANK, rounds=rounds, rows=rows)


if __name__ == "__main__":
    main()
