"""An attack that tells rows that were trained on from others: plain training falls to it, private training does not."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from scipy.stats import rankdata, t
from torch import Tensor
from transformers import Trainer, TrainingArguments

from adapted import adapted
from frozencore import PrivateTraining
from frozencore.adapter.per_example import losses_and_gradients
from frozencore.adapter.private import private_training
from tiny import VOCABULARY, Example, batch_of, tiny_qwen2

opacus = pytest.importorskip("opacus")

NUM_ROWS, EPOCHS, EPSILON, DELTA = 64, 10, 1.0, 1e-3


def rows(seed: int) -> list[Example]:
    """Random completions: nothing but having seen a row foretells it."""
    ids = torch.randint(1, VOCABULARY, (NUM_ROWS, 8), generator=torch.Generator().manual_seed(seed))
    return [Example(tuple(row.tolist()), 4) for row in ids]


def losses(model: Any, these: list[Example]) -> Tensor:
    return losses_and_gradients(model.eval(), batch_of(these))[0]


def attack(folder: Path, seed: int, *, private: bool) -> float:
    """The area under the curve of an attack by how far a row's loss fell."""
    members, others = rows(2 * seed), rows(2 * seed + 1)
    base = tiny_qwen2(hidden_size=64, intermediate_size=96)
    model = adapted("random", model=base, r=16, target_modules="all-linear")
    before = losses(model, members), losses(model, others)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, num_train_epochs=EPOCHS, learning_rate=2e-2, seed=seed,
        report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False, save_strategy="no",
        logging_strategy="no", max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=members, data_collator=batch_of)
    own = PrivateTraining(trainer, epsilon=EPSILON, delta=DELTA) if private else None
    trainer.train()
    assert own is None or 0.99 * EPSILON < own.spent <= EPSILON
    falls = torch.cat([before[0] - losses(model, members), before[1] - losses(model, others)])
    ranks = rankdata(falls.numpy())
    return float((ranks[:NUM_ROWS].sum() - NUM_ROWS * (NUM_ROWS + 1) / 2) / NUM_ROWS**2)


@pytest.mark.slow
def test_members_are_told_apart_after_plain_trainings_and_not_after_private_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each training has rows and noise of its own; the interval is over trainings, whose rows share one drift.

    The area is the chance that a trained row ranks above another one. To exchange two such rows changes the training in
    two rows, so no attack has a larger area than e^(2 epsilon) / (1 + e^(2 epsilon)), delta aside.
    """
    plain = [attack(tmp_path, seed, private=False) for seed in range(2)]
    areas = []
    for seed in range(5):
        monkeypatch.setattr(private_training, "new_secret", lambda seed=seed: f"{seed:064x}")
        areas.append(attack(tmp_path, seed, private=True))
    half = float(t.ppf(0.975, len(areas) - 1)) * stdev(areas) / math.sqrt(len(areas))
    low, high = mean(areas) - half, mean(areas) + half
    print(f"area {plain} without privacy, {mean(areas):.3f} ({low:.3f} to {high:.3f}) at epsilon 1: {areas}")
    assert min(plain) > 0.9
    assert low < 0.5 < high < 1 / (1 + math.exp(-2 * EPSILON)) + DELTA
