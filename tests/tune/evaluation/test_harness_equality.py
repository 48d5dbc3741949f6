"""Our scores are lm-evaluation-harness's own, from the task files that we write for it."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from frozencore.errors import ConfigError, ModelError
from frozencore.tune.load import load_model
from frozencore.tune.pocket import POCKET_TASKS, pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.scoring.forward import Prediction
from frozencore.tune.scoring.score import score_task
from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import evaluation_rows
from harness_tasks import PREFIX, export_tasks
from hub_folders import FEATURES, write_hub_folder
from places import SHARED

pytest.importorskip("lm_eval")
from frozencore.tune.evaluate import _headline, harness_score

NUM_ROWS = 5
# tiny1m has room for 256 tokens in all
TASKS = {name: replace(task, max_new_tokens=24) for name, task in (PAPER_TASKS | POCKET_TASKS).items()}


@pytest.fixture(scope="module")
def shared() -> Path:
    folder = SHARED
    if not folder.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return folder


@pytest.fixture(scope="module")
def exported(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval") / "tasks"
    for name in FEATURES:
        write_hub_folder(folder.parent / name, name, num_train=2, num_evaluation=NUM_ROWS)
    for name, task in TASKS.items():
        root = folder.parent / name if name in FEATURES else shared / "data"
        export_tasks([task], folder, data_root=root, num_evaluation=NUM_ROWS)
    return folder


@pytest.fixture(scope="module")
def models(shared: Path) -> dict[str, Any]:
    return {"pocket": load_model(str(pocket_model_path())), "tiny1m": load_model(str(shared / "models" / "tiny1m"))}


def both(
    model: nn.Module, encoder: PromptEncoder, task: Task, exported: Path, shared: Path
) -> list[tuple[Prediction, dict[str, Any]]]:
    """Ours and the harness's word on every row that needs no cutting."""
    root = exported.parent / task.name if task.name in FEATURES else shared / "data"
    examples = evaluation_rows(task, root, num_evaluation=NUM_ROWS)
    ours = score_task(model, encoder, task, examples)
    _, theirs = harness_score(model, encoder, PREFIX + task.name, include_path=exported)
    assert [sample["doc"]["id"] for sample in theirs] == [example.id for example in examples]
    room = replace_limit(encoder, task)
    return [
        (prediction, dict(sample))
        for example, prediction, sample in zip(examples, ours.predictions, theirs, strict=True)
        if room.count_too_long([room.render(example)]) == 0
    ]


def replace_limit(encoder: PromptEncoder, task: Task) -> PromptEncoder:
    generated = task.max_new_tokens if task.scoring == "exact_match" else 0
    style = "chat" if encoder.is_chat else "plain"
    return PromptEncoder(encoder.tokenizer, style=style, max_length=encoder.max_length - generated)


def assert_same(rows: list[tuple[Prediction, dict[str, Any]]], task: Task, *, rel: float) -> None:
    assert rows
    for ours, sample in rows:
        if task.scoring == "exact_match":
            assert ours.text == sample["filtered_resps"][0]
            assert ours.correct == sample["exact_match"]
        else:
            theirs = [logprob for logprob, _ in sample["filtered_resps"]]
            assert ours.logprobs == pytest.approx(theirs, abs=1e-4, rel=rel)
            chosen = sample["doc"]["choices"][theirs.index(max(theirs))]
            assert ours.prediction == " " + chosen
            assert ours.correct == sample["acc"]


@pytest.mark.parametrize(
    ("model_name", "name"),
    [("pocket", name) for name in TASKS]
    + [("tiny1m", name) for name in TASKS if name != "gsm8k"],  # its rows are longer
)
def test_every_task_scores_as_the_harness_scores_it(
    model_name: str, name: str, models: dict[str, Any], exported: Path, shared: Path
) -> None:
    """Float32; the harness adds up in float32, whose last digit is 1.2e-4 from 1024 nats on."""
    model, tokenizer = models[model_name]
    encoder = PromptEncoder(tokenizer, max_length=context_limit(model, tokenizer), too_long="truncate")
    assert_same(both(model, encoder, TASKS[name], exported, shared), TASKS[name], rel=2.5e-7)


