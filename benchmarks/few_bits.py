"""What fewer bits cost the adapters of ``datasets_quality.py``, and other ways to few bits than the library's.

    OMP_NUM_THREADS=1 python benchmarks/few_bits.py --data-root DIR --work FOLDER --first 12     # resumes

``--work`` is the folder of that study. The first seed's shared cores of rank 16 are read again and rounded:

    row           a scale a row of R, not one a layer
    turned        P and Q turned at random, which spreads large values
    second order  the codes that change least by ``tr(D E A Eᵀ)``, E the error of R: A = E[zzᵀ] of the core's inputs
                  z = Qᵀx and D = E[eeᵀ] of the errors e = Pᵀg, both r x r, of the calibration rows at R = 0; one code
                  after another, and the scale by least squares
    trained       the last of four epochs reads rounded cores, its gradients go to the values (straight-through)
    LoRAQuant     LoRAs of rank 16 by that method, see ``loraquant.py``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import figures
from datasets_quality import ARMS, BITS, LORA, Datasets, bytes_at, rounded, study_of, study_parser
from datasets_tables import DIGITS, NAMES, apart, by_set, in_words, interval_of
from frozencore import Core, basis_id, frozen_core_layers, swap_core
from frozencore.maths.linalg import seeded_generator, thin_qr
from frozencore.maths.quantise import levels, quantise
from frozencore.tune.rows.splits import calibration_rows
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.training.recipe import Recipe
from harness import RESULTS, Record, lines_of, table
from loraquant import loraquant
from tenant_study import RANK, SEED, Adapters, Job, put_factors, zero_core

Arm = tuple[str, int]
WAYS = {"row": (4, 3, 2, 1), "turned": (4, 2), "second order": (4, 2, 1), "trained": (2,)}
LORAQUANT = ((2, 0.8), (3, 0.9))
SWEEPS = 3
ROWS = 4
"""Rows of each development set of which A and D are made."""
LAST = 0.25
"""The share of the steps, the last ones, that read rounded cores."""


class Tried(Datasets):
    """Adapters that were trained before, rounded in other ways."""

    def run(self, core_rate: float, lora_rate: float, first: int | None) -> None:
        rank, names = self.rank, self.shortest(first)
        jobs: list[Job] = [(name, core_rate) for name in names]
        self.trained("fcca", rank, jobs)
        for way, every in WAYS.items():
            for bits in every:
                how = self.trained_rounded if way == "trained" else partial(self.put_rounded, way)
                self.measure(f"fcca, {way}, {bits} bits", rank, jobs, partial(how, bits))
        jobs = [(name, lora_rate) for name in names]
        self.trained("lora", self.lora_rank, jobs)
        for bits, ratio in LORAQUANT:
            self.measure(f"lora, {bits}@{ratio:g}", self.lora_rank, jobs, partial(self.loraquants, bits, ratio))

    def put_rounded(self, way: str, bits: int, jobs: Sequence[Job]) -> Adapters:
        """Stored cores, rounded in a way of :data:`WAYS`."""
        with self.adapted("random", self.rank, 0, self.basis("fcca", self.rank)) as model:
            for job in jobs:
                stored = self.stored(self.file_of("fcca", self.rank, SEED, job), dict)
                cores = torch.cat(list(stored.values())).view(-1, self.rank, self.rank)
                scales = len(cores) * (self.rank if way == "row" else 1)
                if way == "row":
                    found = rounded(cores, bits)
                elif way == "turned":
                    found = turned(cores, bits)
                else:
                    fisher = self.stored(f"fisher-{self.rank}-{SEED}", partial(self.fisher, model))
                    A, D = (torch.stack([fisher[f"{layer}.{side}"] for layer in stored]) for side in "AD")
                    found = by_second_order(cores, bits, A, D)
                swap_core(model, Core.of(basis_id(model), dict(zip(stored, found, strict=True))))
                yield model, job, {"value_bytes": bytes_at(bits, cores.numel(), scales)}

    def trained_rounded(self, bits: int, jobs: Sequence[Job]) -> Adapters:
        """Cores whose last steps read rounded values."""
        with self.adapted("random", self.rank, 0, self.basis("fcca", self.rank)) as model:
            for name, rate in jobs:
                swap_core(model, zero_core(model))
                cores = [layer.core("default") for layer in frozen_core_layers(model, "default").values()]
                rows = self.train_rows[name]
                recipe: Recipe = self.recipe(rows, rate)
                steps = recipe.epochs * -(-len(rows) // recipe.batch_size)
                with reading_rounded(model, cores, bits, steps - int(LAST * steps)):
                    about = self.train_alone(model, name, rate)
                round_all(cores, bits)
                values = sum(R.numel() for R in cores)
                yield model, (name, rate), {**about, "value_bytes": bytes_at(bits, values, len(cores))}

    def loraquants(self, bits: int, ratio: float, jobs: Sequence[Job]) -> Adapters:
        with self.adapted("lora", self.lora_rank) as model:
            for job in jobs:
                update = self.update_of(self.file_of("lora", self.lora_rank, SEED, job))
                found, size = loraquant(update, bits, ratio)
                put_factors(model, found)
                yield model, job, {"value_bytes": size // 8}

    def fisher(self, model: PeftModel) -> dict[str, Tensor]:
        """A = Σ zzᵀ and D = Σ eeᵀ of every layer, over the tokens of some calibration rows, at R = 0."""
        swap_core(model, zero_core(model))
        found: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}

        def add(name: str, vectors: Tensor) -> None:
            found[name] = found.get(name, torch.zeros(())) + vectors.mT @ vectors

        def before(name: str, layer: Any, args: tuple[Tensor, ...]) -> None:
            inputs[name] = args[0].detach()[0]

        def after(name: str, layer: Any, _: Any, slopes: tuple[Tensor, ...]) -> None:
            P, Q, _ = layer.factors("default")
            add(f"{name}.A", inputs[name] @ Q)
            add(f"{name}.D", slopes[0][0] @ P)

        hooks = [
            hook
            for name, layer in frozen_core_layers(model, "default").items()
            for hook in (
                layer.register_forward_pre_hook(partial(before, name)),
                layer.register_full_backward_hook(partial(after, name)),
            )
        ]
        model.eval()
        for name in self.calibrated:
            for row in self.tokens(calibration_rows(self.tenants[name].rows["train"], ROWS, seed=SEED)):
                batch = PaddingCollator(self.encoder.pad_id)([row])
                (model(**batch).loss * (batch["labels"] != -100).sum()).backward()
        model.zero_grad()
        for hook in hooks:
            hook.remove()
        return found


def turned(cores: Tensor, bits: int) -> Tensor:
    """Cores (layers x r x r) rounded between two random rotations, which P and Q take in."""
    layers, rank, _ = cores.shape
    draws = torch.randn(2 * layers, rank, rank, generator=seeded_generator(SEED, "turned"), dtype=torch.float64)
    left, right = torch.stack([thin_qr(draw)[0] for draw in draws]).float().split(layers)
    return left @ all_rounded(left.mT @ cores @ right, bits) @ right.mT


def all_rounded(cores: Tensor, bits: int) -> Tensor:
    """Cores (layers x r x r) at the nearest levels, with a scale a layer."""
    return rounded(cores.flatten(1), bits).view_as(cores)


def by_second_order(cores: Tensor, bits: int, A: Tensor, D: Tensor) -> Tensor:
    """Cores (layers x r x r) at levels that change ``tr(D E A Eᵀ)`` least, one code after another."""
    rank, most = cores.shape[-1], 2 ** (bits - 1) - 0.5
    R, A, D = cores.double(), with_ridge(A), with_ridge(D)
    codes, scale = quantise(cores.flatten(1), bits)
    steps = levels(codes, torch.ones((), dtype=torch.float64), bits).view_as(R)
    s = scale.double()
    for _ in range(SWEEPS):
        for i in range(rank):
            for j in range(rank):
                error = s[:, None, None] * steps - R
                slope = torch.einsum("lm,lmn,ln->l", D[:, i], error, A[:, :, j])
                wanted = steps[:, i, j] - slope / (s * D[:, i, i] * A[:, j, j]).clamp_min(1e-300)
                steps[:, i, j] = (wanted.floor() + 0.5).clamp(-most, most)
        weighed = D @ steps @ A
        s = ((R * weighed).sum((1, 2)) / (steps * weighed).sum((1, 2))).half().double()
    return (s[:, None, None] * steps).float()


def with_ridge(M: Tensor) -> Tensor:
    """Each matrix with a hundredth of its mean diagonal added to that, in float64."""
    M = M.double()
    middle = M.diagonal(dim1=1, dim2=2).mean(1)
    return M + 0.01 * middle[:, None, None] * torch.eye(M.shape[-1], dtype=torch.float64)


def round_all(cores: Sequence[nn.Parameter], bits: int) -> None:
    with torch.no_grad():
        for R, found in zip(cores, all_rounded(torch.stack(list(cores)), bits), strict=True):
            R.copy_(found)


@contextmanager
def reading_rounded(model: nn.Module, cores: Sequence[nn.Parameter], bits: int, first: int) -> Iterator[None]:
    """From the step ``first`` on the model reads rounded cores, and the optimizer moves the values themselves."""
    held: list[Tensor] = []
    step = 0

    def before(*_: Any) -> None:
        if model.training and step >= first:
            held[:] = [R.detach().clone() for R in cores]
            round_all(cores, bits)

    def restore(*_: Any) -> None:
        nonlocal step
        step += 1
        with torch.no_grad():
            for R, value in zip(cores, held, strict=False):
                R.copy_(value)
        held.clear()

    hooks = [
        model.register_forward_pre_hook(before),
        register_optimizer_step_pre_hook(restore),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --------------------------------------------------------------------------------------------------------------- tables

CORES: Arm = ("fcca", RANK)
ADAPTERS: Mapping[str, Arm] = {
    "LoRA, r = 16": ("lora", LORA),
    "LoRA, r = 1": ("lora", 1),
    "core, r = 16, shared basis": CORES,
}
"""The adapters of the README, as it names them."""
HARMLESS = {"loss": 0.005, "exact": 0.5}
"""What bits may cost at most, by the end of the 95 % interval that is a loss; set when twelve data sets were known."""


def bits_table(lines: Sequence[Record]) -> str:
    """What fewer bits cost each arm, and the bytes of its values."""
    rows = []
    for arm, rank in ARMS:
        for bits in BITS:
            name = at_bits((arm, rank), bits)
            differences = {measure: apart(lines, name, (arm, rank), measure) for measure in DIGITS}
            if len(differences["loss"]) < 2:
                continue
            about = [
                f"{NAMES[arm]}, r = {rank}",
                str(bits),
                f"{bytes_of(lines, name):,}",
                str(len(differences["loss"])),
            ]
            rows.append(about + [in_words(differences[measure], digits) for measure, digits in DIGITS.items()])
    heads = ["adapter", "bits", "bytes of values", "data sets", "loss, minus 32 bits", "exact match, minus 32 bits"]
    return table(heads, rows) if rows else "Not measured yet.\n"


def at_bits(arm: Arm, bits: int) -> Arm:
    return arm if bits == 32 else (f"{arm[0]}, {bits} bits", arm[1])


def fewest_bits(lines: Sequence[Record], arm: Arm) -> int:
    """The fewest bits of an arm that cost at most what is harmless."""
    found = 32
    for bits in BITS:
        differences = {measure: apart(lines, at_bits(arm, bits), arm, measure) for measure in HARMLESS}
        if any(len(one) < 2 for one in differences.values()):
            break
        _, _, loss = interval_of(differences["loss"])
        _, exact, _ = interval_of(differences["exact"])
        if loss > HARMLESS["loss"] or exact < -HARMLESS["exact"]:
            break
        found = bits
    return found


def bytes_of(lines: Sequence[Record], arm: Arm) -> int:
    """Bytes of the values of an arm's adapter."""
    line = next(line for line in lines if (line["arm"], line["rank"], line["phase"]) == (*arm, "final"))
    return line.get("value_bytes") or line["memory_bytes"]


