"""The cost of calibration beside PEFT's data-driven and SVD initialisations, which take turns in one run.

    python benchmarks/calibration.py            # minutes;  --quick: one tiny round that only shows that it runs

Times are seconds of CPU on one thread: on a shared machine the wall clock says who else was at work.

Every contestant starts from a copy of the same random model (eight layers of width 512) and ends with an adapter of
rank 16 on q, k, v and o that is ready to train; all read the same 128 examples of 64 to 128 tokens, half of them
completion, in the same padded batches; token frequencies fall as in text (Zipf). The floor is a plain forward and
backward pass over those batches, with gradients passed through every layer down to the embeddings, but for no weight.
It computes the logits that frozencore computes, those of positions where a row of the batch has a label; "floor, all
logits" is the model's own loss, which computes every position, as PEFT's initialisations do.

The last lines say where the seconds of an FCCA calibration go, from runs of their own: recording (a layer's rows
selected and summed into moments), bases (their SVDs and captures), and the rest, which is the model's passes.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import process_time
from typing import Any
from unittest import mock

import torch
from peft import EvaConfig, LoraConfig, LoraGAConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn

from contestants import ATTENTION, FLOOR, RANK, Batch, completions_only, plain_passes, random_qwen2
from frozencore import FrozenCoreConfig, calibrate
from frozencore.calibration import calibrate as calibrate_module
from frozencore.calibration.hooks import CalibrationPass
from harness import cpu_s, parser_of, table, write_found

FULL_FLOOR = "floor, all logits"
TARGETS = list(ATTENTION)


@dataclass(frozen=True)
class Scale:
    """The size of the comparison."""

    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    vocabulary: int = 12288
    examples: int = 128
    shortest: int = 64
    longest: int = 128
    batch_size: int = 8


QUICK = Scale(hidden=256, intermediate=256, layers=2, vocabulary=128, examples=32, shortest=24, longest=32)


def padded_batches(scale: Scale) -> list[Batch]:
    """Independent tokens, lengths drawn evenly; padded on the right, in the order drawn, as from a plain DataLoader."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(scale.shortest, scale.longest + 1, (scale.examples,), generator=generator).tolist()
    zipf = 1 / torch.arange(1, scale.vocabulary)
    batches = []
    for first in range(0, scale.examples, scale.batch_size):
        chunk = lengths[first : first + scale.batch_size]
        ids = 1 + torch.multinomial(zipf, len(chunk) * max(chunk), replacement=True, generator=generator)
        ids = ids.reshape(len(chunk), max(chunk))
        position, length = torch.arange(max(chunk)), torch.tensor(chunk)[:, None]
        real = position < length
        labels = ids.masked_fill(~real | (position < length // 2), -100)
        batches.append({"input_ids": ids * real, "attention_mask": real.long(), "labels": labels})
    return batches


def ours(constructor: str) -> Callable[[nn.Module, list[Batch]], None]:
    def run(model: nn.Module, batches: list[Batch]) -> None:
        config = FrozenCoreConfig(r=RANK, target_modules=TARGETS, constructor=constructor, task_type="CAUSAL_LM")
        calibrate(get_peft_model(model, config), batches, learning_rate=False, progress=False)  # as the peers

    return run


def lora(initialisation: str | bool, **options: Any) -> LoraConfig:
    return LoraConfig(
        r=RANK, target_modules=TARGETS, init_lora_weights=initialisation, task_type="CAUSAL_LM", **options
    )


def eva(model: nn.Module, batches: list[Batch]) -> None:
    """As in PEFT's documentation: ``rho = 2``, and batches until the components converge, over and over if need be."""
    adapted = get_peft_model(model, lora("eva", eva_config=EvaConfig()))
    initialize_lora_eva_weights(adapted, batches, show_progress_bar=False)


def lora_ga(model: nn.Module, batches: list[Batch]) -> None:
    config = lora("lora_ga", lora_ga_config=LoraGAConfig())

    def train_step() -> None:
        for batch in batches:
            model(**batch).loss.backward()

    preprocess_loraga(model, config, train_step)
    get_peft_model(model, config)


def corda(model: nn.Module, batches: list[Batch]) -> None:
    """Its hook takes one sequence at a time: a batch of several would not multiply."""
    config = lora("corda", corda_config=CordaConfig(corda_method="kpm"))

    def run_model() -> None:
        for batch in batches:
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
                model(input_ids=ids[mask][None])

    preprocess_corda(model, config, run_model=run_model)
    get_peft_model(model, config)


def pissa(model: nn.Module, batches: list[Batch]) -> None:
    """Reads no data: a full SVD of every weight."""
    get_peft_model(model, lora("pissa"))


CONTESTANTS: dict[str, Callable[[nn.Module, list[Batch]], None]] = {
    FLOOR: lambda model, batches: plain_passes(model, map(completions_only, batches)),
    FULL_FLOOR: plain_passes,
    "frozencore fcca": ours("fcca"),
    "frozencore eva": ours("eva"),
    "PEFT EVA": eva,
    "PEFT LoRA-GA": lora_ga,
    "PEFT CorDA": corda,
    "PEFT PiSSA": pissa,
}


def compare(scale: Scale, num_runs: int) -> dict[str, list[float]]:
    """Seconds of each run; in every round each contestant runs once. A tiny round before loads what is lazy."""
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for each_scale in (QUICK, *[scale] * num_runs):
        batches = padded_batches(each_scale)
        model = random_qwen2(
            each_scale.layers, each_scale.hidden, inner=each_scale.intermediate, vocabulary=each_scale.vocabulary
        ).eval()
        for name, contestant in CONTESTANTS.items():
            own = copy.deepcopy(model)
            gc.collect()
            times[name].append(cpu_s(partial(contestant, own, batches)))
    return {name: seconds[1:] for name, seconds in times.items()}


def trace(scale: Scale, num_runs: int) -> dict[str, float]:
    """Median processor seconds of the parts of an FCCA calibration."""
    seconds = dict.fromkeys(("recording", "bases"), 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begins = process_time()
            try:
                return function(*args, **options)
            finally:
                seconds[part] += process_time() - begins

        return run

    batches, runs = padded_batches(scale), []
    model = random_qwen2(scale.layers, scale.hidden, inner=scale.intermediate, vocabulary=scale.vocabulary).eval()
    with ExitStack() as undo:
        for place, name, part in (
            (CalibrationPass, "record", "recording"),
            (calibrate_module, "build_basis", "bases"),
            (calibrate_module, "capture_or_none", "bases"),
        ):
            undo.enter_context(mock.patch.object(place, name, timed(part, getattr(place, name))))
        for _ in range(num_runs):
            seconds.update(recording=0.0, bases=0.0)
            whole = cpu_s(partial(ours("fcca"), copy.deepcopy(model), batches))
            runs.append({"the model's passes": whole - sum(seconds.values()), **seconds})
    return {part: median(run[part] for run in runs) for part in runs[0]}


def table_of(found: Mapping[str, Any]) -> str:
    rows = [[row["contestant"], f"{row['median_s']:.1f}"] for row in found["rows"]]
    rows += [[f"frozencore fcca: {part}", f"{seconds:.2f}"] for part, seconds in found.get("parts_s", {}).items()]
    return table(["calibration", "seconds"], rows)


def main() -> None:
    parser = parser_of(__doc__, "calibration")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    scale, num_runs = (QUICK, 1) if options.quick else (Scale(), options.runs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of initialisations that change the base weights
        times = compare(scale, num_runs)
        parts = trace(scale, num_runs)
    rows = [{"contestant": name, "median_s": median(own), "runs_s": own} for name, own in times.items()]
    print(table_of({"rows": rows, "parts_s": parts}))
    write_found(options, scale=asdict(scale), rank=RANK, rows=rows, parts_s=parts)


if __name__ == "__main__":
    main()