@pytest.mark.parametrize("model_name", ["pocket", "tiny1m"])
def test_in_float64_the_difference_is_nil(
    model_name: str, models: dict[str, Any], exported: Path, shared: Path
) -> None:
    folder = pocket_model_path() if model_name == "pocket" else shared / "models" / "tiny1m"
    model, tokenizer = load_model(str(folder), dtype="float64")
    encoder = PromptEncoder(tokenizer, max_length=context_limit(model, tokenizer), too_long="truncate")
    for ours, sample in both(model, encoder, TASKS["hellaswag"], exported, shared):
        assert ours.logprobs == pytest.approx([logprob for logprob, _ in sample["filtered_resps"]], abs=1e-8)


@pytest.mark.parametrize("end", [":", "\n"])
def test_chat_prompts_score_as_the_harness_scores_them(end: str, exported: Path, shared: Path, tiny1m: Path) -> None:
    """It moves white space at the end of a template to every choice and scores it there: the same for all of them."""
    model, tokenizer = load_model(str(tiny1m))
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}" + end + "{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant" + end + "{% endif %}"
    )
    encoder = PromptEncoder(tokenizer, style="chat", max_length=256, too_long="truncate")
    for name in ("sst2", "hellaswag"):
        for ours, sample in both(model, encoder, TASKS[name], exported, shared):
            theirs = [logprob for logprob, _ in sample["filtered_resps"]]
            extra = theirs[0] - ours.logprobs[0] if end == "\n" else 0.0
            assert [value + extra for value in ours.logprobs] == pytest.approx(theirs, abs=1e-4)
            assert ours.correct == sample["acc"]


def test_the_harness_leaves_the_random_states_as_they_were(
    models: dict[str, Any], exported: Path, shared: Path
) -> None:
    model, tokenizer = models["pocket"]
    encoder = PromptEncoder(tokenizer, max_length=512, too_long="truncate")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    harness_score(model, encoder, "frozencore_pocket-entailment", include_path=exported)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_group_counts_the_examples_of_each_task(models: dict[str, Any], exported: Path, tmp_path: Path) -> None:
    """The harness numbers the examples of each task from 0."""
    names = [f"{PREFIX}pocket-entailment", f"{PREFIX}pocket-sentiment"]
    shutil.copytree(exported, tmp_path / "tasks")
    metric = "[{metric: acc, aggregation: mean}]"
    (tmp_path / "tasks" / "both.yaml").write_text(f"group: both\ntask: {names}\naggregate_metric_list: {metric}\n")
    model, tokenizer = models["pocket"]
    encoder = PromptEncoder(tokenizer, max_length=512, too_long="truncate")
    score, samples = harness_score(model, encoder, "both", include_path=tmp_path / "tasks")
    assert score["num_examples"] == len(samples) == 2 * NUM_ROWS


def test_an_unknown_harness_task_is_one_line(models: dict[str, Any], exported: Path) -> None:
    model, tokenizer = models["pocket"]
    with pytest.raises(ConfigError, match="There is no task 'nothing' in "):
        harness_score(model, PromptEncoder(tokenizer), "nothing", include_path=exported)


def test_the_metric_shown_is_accuracy_where_there_is_one_and_never_a_nan_or_a_standard_error() -> None:
    nan = float("nan")
    assert _headline({"alias": "a", "bleu,none": 0.1, "acc_stderr,none": 0.2, "acc,none": 0.5}) == "acc,none"
    assert _headline({"acc,none": nan, "bleu,none": 0.1}) == "bleu,none"
    with pytest.raises(ModelError, match="no metric that is a number: .*Check the model's weights"):
        _headline({"alias": "a", "perplexity,none": nan, "perplexity_stderr,none": 0.1})