SHOWN: Sequence[tuple[str, str, Arm, Sequence[int]]] = [
    ("core, r = 16, one basis for all", figures.ORANGE, CORES, (32, 4, 2)),
    ("LoRA, r = 1", figures.BLUE, ("lora", 1), (32, 4, 2)),
    ("LoRA, r = 16", figures.NAVY, ("lora", LORA), (4,)),
]


def picture(lines: Sequence[Record]) -> str:
    """The mean loss of the data sets that all have, against the bytes of an adapter's values."""
    arms = [at_bits(arm, bits) for _, _, arm, every in SHOWN for bits in every]
    losses = {arm: by_set(lines, arm, "loss") for arm in arms}
    common = sorted(set.intersection(*(set(of) for of in losses.values())))

    def mark(arm: Arm, bits: int) -> tuple[float, str, figures.Point]:
        name = at_bits(arm, bits)
        mean = sum(losses[name][one] for one in common) / len(common)
        middle, low, high = interval_of({one: losses[name][one] - losses[CORES][one] for one in common})
        return bytes_of(lines, name), f"{bits} bits", figures.Point(mean, mean + low - middle, mean + high - middle)

    kinds = [figures.Kind(label, colour, [mark(arm, bits) for bits in every]) for label, colour, arm, every in SHOWN]
    note = [
        f"SmolLM2-135M-Instruct, mean of {len(common)} data sets, one seed. Lower and to the left is better.",
        "Bars: 95 % intervals of the difference from the core at 32 bits. The basis is not counted.",
    ]
    about = (
        "The mean held-out loss of data sets against the bytes of an adapter's values; the numbers are in the table."
    )
    heading = [("held-out loss, nats a token", kinds)]
    return figures.planes(heading, "bytes of an adapter's values", TITLE, about, note, of_bytes=True)


