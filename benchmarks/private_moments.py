"""Is it worth a part of the budget to choose the basis from private rows? Noisy moments on SmolLM2.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/private_moments.py --data-root DIR      # half an hour; resumes
    python benchmarks/private_moments.py --quick --out FILE     # the pocket model and its rows: does it run?

A row's moments are its cross moments G and second moments a and d in all layers. The row's G is cut to the median
length over public rows, its a and d too, each over all layers at once; then the sums over the rows get normal noise, a
Gaussian mechanism with all rows in one step. ``whitened`` cuts and noises G in the metric of the public rows' a and d,
and publishes no a and d of its own.

The first lines say which share of the private rows' whitened moment each basis holds, if the whole epsilon is spent on
it. The final lines are trainings at a total epsilon: half of epsilon and of delta for the basis, half for the training
(their sums bound the whole). Rate and clipping length are those that private.py found for a basis of public rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor

from contestants import batches_by_length
from frozencore.adapter.layer import frozen_core_layers
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import share_held
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening, damped
from frozencore.tune.rows import TokenRow
from frozencore.tune.scoring.forward import completion_logprobs, take_off
from harness import Results, parser_of
from private import QUICK, ROWS_AT_ONCE, Scale, Study
from studies import begun, chosen_bases, score

METRIC = Whitening()

WAYS = {"moments": ("cross", "input_square", "error_square"), "whitened": ("cross",)}
"""The sums that get noise; the others are those of the public rows."""
RATE, CLIP = 1e-2, 0.1
LEAST = 1e-3  # of a noisy second moment, in units of its mean

Seen = dict[str, tuple[Tensor, Tensor]]
"""By layer: the inputs x (rows, t, n) and output errors (rows, t, m) of a batch, float32, zero at padding."""
Sums = dict[str, dict[str, Tensor]]
"""By name of a sum, as in LayerMoments, and by layer."""


def squared_length(part: str, x: Tensor, delta: Tensor) -> Tensor:
    """The squared length of each row's part of a sum, in one layer."""
    if part == "cross":
        return ((x @ x.mT) * (delta @ delta.mT)).sum((1, 2))
    return (x if part == "input_square" else delta).square().sum(1).square().sum(1)


def lengths(part: str, seen: Seen) -> Tensor:
    """The length of each row's part of a sum, over all layers."""
    return torch.stack([squared_length(part, *pair) for pair in seen.values()]).sum(0).sqrt()


def weighted(part: str, weights: Tensor, x: Tensor, delta: Tensor) -> Tensor:
    """The sum over the rows of a batch, each with a weight, in one layer."""
    if part == "cross":
        return (delta * weights[:, None, None]).flatten(0, 1).mT @ x.flatten(0, 1)
    return weights @ (x if part == "input_square" else delta).square().sum(1)


