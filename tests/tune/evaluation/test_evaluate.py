"""Scores of adapters on one base: as if each were loaded alone, and never computed twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from frozencore import FrozenCoreConfig
from frozencore.cli.evaluate import _notes
from frozencore.errors import ArtifactError, ConfigError, DataError, ModelError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.tune import evaluate as module
from frozencore.tune.evaluate import BaseWithAdapter, Evaluation, adapter_names, evaluate
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.score import score_task
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from small_tenants import silent

POCKET = str(pocket_model_path())
TASKS = tuple(find_task(name) for name in ("pocket-entailment", "pocket-math"))


def evaluation(**changes: Any) -> Evaluation:
    return Evaluation(**{"model": POCKET, "tasks": TASKS, "num_evaluation": 12, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two frozen-core adapters and two LoRA ones, each of which changes the model."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(1)
    configs: dict[str, Any] = {
        f"{kind}-{i}": FrozenCoreConfig(r=4, constructor="random", target_modules=["q_proj", "v_proj"])
        if kind == "cores"
        else LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        for kind in ("cores", "lora")
        for i in range(2)
    }
    for name, config in configs.items():
        model = get_peft_model(load_model(POCKET, device="cpu")[0], config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(folder / name / "adapter")
    return {name: folder / name / "adapter" for name in configs}


def test_every_adapter_scores_as_if_it_were_loaded_alone(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(module, "load_model", lambda *a, **k: loads.append(1) or load_model(*a, **k))
    order = ["cores-0", "cores-1", "lora-0", "lora-1"]
    record = evaluate(
        evaluation(adapters=tuple(adapters[name] for name in order), with_base=True), tmp_path / "e", silent
    )
    assert len(loads) == 1
    assert list(dict.fromkeys(score["subject"] for score in record["scores"])) == ["base", *order]
    found = {(score["subject"], score["task"]): score for score in record["scores"]}
    for name in order:
        model, tokenizer = load_model(POCKET, device="cpu")
        alone = PeftModel.from_pretrained(model, adapters[name])
        for task in TASKS:
            score = score_task(alone, PromptEncoder(tokenizer), task, evaluation_rows(task, num_evaluation=12))
            assert found[name, task.name]["accuracy"] == score.accuracy
            assert found[name, task.name]["held_out_loss"] == pytest.approx(score.held_out_loss, abs=1e-6)
    losses = {score["held_out_loss"] for score in record["scores"]}
    assert len(losses) == 10
    lines = (tmp_path / "e" / "lora-0" / "pocket-math" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 12
    assert {"id", "prediction", "gold", "correct", "text"} <= json.loads(lines[0]).keys()


def test_the_base_comes_out_of_every_adapter_as_it_went_in(adapters: dict[str, Path]) -> None:
    base, _ = load_model(POCKET, device="cpu")
    before = fingerprint_model(base)
    subject = BaseWithAdapter(base)
    for folder in adapters.values():
        subject.with_adapter(folder)
        assert fingerprint_model(subject.without_adapter()) == before
        assert not any(".base_layer" in name for name, _ in subject.without_adapter().named_parameters())


def test_finished_tasks_are_kept_and_half_written_ones_are_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "e"
    first = evaluate(evaluation(), out, silent)
    (out / "base" / "pocket-math" / "result.json").write_text('{"task": "pocket-m')
    (out / "base" / "pocket-math" / "predictions.jsonl").write_text('{"id"')
    scored = []
    again = evaluate(evaluation(), out, lambda stage, *_: scored.append(stage))
    assert set(scored) == {"load", "base: pocket-math"}
    timeless = [[{k: v for k, v in s.items() if k != "time_s"} for s in r["scores"]] for r in (first, again)]
    assert timeless[0] == timeless[1]
    assert len((out / "base" / "pocket-math" / "predictions.jsonl").read_text().splitlines()) == 12


def test_scores_of_other_options_are_not_taken_for_these(tmp_path: Path) -> None:
    evaluate(evaluation(tasks=TASKS[:1]), tmp_path / "e", silent)
    for changes in ({"num_evaluation": 5}, {"length_normalised": True}, {"dtype": "bfloat16"}, {"max_length": 100}):
        with pytest.raises(ArtifactError, match="holds the score of another model") as error:
            evaluate(evaluation(**{"tasks": TASKS[:1], **changes}), tmp_path / "e", silent)
        assert "\n" not in str(error.value)


def test_a_task_without_data_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    tasks = (find_task("sst2"), TASKS[0])
    record = evaluate(evaluation(tasks=tasks, data_root=tmp_path), tmp_path / "e", silent)
    assert [score["task"] for score in record["scores"]] == ["pocket-entailment"]
    assert "nyu-mll/glue" in record["failed"]["sst2"]
    with pytest.raises(DataError, match="nyu-mll/glue"):
        evaluate(evaluation(tasks=tasks[:1], data_root=tmp_path), tmp_path / "f", silent)


def test_own_rows_are_read_as_tune_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Is {i} a number?", "completion": " yes", "source": "me"} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    own = evaluation(tasks=(), data=str(file), num_evaluation=2)
    record = evaluate(own, tmp_path / "out", lambda *said: told.append(said[-1]))
    assert record["reading"]["rows.jsonl"]["unused_columns"] == ["source"]
    assert record["reading"]["rows.jsonl"]["left_out"] == {"beyond --num-evaluation": 1}
    assert any("1 column not used: source" in note for note in told)
    assert "1 column not used: source" in "".join(_notes(record))


def test_a_token_without_an_embedding_is_refused_before_any_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrower(*given: Any, **options: Any) -> Any:
        model, tokenizer = load_model(*given, **options)
        model.resize_token_embeddings(8)
        return model, tokenizer

    monkeypatch.setattr(module, "load_model", narrower)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Is 1 a number?", "completion": " yes"}\n')
    with pytest.raises(ModelError, match="but the model has embeddings of 8 tokens only"):
        evaluate(evaluation(tasks=(), data=str(tmp_path / "rows.jsonl")), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_prompts_beyond_the_limit_are_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"12 of 12 rows are longer than the limit of 5 tokens"):
        evaluate(evaluation(tasks=TASKS[:1], max_length=5), tmp_path / "e", silent)
    record = evaluate(evaluation(tasks=TASKS[:1], max_length=5, truncate=True), tmp_path / "e", silent)
    assert record["scores"][0]["num_cut"] == 12
    with pytest.raises(ConfigError, match="--max-length 4096 is beyond the model's context of 512"):
        evaluate(evaluation(max_length=4096), tmp_path / "e", silent)


def test_an_adapter_of_another_model_is_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    weights = adapters["lora-0"] / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text((adapters["lora-0"] / "adapter_config.json").read_text())
    tensors = load_file(weights)
    some = next(iter(tensors))
    cases = {
        "does not go on this base model": tensors | {some: torch.zeros(3, 3)},
        "1 tensors are missing and 0 have no layer": {k: v for k, v in tensors.items() if k != some},
        "0 tensors are missing and 1 have no layer": tensors
        | {some.replace("layers.0", "layers.77"): tensors[some].clone()},
    }
    for reason, wrong in cases.items():
        save_file(wrong, damaged / "adapter_model.safetensors")
        with pytest.raises(ArtifactError, match=reason) as error:
            BaseWithAdapter(load_model(POCKET, device="cpu")[0]).with_adapter(damaged)
        assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match=r"has no adapter_config.json"):
        BaseWithAdapter(load_model(POCKET, device="cpu")[0]).with_adapter(tmp_path)


def test_adapters_get_short_names_of_their_own() -> None:
    def names(*folders: str) -> list[str]:
        return adapter_names([Path(folder) for folder in folders])

    assert names() == []
    assert names("/runs/a/adapter", "/runs/b/adapter") == ["a", "b"]
    assert names("/x/a/adapter", "/y/a/adapter") == ["x-a", "y-a"]
    assert names("/runs/base") == ["runs-base"]
    assert names("/x/A", "/y/a") == ["x-A", "y-a"]
    assert names("/runs/a/checkpoints/..") == ["a"]
    with pytest.raises(ArtifactError, match="the same folder"):
        names("/x/a", "/x/a")


def test_an_adapter_of_virtual_tokens_is_refused(tmp_path: Path) -> None:
    base = load_model(POCKET, device="cpu")[0]
    get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"holds virtual tokens \(.*PROMPT_TUNING\), which are not scored"):
        BaseWithAdapter(load_model(POCKET, device="cpu")[0]).with_adapter(tmp_path)
