"""The study of bases under reinforcement learning: its rewards, its loss, and what its quick mode writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import TokenRow
from places import ROOT


@pytest.fixture(scope="module")
def rl() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        import rl  # type: ignore[import-not-found]  # a script

        yield rl
        sys.modules.pop("rl", None)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()


PROMPTS = ([30, 40, 50], [60, 70, 80, 90, 100])


def test_the_likeliest_completion_is_that_of_generate_and_only_it_is_rewarded(rl: ModuleType, model: Any) -> None:
    rows = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=rl.LENGTH, do_sample=False, pad_token_id=0)[0]
        rows.append(TokenRow("", ids.tolist(), len(prompt)))
    rows.append(TokenRow("", [*PROMPTS[0], 5], 3))
    batch = rl.rollouts(model, rows, None)
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0]
    for row, ids, labels, mask in zip(
        rows[:2], batch["input_ids"], batch["labels"], batch["attention_mask"], strict=False
    ):
        assert ids[mask.bool()].tolist() == row.input_ids
        assert labels[labels != -100].tolist() == row.input_ids[row.num_context :]


def test_the_loss_is_the_advantage_times_the_log_likelihood_per_token(rl: ModuleType, model: Any) -> None:
    rows = [TokenRow("", [*prompt, 5], len(prompt)) for prompt in PROMPTS]
    batch = rl.rollouts(model, rows, torch.Generator().manual_seed(0))
    rewards = torch.tensor([1.0, *[0.0] * 7, *[1.0] * 8])  # of the second question there is nothing to learn
    found = float(rl.policy_loss(model, {**batch, "rewards": rewards}))
    total, count = 0.0, 0
    for i, (ids, labels, mask) in enumerate(
        zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    ):
        shown, own = ids[mask.bool()], labels[mask.bool()]
        log_likelihood = model(shown[None]).logits[0].log_softmax(-1)
        advantage = 0.0 if i >= 8 else float((rewards[i] - 1 / 8) / (rewards[:8].std() + 1e-4))
        for place in (own != -100).nonzero()[:, 0].tolist():
            total += advantage * float(log_likelihood[place - 1, shown[place]])
            count += 1
    assert found == pytest.approx(-total / count, rel=1e-4)


def test_the_rate_is_chosen_by_the_validation_questions(rl: ModuleType) -> None:
    tried = [(1e-3, 0.2, 0.9), (2e-3, 0.4, 0.1), (3e-3, 0.3, 0.5)]
    search = [
        {"contestant": "FCCA", "rate": rate, "validation": {"sampled": own}, "held_out": {"sampled": other}}
        for rate, own, other in tried
    ]
    assert rl.chosen_rate({"search": search}, "FCCA") == 2e-3


@pytest.mark.slow
def test_the_quick_study_writes_every_run_once_and_goes_on_where_it_stopped(rl: ModuleType, tmp_path: Path) -> None:
    rl.study(rl.QUICK, tmp_path)
    found = json.loads((tmp_path / "rl.json").read_text())
    assert {run["contestant"] for run in found["runs"]} == {"FCCA", "LoRA r=1"}
    assert {run["contestant"]: run["values"] for run in found["runs"]} == {"FCCA": 4096, "LoRA r=1": 4480}
    assert (len(found["search"]), len(found["runs"])) == (6, 2)
    assert all(len(run["curve"]) == 2 for run in found["runs"])
    lost = found["runs"].pop()
    (tmp_path / "rl.json").write_text(json.dumps(found))
    rl.study(rl.QUICK, tmp_path)
    again = json.loads((tmp_path / "rl.json").read_text())["runs"]
    assert again[0] == found["runs"][0]
    assert {**again[1], "processor_s": 0} == {**lost, "processor_s": 0}