class Moments:
    """The moments of public and of private rows, and those of private rows with noise.

    Attributes:
        public, private: Without noise.
        cut: By way, the sums in which no row's part is longer than ``longest``.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        public_rows = study.public_rows
        self.num_tokens = sum(len(row.input_ids) for row in study.rows)
        self.metric: dict[str, tuple[Tensor, Tensor]] = {}
        self.cut: dict[str, Sums] = {}
        self.longest: dict[str, dict[str, float]] = {}
        self.model = study.adapter("random", study.scale.seeds[0], None)  # its cores are zero
        try:
            sums = self.sums(public_rows, WAYS["moments"])
            self.public = self.moments(sums, sum(len(row.input_ids) for row in public_rows))
            self.private = self.moments(self.sums(study.rows, WAYS["moments"]), self.num_tokens)
            for way, parts in WAYS.items():
                if way == "whitened":
                    self.metric = {name: roots(layer) for name, layer in self.public.items()}
                found = {part: torch.cat([lengths(part, seen) for seen in self.seen(public_rows)]) for part in parts}
                self.longest[way] = {part: float(several.median()) for part, several in found.items()}
                self.cut[way] = self.sums(study.rows, parts, self.longest[way])
        finally:
            take_off(self.model)

    def seen(self, rows: Sequence[TokenRow]) -> Iterator[Seen]:
        """Run forward and backward passes with each row's own loss, the mean over its completion tokens."""
        found: dict[str, list[Tensor]] = {}

        def watch(name: str, _: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = [args[0].detach()]
            output.register_hook(found[name].append)

        layers = frozen_core_layers(self.model, "default")
        hooks = [layer.register_forward_hook(partial(watch, name)) for name, layer in layers.items()]
        try:
            for batch in batches_by_length(rows, self.study.encoder.pad_id, ROWS_AT_ONCE):
                logprobs, counted = completion_logprobs(self.model, batch)
                (-logprobs.sum(1) / counted.sum(1)).sum().backward()
                self.model.zero_grad()
                text = batch["attention_mask"][..., None].float()
                yield {
                    name: (x * text * of_x, delta * text * of_delta)
                    for name, (x, delta) in found.items()
                    for of_x, of_delta in [self.metric.get(name, (1.0, 1.0))]
                }
        finally:
            for hook in hooks:
                hook.remove()

    def sums(self, rows: Sequence[TokenRow], parts: Sequence[str], longest: Mapping[str, float] | None = None) -> Sums:
        """Sums over the rows, in which no row's part is longer than ``longest``."""
        totals: Sums = {part: {} for part in parts}
        for seen in self.seen(rows):
            for part, of_layers in totals.items():
                length = lengths(part, seen)
                weights = torch.ones_like(length) if longest is None else (longest[part] / length).clamp_max(1.0)
                for name, pair in seen.items():
                    of_layers[name] = of_layers.get(name, 0.0) + weighted(part, weights, *pair)
        return totals

    def moments(self, sums: Sums, num_tokens: int) -> dict[str, LayerMoments]:
        return {
            name: LayerMoments(num_tokens, **{part: of_layers[name] for part, of_layers in sums.items()})
            for name in sums["cross"]
        }

    def noisy(self, way: str, epsilon: float | None, seed: int) -> dict[str, LayerMoments]:
        """The private rows' moments with noise for that epsilon; only cut without one."""
        sigma = 0.0
        if epsilon is not None:
            sigma = get_noise_multiplier(
                target_epsilon=epsilon, target_delta=self.study.scale.delta, sample_rate=1.0, steps=1, accountant="rdp"
            )
        noise = torch.Generator().manual_seed(seed)  # nothing is published
        found: Sums = {}
        for part, of_layers in self.cut[way].items():
            deviation = sigma * self.longest[way][part] * len(WAYS[way]) ** 0.5
            found[part] = {
                name: total + deviation * torch.randn(total.shape, generator=noise) for name, total in of_layers.items()
            }
        for name, layer in self.public.items():
            if way == "whitened":
                of_x, of_delta = self.metric[name]
                found["cross"][name] = found["cross"][name] / of_delta[:, None] / of_x
                found.setdefault("input_square", {})[name] = layer.a * self.num_tokens
                found.setdefault("error_square", {})[name] = layer.d * self.num_tokens
            else:
                for part in ("input_square", "error_square"):
                    square = found[part][name]
                    found[part][name] = square.clamp_min(LEAST * float(square.mean().abs()))
        return self.moments(found, self.num_tokens)

    def share(self, bases: Mapping[str, Tensor]) -> float:
        """The share of the private rows' whitened moment that bases hold, in the mean over layers."""
        return fmean(
            share_held(layer, known_basis(bases[f"{name}.P"], bases[f"{name}.Q"])).held
            for name, layer in self.private.items()
        )


def roots(layer: LayerMoments) -> tuple[Tensor, Tensor]:
    """Vectors that whiten x (n) and the output error (m), channel by channel."""
    of_x, of_delta = (damped(square, c) for square, c in zip((layer.a, layer.d), METRIC.damping_by_side, strict=True))
    return of_x.rsqrt().float(), of_delta.rsqrt().float()


class Comparison:
    """Measure what is missing: shares first, then trainings."""

    def __init__(self, study: Study, results: Results) -> None:
        self.study, self.results, self.moments = study, results, Moments(study)

    def bases(self, moments: Mapping[str, LayerMoments] | None, seed: int) -> dict[str, Tensor]:
        """FCCA's bases from moments, random ones without."""
        model = self.study.adapter("public" if moments else "random", seed, None)
        return chosen_bases(model, moments=moments) if moments else chosen_bases(model)

    def run(self) -> None:
        first = self.study.scale.seeds[0]
        known = {"own": self.moments.private, "public": self.moments.public, "random": None}
        for basis, moments in known.items():
            self.held(lambda moments=moments: moments, basis=basis, epsilon=None, seed=first)
        for way in WAYS:
            for epsilon in (None, *reversed(self.study.scale.epsilons)):
                self.held(lambda way=way, epsilon=epsilon: self.moments.noisy(way, epsilon, first),
                          basis=way, epsilon=epsilon, seed=first)  # fmt: skip
        for seed in self.study.scale.seeds:
            for epsilon in self.study.scale.epsilons[1:] or self.study.scale.epsilons:
                self.trained("whitened", epsilon, seed)

    def held(self, moments: Callable[[], Mapping[str, LayerMoments] | None], **named: Any) -> None:
        """The line of a basis: the share of the private rows' whitened moment that it holds."""
        if not self.results.has(phase="share", **named):
            bases = self.bases(moments(), named["seed"])
            self.results.add(phase="share", **named, share=self.moments.share(bases))

    def trained(self, way: str, epsilon: float, seed: int) -> None:
        """The line of a private training, the first half of whose epsilon went into the basis."""
        named = {"phase": "final", "basis": way, "epsilon": epsilon, "seed": seed}
        if self.results.has(**named):
            return
        bases = self.bases(self.moments.noisy(way, epsilon / 2, seed), seed)
        model = self.study.adapter("public", seed, bases)
        try:
            found = self.study.trained(model, epsilon / 2, seed, RATE, CLIP)
            found |= score(model, self.study.encoder, self.study.parts["evaluation"])
        finally:
            take_off(model)
        self.results.add(**named, learning_rate=RATE, clip=CLIP, share=self.moments.share(bases), **found)


def main() -> None:
    parser = parser_of(__doc__, "private_moments", "jsonl")
    options, model, encoder, common = begun(parser, "opacus")
    task, whole = ("pocket-sentiment", QUICK) if options.quick else ("sst2", Scale())
    scale = replace(whole, delta=whole.delta / 2)  # for the basis as for the training
    results = Results(options.out, {"task": task, "scale": asdict(whole)} | common, by=("basis", "epsilon", "seed"))
    Comparison(Study(model, encoder, task, options.data_root, scale, results), results).run()


if __name__ == "__main__":
    main()
