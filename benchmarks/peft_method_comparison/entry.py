"""PEFT's own method comparison (MetaMathQA to GSM8K on Llama-3.2-3B) with frozen cores: its runner, and a calibration.

    git clone https://github.com/huggingface/peft && pip install -e peft
    python benchmarks/peft_method_comparison/entry.py --peft peft llama-3.2-3B-fcca-rank16

The suite builds a model, trains it and scores it; cores need one thing more, the pass that chooses their bases, between
the first and the second. It is put there, on rows of the suite's own training set, labelled as it trains on them.
All else is the suite's: data, recipe, evaluation, and the file of results in its folder. The pass counts in the suite's
``total_time``, not in its ``train_time``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from frozencore import CalibrationOptions, calibrate
from frozencore.calibration.batches import IGNORED

EXPERIMENTS = Path(__file__).parent / "experiments"
SUITE = Path("method_comparison", "MetaMathQA")
METHOD = "frozencore"  # the folder of its experiments there
NUM_EXAMPLES, BATCH = 128, 4


def load_suite(clone: Path) -> ModuleType:
    """The suite's ``run.py`` as a module, with what it imports beside it; the process stands in its folder then."""
    folder = clone.resolve() / SUITE
    if not (folder / "run.py").is_file():
        raise SystemExit(f"--peft must be a clone of huggingface/peft, but {folder} holds no run.py.")
    os.chdir(folder)  # it takes experiments by relative paths
    sys.path.insert(0, str(folder))
    return import_module("run")


def place_experiment(name: str) -> str:
    """Copy one of our experiments to where the suite looks for it; its path, as the suite wants it."""
    if not (EXPERIMENTS / name).is_dir():
        known = ", ".join(sorted(path.name for path in EXPERIMENTS.iterdir()))
        raise SystemExit(f"There is no experiment {name!r}. Known: {known}.")
    path = Path("experiments", METHOD, name)
    shutil.copytree(EXPERIMENTS / name, path, dirs_exist_ok=True)
    return str(path)


def calibration_batches(rows: Sequence[Any], tokenizer: Any, seed: int) -> Iterator[dict[str, Tensor]]:
    """Rows of the training set, drawn once; every token of a row and the end after it have a loss, as in the suite."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(rows), generator=generator)[:NUM_EXAMPLES].tolist()
    by_length = sorted((rows[i]["input_ids"] for i in drawn), key=len)
    for start in range(0, len(by_length), BATCH):
        ids = by_length[start : start + BATCH]
        batch = dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt"))
        labels = batch["input_ids"].clone()
        for label, own in zip(labels, ids, strict=True):
            label[len(own) + 1 :] = IGNORED
        yield batch | {"labels": labels}


def with_calibration(suite: ModuleType, experiment: str, group_size: int) -> Callable[..., nn.Module]:
    """The suite's ``get_model``, and the bases chosen."""
    build: Callable[..., nn.Module] = suite.get_model

    def built(**options: Any) -> nn.Module:
        model = build(**options)
        recipe = suite.get_train_config(str(Path(experiment, suite.FILE_NAME_TRAIN_PARAMS)))
        tokenizer = suite.get_tokenizer(model_id=recipe.model_id, max_seq_length=recipe.max_seq_length)
        rows, _, _ = suite.get_train_valid_test_datasets(
            tokenizer=tokenizer, query_template=recipe.query_template, print_fn=suite.print_verbose
        )
        batches = list(calibration_batches(rows, tokenizer, recipe.seed))
        calibrate(model, batches, options=CalibrationOptions(group_size=group_size))
        return model

    return built


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help=f"One of {EXPERIMENTS}.")
    parser.add_argument("--peft", type=Path, required=True, help="A clone of huggingface/peft, installed from there.")
    parser.add_argument("--group-size", type=int, default=CalibrationOptions.group_size, help="Layers a pass.")
    parser.add_argument("--clean", action="store_true", help="The suite's: keep no checkpoint.")
    given = parser.parse_args(words)
    suite = load_suite(given.peft)
    experiment = place_experiment(given.experiment)
    suite.print_verbose = lambda *texts, **options: print(*texts, **options | {"file": sys.stderr})
    suite.get_model = with_calibration(suite, experiment, given.group_size)
    name = suite.validate_experiment_path(experiment)
    suite.main(path_experiment=experiment, experiment_name=name, clean=given.clean, bucket_name=None)


if __name__ == "__main__":
    main()
