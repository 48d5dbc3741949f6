"""Where does whitening pay on a real model? FCCA against RawGrad and FiLoRA on one decoder layer at a time.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/whitening.py --data-root DIR    # two hours; goes on where it stopped
    OMP_NUM_THREADS=1 python benchmarks/whitening.py --data-root DIR --constructors fcca    # beside another process
    python benchmarks/whitening.py --quick --out FILE       # the pocket model and its rows: does it run?

Whitening matters where channels differ in size. The *spread* of a layer is its largest second moment of an input
channel over the median one, and the same of output errors, each a geometric mean over q, k, v and o.

A line of the results is one training. It has cores on q, k, v and o of one decoder layer (every third is measured), or
of a quarter of the layers: those with the largest spread or those with the smallest. Rows, steps, rank and scale are
the same for all. The learning rate of each constructor is searched on validation rows with the first seed, for one
layer (the middle one) and for a quarter (that with the largest spread). Losses are in nats per answer token, on rows
that no search saw.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from torch import Tensor
from transformers import PreTrainedModel

from contestants import ATTENTION, batches_by_length
from frozencore.calibration.collect import collect_moments
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import calibration_rows, split_task
from frozencore.tune.training.batching import pass_tokens_of
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from harness import Results, best_rate, parser_of
from studies import attention_layers, begun, chosen_bases, score, token_rows

CONSTRUCTORS = ("fcca", "rawgrad", "filora")
NEEDS: frozenset[MomentName] = frozenset({"cross", "input_square", "error_square", "input_outer", "error_outer"})
FIRST_RATE = 2e-2


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    task: str = "sst2"
    rows: int = 640
    scored: int = 400
    calibration: int = 128
    rank: int = 16
    every: int = 3
    quarter: int = 4
    seeds: tuple[int, ...] = (42, 43, 44)


QUICK = Scale("pocket-sentiment", rows=24, scored=8, calibration=8, rank=4, every=2, quarter=2, seeds=(42,))


def layer_of(name: str) -> int:
    """The decoder layer that a module belongs to."""
    (number,) = re.findall(r"\.layers\.(\d+)\.", f".{name}")
    return int(number)


def spread(squares: Sequence[Tensor]) -> float:
    """Largest over median channel, the geometric mean over some modules."""
    return math.exp(fmean(math.log(float(square.max() / square.median())) for square in squares))


@dataclass
class Study:
    """The model, the rows, and what has been measured."""

    model: PreTrainedModel
    encoder: PromptEncoder
    data_root: Path | None
    scale: Scale
    results: Results

    def __post_init__(self) -> None:
        sizes = {"num_train": self.scale.rows, "num_evaluation": self.scale.scored}
        self.parts = split_task(find_task(self.scale.task), self.data_root, **sizes)
        self.rows = token_rows(self.encoder, self.parts.train)

    @cached_property
    def moments(self) -> dict[str, LayerMoments]:
        """The moments that all constructors read, from one calibration."""
        rows = token_rows(self.encoder, calibration_rows(self.parts.train, self.scale.calibration))
        batches = batches_by_length(rows, self.encoder.pad_id, 8)
        return collect_moments(self.model, batches, attention_layers(self.model), needs=NEEDS)

    @cached_property
    def spreads(self) -> dict[int, tuple[float, float]]:
        """The spread of each decoder layer's input channels and output errors."""
        of_layers: dict[int, list[LayerMoments]] = defaultdict(list)
        for name, found in self.moments.items():
            of_layers[layer_of(name)].append(found)
        return {
            layer: (spread([one.a for one in several]), spread([one.d for one in several]))
            for layer, several in of_layers.items()
        }

    @cached_property
    def units(self) -> dict[str, list[int]]:
        """The layers that train together, by name."""
        layers = sorted(self.spreads)
        by_spread = sorted(layers, key=lambda layer: math.prod(self.spreads[layer]))
        count = len(layers) // self.scale.quarter
        return {
            **{str(layer): [layer] for layer in layers[:: self.scale.every]},
            "smallest": sorted(by_spread[:count]), "largest": sorted(by_spread[-count:]),
        }  # fmt: skip

    @cached_property
    def bases(self) -> dict[str, dict[str, Tensor]]:
        """Each constructor's bases of all layers, from the same moments."""
        options = self.options(sorted(self.spreads))
        return {
            constructor: chosen_bases(METHODS[constructor].add(self.model, options, None), moments=self.moments)
            for constructor in CONSTRUCTORS
        }

    def options(self, layers: Sequence[int], seed: int = 0) -> AdapterOptions:
        targets = rf".*layers\.({'|'.join(map(str, layers))})\.self_attn\.({'|'.join(ATTENTION)})"
        return AdapterOptions(self.scale.rank, targets, seed, {})

    def run(self, constructors: Sequence[str]) -> None:
        """Measure what is missing of these constructors."""
        for layer, (of_inputs, of_errors) in self.spreads.items():
            if not self.results.has(phase="spread", unit=str(layer)):
                self.results.add(phase="spread", unit=str(layer), input_spread=of_inputs, error_spread=of_errors)
        if not self.results.has(phase="base"):
            self.results.add(phase="base", **score(self.model, self.encoder, self.parts.evaluation))
        single = [unit for unit, layers in self.units.items() if len(layers) == 1]
        rates = {
            (constructor, quarter): self.search(constructor, "largest" if quarter else single[len(single) // 2])
            for constructor in constructors
            for quarter in (False, True)
        }
        for seed in self.scale.seeds:
            for unit in self.units:
                for constructor in constructors:
                    self.measure("final", constructor, unit, seed, rates[constructor, unit not in single])

    def search(self, constructor: str, unit: str) -> float:
        """The learning rate with the lowest loss on validation rows."""

        def losses_of(rates: Sequence[float]) -> dict[float, float]:
            return {rate: self.measure("search", constructor, unit, self.scale.seeds[0], rate) for rate in rates}

        return best_rate(FIRST_RATE, losses_of)[0]

    def measure(self, phase: str, constructor: str, unit: str, seed: int, rate: float) -> float:
        """The loss after a training, which is made unless it is there."""
        named = {"phase": phase, "constructor": constructor, "unit": unit, "seed": seed, "learning_rate": rate}
        if not self.results.has(**named):
            layers = self.units[unit]
            bases = {name: tensor for name, tensor in self.bases[constructor].items() if layer_of(name) in layers}
            model = METHODS[constructor].add(self.model, self.options(layers, seed), bases)
            recipe = Recipe(
                rate, warmup=0.1, epochs=1, batch_size=8, accumulation=1, seed=seed,
                pass_tokens=pass_tokens_of(self.model),
            )  # fmt: skip
            try:
                report = train(model, self.rows, recipe, pad_id=self.encoder.pad_id)
                model.eval()
                rows = self.parts.validation if phase == "search" else self.parts.evaluation
                found = score(model, self.encoder, rows)
            finally:
                take_off(model)
            self.results.add(**named, layers=layers, steps=report.num_steps, train_loss=report.final_loss, **found)
        loss: float = self.results.get(**named)["loss"]
        return loss


def main() -> None:
    parser = parser_of(__doc__, "whitening", "jsonl")
    parser.add_argument("--constructors", nargs="+", choices=CONSTRUCTORS, default=list(CONSTRUCTORS))
    options, model, encoder, common = begun(parser)
    scale = QUICK if options.quick else Scale()
    results = Results(options.out, common | {"scale": asdict(scale)}, by=("constructor", "unit", "seed"))
    Study(model, encoder, options.data_root, scale, results).run(options.constructors)


if __name__ == "__main__":
    main()
