"""One training step side by side: a frozen model that only passes gradients through, PEFT's LoRA, DoRA and PiSSA, and
frozen cores. One process, one set of base weights, one batch; the contestants take turns step by step.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/step.py
    python benchmarks/step.py --quick

A step is forward, the loss over the completion (the last quarter of each row), backward, gradients clipped at 1,
fused AdamW, gradients dropped. The floor has no adapter: its input embeddings require a gradient, so that it flows
through every layer, which adapters spare themselves below the first core. Each step is divided by the floor's of the
same round; medians and quartiles of these ratios stand in the table. Saved activations are the bytes of the distinct
storages that autograd holds between forward and backward, weights and bases left out, with input gradients everywhere.

What was tried for the core, and what it gained:

- The product by hand (``adapter/core_product.py``), against autograd over three products: 0.3 % of an attention-only
  step, within the spread; 1 to 2 % with all linear layers. It also saves z in the model's dtype: half, in bfloat16.
- In the plain expression, ``x @ Q`` instead of ``linear(x, Q.mT)``: 112 us instead of 205 us for 512 tokens.
- AdamW ``fused=True``: 3.7 ms -> 0.43 ms for 144 cores; the lab's recipe uses it.

Tried and dropped, on a layer of 67 ms: adding in place without a function of its own (``add_``, ``baddbmm_``, a view's
``addmm_``; nothing, the backward pass still allocates); P and Q stored transposed (0.3 %, against files that need
contiguous tensors); one product for the Q of q, k and v (0.25 %, but ties modules together); one flat storage for all
cores (0.7 ms of a 144-layer step beyond fused AdamW, and DDP, FSDP and PEFT's files know single tensors); P or Q as
extra columns of W (almost free arithmetic, but a copy of every weight); W + s P R Q' formed at each call (no gain at
512 tokens, and 16-bit weights round the core away).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import FrozenCoreConfig, prepare_swap, swap_core
from frozencore.files.whole_file import write_json
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.run.accounting import values_at_once
from frozencore.tune.run.provenance import provenance
from frozencore.tune.training.state_held import states_of, total_bytes

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONTESTANTS = ("floor", "lora", "dora", "pissa", "frozencore")


@dataclass(frozen=True)
class Setting:
    """What is adapted, and the batch: rows x tokens."""

    targets: str
    num_rows: int
    num_tokens: int
    dtype: str = "float32"


SETTINGS = [
    Setting(targets, rows, tokens) for targets in ("attention", "all-linear") for rows, tokens in ((4, 128), (1, 512))
]


@dataclass(frozen=True)
class Measured:
    """One contestant in one setting.

    Attributes:
        step_s: Median, processor seconds.
        over_floor: Median, lower and upper quartile of its step over the floor's of the same round; likewise LoRA's.
        saved_bytes: Activations held for the backward pass.
        training_state_bytes: Gradients and optimiser states.
    """

    contestant: str
    step_s: float
    over_floor: tuple[float, float, float]
    over_lora: tuple[float, float, float]
    num_trainable: int
    saved_bytes: int
    saved_over_floor: float
    training_state_bytes: int


def wide_model(num_layers: int, width: int) -> nn.Module:
    """Random layers: arithmetic outweighs Python, as in a real model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=24 * width, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def adapt(base: nn.Module, contestant: str, targets: str, rank: int) -> nn.Module:
    """A contestant in training mode. It shares the base's weights, except those that PiSSA moves into its factors."""
    model = deepcopy(base)
    modules = ATTENTION if targets == "attention" else "all-linear"
    if contestant == "floor":
        model.requires_grad_(False)
        model.enable_input_require_grads()
    elif contestant == "frozencore":
        model = get_peft_model(model, FrozenCoreConfig(r=rank, target_modules=modules, constructor="random"))
    else:
        names = modules if isinstance(modules, str) else tuple(modules)
        model = METHODS[contestant].add(model, AdapterOptions(rank, names, seed=0, core={}))
    if contestant != "pissa":
        weights = dict(base.named_parameters())
        for name, parameter in model.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if not parameter.requires_grad:
                parameter.data = weights[plain].data
    return model.train()