TITLE = "At 4 bits a core takes 16 KB, and we found no loss"
WAY_NAMES = {
    "row": "a scale a row of R", "turned": "P and Q turned at random", "second order": "codes by the second order",
    "trained": "the last epoch trained on rounded values",
}  # fmt: skip


def table_of(lines: Sequence[Record], study: Sequence[Record]) -> str:
    """Each way beside 32 bits, and beside the library's own rounding to as many bits."""
    rows = []
    for title, name, own, whole in (*cores_tried(), *loras_tried()):
        found = [*lines, *study]
        count = len(apart(found, name, whole, "loss"))
        if count < 2:
            continue
        cells = [title, f"{bytes_of(lines, name):,}", str(count)]
        for measure, digits in DIGITS.items():
            cells += [in_words(apart(found, name, other, measure), digits) if other else "" for other in (whole, own)]
        rows.append(cells)
    heads = ["way", "bytes of values", "data sets", "loss, minus 32 bits", "minus the library's bits",
             "exact match, minus 32 bits", "minus the library's bits"]  # fmt: skip
    return table(heads, rows) if rows else "Not measured yet.\n"


def cores_tried() -> list[tuple[str, Arm, Arm | None, Arm]]:
    """Each way's title, its arm, the library's rounding to as many bits, and the arm of 32 bits."""
    return [
        (
            f"{WAY_NAMES[way]}, {bits} bits",
            (f"fcca, {way}, {bits} bits", RANK),
            at_bits(CORES, bits),
            CORES,
        )
        for way, every in WAYS.items()
        for bits in every
    ]


def loras_tried() -> list[tuple[str, Arm, Arm | None, Arm]]:
    return [
        (f"LoRA, r = {LORA}, LoRAQuant {bits}@{ratio:g}", (f"lora, {bits}@{ratio:g}", LORA), None, ("lora", LORA))
        for bits, ratio in LORAQUANT
    ]


def rate_of(arm: str, rank: int) -> float:
    """The rate at which the study trained an arm."""
    for line in lines_of(RESULTS / "datasets-quality.jsonl"):
        if (line["phase"], line["arm"], line["rank"]) == ("final", arm, rank):
            return line["learning_rate"]
    raise SystemExit(f"datasets_quality.py has not trained {arm} of rank {rank} yet.")


def main() -> None:
    options = study_parser(__doc__, "few-bits").parse_args()
    rates = (1e-2, 2e-3) if options.quick else (rate_of("fcca", RANK), rate_of("lora", LORA))
    study_of(options, Tried).run(*rates, options.first)


if __name__ == "__main__":
    main()
