"""Choice scoring side by side with lm-evaluation-harness: same process, same model, same rows, alternating runs.

    python benchmarks/scoring.py --data-root ../shared/data --tiny ../shared/models/tiny1m

What is timed is text to log-likelihoods, tokenisation included, on both sides: ``predict_choices`` here, and
``HFLM.loglikelihood`` there, without loading, task building and metrics. The harness runs with each of the batch sizes
given and its fastest one counts. OpenBookQA is left out where its data are not at hand.

``token_ratio``: the tokens that the harness feeds the model over those that we do, counted. It bounds the speed-up of
all that is per token and layer; beyond it only the output layer (we ask for the scored positions, the harness for all)
and a call's fixed cost can save. HellaSwag's is about 2.15, since its endings are nearly half as long as its contexts
and every ending must be read. Errors are largest differences, in nats, from the same model in float64.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import AutoTokenizer

from contestants import random_qwen2
from frozencore.errors import DataError
from frozencore.tune.evaluation.harness import harness_version
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.run.models import load_model
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from harness import cpu_s, parser_of, write_found

FOUR_CHOICES = ("arc_challenge", "openbookqa", "hellaswag")


@dataclass(frozen=True)
class Timing:
    """Medians in seconds over the runs, and how far the two sides agree."""

    ours_s: float
    harness_s: dict[int, float]
    token_ratio: float
    largest_difference: float
    error_ours: float
    error_harness: float
    same_predictions: int
    num_rows: int

    @property
    def speedup(self) -> float:
        return min(self.harness_s.values()) / self.ours_s


def compare(model: nn.Module, tokenizer: Any, examples: list[Example], batch_sizes: list[int], num_runs: int) -> Timing:
    """Alternate ours with the harness at every batch size; each side also runs once before, untimed."""
    encoder = PromptEncoder(tokenizer, style="plain", max_length=context_limit(model, tokenizer))
    examples = [e for e in examples if encoder.count_too_long([encoder.render(e)]) == 0]
    device = str(next(model.parameters()).device)
    harness = {
        size: HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=encoder.max_length, device=device)
        for size in batch_sizes
    }
    requests = [
        Instance("loglikelihood", {}, (e.prompt, choice), i) for e in examples for i, choice in enumerate(e.choices)
    ]
    sides: dict[int, Callable[[], Any]] = {0: lambda: predict_choices(model, encoder, examples)}
    for size, lm in harness.items():
        sides[size] = lambda lm=lm: lm.loglikelihood(requests, disable_tqdm=True)
    results, num_tokens = {}, {}
    for size, run in sides.items():
        with counted_tokens(model) as fed:
            results[size] = run()
        num_tokens[size] = sum(fed)
    times: dict[int, list[float]] = {size: [] for size in sides}
    for _ in range(num_runs):
        for size, run in sides.items():
            gc.collect()
            times[size].append(cpu_s(run))
    theirs = iter(value for value, _ in results[batch_sizes[0]])
    ours = [p.logprobs for p in results[0]]
    others = [tuple(next(theirs) for _ in row) for row in ours]
    exact = [p.logprobs for p in predict_choices(copy.deepcopy(model).double(), encoder, examples)]
    return Timing(
        ours_s=median(times[0]),
        harness_s={size: median(times[size]) for size in batch_sizes},
        token_ratio=round(min(num_tokens[size] for size in batch_sizes) / num_tokens[0], 3),
        largest_difference=largest_difference(ours, others),
        error_ours=largest_difference(ours, exact),
        error_harness=largest_difference(others, exact),
        same_predictions=sum(a.index(max(a)) == b.index(max(b)) for a, b in zip(ours, others, strict=True)),
        num_rows=len(examples),
    )


def largest_difference(ours: list[tuple[float, ...]], others: list[tuple[float, ...]]) -> float:
    return max(abs(a - b) for row, other in zip(ours, others, strict=True) for a, b in zip(row, other, strict=True))


@contextmanager
def counted_tokens(model: nn.Module) -> Iterator[list[int]]:
    """The sizes of the token tensors that enter the model meanwhile, padding included."""
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    try:
        yield sizes
    finally:
        hook.remove()


def main() -> None:
    parser = parser_of(__doc__, "scoring")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--tiny", help="Folder of another small model.")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wide = random_qwen2(8, 512).eval(), AutoTokenizer.from_pretrained(pocket_model_path())
    models = {"pocket": load_model(str(pocket_model_path())), "wide (8 x 512, random)": wide}
    if options.tiny:
        models["tiny1m"] = load_model(options.tiny)
    rows = []
    for task in FOUR_CHOICES:
        try:
            examples = list(evaluation_rows(find_task(task), options.data_root, num_evaluation=options.rows))
        except DataError as error:
            print(f"{task} is left out: {str(error)[:100]}")
            continue
        for name, (model, tokenizer) in models.items():
            found = compare(model, tokenizer, examples, options.batch_sizes, options.runs)
            rows.append({"task": task, "model": name, "speedup": round(found.speedup, 2), **vars(found)})
            print(json.dumps(rows[-1]), flush=True)
    write_found(options, runs=options.runs, lm_eval=harness_version(), rows=rows)


if __name__ == "__main__":
    main()