def batch_of(setting: Setting, vocabulary: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (setting.num_rows, setting.num_tokens), generator=generator)
    kept = torch.arange(3 * setting.num_tokens // 4 - 1, setting.num_tokens - 1)
    targets = ids[:, kept + 1]
    return {"input_ids": ids, "logits_to_keep": kept, "labels": targets, "shift_labels": targets}


class Contestant:
    """A model with its optimiser; ``step`` is what is timed."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.model, self.batch = model, batch
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True) if self.trained else None

    def step(self, *, keep_gradients: bool = False) -> None:
        self.model(**self.batch).loss.backward()
        if self.optimizer is not None:
            nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            if not keep_gradients:
                self.optimizer.zero_grad()

    def training_state_bytes(self) -> int:
        if self.optimizer is None:
            return 0
        self.step(keep_gradients=True)
        gradients = sum(p.grad.nbytes for p in self.trained if p.grad is not None)
        self.optimizer.zero_grad()
        return gradients + total_bytes(states_of(self.optimizer))


def saved_bytes(model: Any, batch: dict[str, Tensor]) -> int:
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


def race(base: nn.Module, setting: Setting, rank: int, num_rounds: int) -> list[Measured]:
    """Alternating steps of all contestants, the order turned round every other time; one round before, untimed."""
    batch = batch_of(setting, base.config.vocab_size)
    base = deepcopy(base).to(getattr(torch, setting.dtype))
    contestants = {name: Contestant(adapt(base, name, setting.targets, rank), batch) for name in CONTESTANTS}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for round_ in range(num_rounds + 1):
        for name in CONTESTANTS[:: 1 if round_ % 2 else -1]:
            duration = timed(contestants[name].step)
            if round_:
                times[name].append(duration)
    state = {name: contestant.training_state_bytes() for name, contestant in contestants.items()}
    saved = {name: saved_bytes(contestant.model, batch) for name, contestant in reversed(contestants.items())}
    return [
        Measured(
            contestant=name,
            step_s=median(times[name]),
            over_floor=spread(times[name], times["floor"]),
            over_lora=spread(times[name], times["lora"]),
            num_trainable=values_at_once(contestants[name].model),
            saved_bytes=saved[name],
            saved_over_floor=saved[name] / saved["floor"] - 1,
            training_state_bytes=state[name],
        )
        for name in CONTESTANTS
    ]


def spread(times: list[float], reference: list[float]) -> tuple[float, float, float]:
    ratios = [mine / theirs for mine, theirs in zip(times, reference, strict=True)]
    lower, middle, upper = quantiles(ratios, n=4)
    return round(middle, 4), round(lower, 4), round(upper, 4)


def timed(run: Callable[[], Any]) -> float:
    """Processor seconds: on one thread, wall time without what other programs took."""
    start = time.process_time()
    run()
    return time.process_time() - start


def time_adapter_files(rank: int, num_runs: int) -> dict[str, float]:
    """Seconds to save, load and swap an adapter of 144 layers: the targets of Qwen2.5-3B, narrow."""
    base = wide_model(num_layers=36, width=64)
    config = FrozenCoreConfig(r=rank, target_modules=ATTENTION, constructor="random")
    model = get_peft_model(deepcopy(base), config)
    state = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    with TemporaryDirectory() as folder:
        actions: dict[str, Callable[[], Any]] = {
            "save_s": lambda: model.save_pretrained(folder),
            "load_s": lambda: PeftModel.from_pretrained(deepcopy(base), folder),
            "swap_from_folder_s": lambda: swap_core(model, folder),
            "swap_from_memory_s": lambda: swap_core(model, state),
            "swap_prepared_s": prepare_swap(model, state).swap_in,
        }
        return {name: median(timed(action) for _ in range(num_runs)) for name, action in actions.items()}


def show(setting: Setting, measured: list[Measured]) -> None:
    table = Table(title=f"{setting.targets}, {setting.num_rows} x {setting.num_tokens}, {setting.dtype}")
    for heading in ("", "step", "over floor", "over LoRA", "trained", "saved", "over floor", "gradients + states"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in measured:
        ratios = [f"{middle:.3f} ({low:.3f}-{high:.3f})" for middle, low, high in (one.over_floor, one.over_lora)]
        table.add_row(
            one.contestant, f"{one.step_s * 1e3:.0f} ms", *ratios, f"{one.num_trainable:,}",
            f"{one.saved_bytes / 2**20:.1f} MiB", f"{one.saved_over_floor:+.2%}", f"{one.training_state_bytes:,} B",
        )  # fmt: skip
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32"])
    parser.add_argument("--quick", action="store_true", help="Two narrow layers, short rows: does it run?")
    parser.add_argument("--out", type=Path, help="Default: results/step.json beside this file; none with --quick.")
    options = parser.parse_args()
    out = options.out or (None if options.quick else Path(__file__).parent / "results" / "step.json")

    base = wide_model(num_layers=2, width=64) if options.quick else wide_model(num_layers=8, width=512)
    num_rounds = 3 if options.quick else options.rounds
    rows = []
    for dtype in options.dtype:
        for setting in [Setting("attention", 2, 16)] if options.quick else SETTINGS:
            setting = Setting(setting.targets, setting.num_rows, setting.num_tokens, dtype)
            measured = race(base, setting, options.rank, num_rounds)
            show(setting, measured)
            rows += [asdict(setting) | asdict(one) for one in measured]
    files = time_adapter_files(options.rank, num_rounds)
    print("144 layers: " + ", ".join(f"{name[:-2]} {seconds * 1e3:.2f} ms" for name, seconds in files.items()))
    if out is not None:
        run = {"rank": options.rank, "rounds": num_rounds, "threads": torch.get_num_threads()}
        run |= {"cpus": sorted(os.sched_getaffinity(0)), "adapter_of_144_layers": files}
        write_json(out, {"benchmark": "training step", **run, "rows": rows, "provenance": provenance()})


if __name__ == "__main__":
    main()
