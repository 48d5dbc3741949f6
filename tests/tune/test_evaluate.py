"""Scores of adapters on one base: as if each were loaded alone, and those of lm-evaluation-harness."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from fixtures import SHARED
from frozencore import FrozenCoreConfig
from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ArtifactError, ConfigError, DataError, ModelError, TrainingError
from frozencore.files.atomic_write import write_lines, write_text
from frozencore.files.fingerprint import fingerprint_model
from frozencore.progress import no_progress
from frozencore.tune import evaluate as module
from frozencore.tune.evaluate import (
    BaseWithAdapter,
    Evaluation,
    adapter_names,
    evaluate_adapters,
    style_of,
)
from frozencore.tune.folder import locked
from frozencore.tune.load import load_model, require_embedded
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import EvaluationRecord, TaskScore
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.rows.row import ChoiceTokens, Row, TokenRow
from frozencore.tune.scoring import answers
from frozencore.tune.scoring.forward import Prediction
from frozencore.tune.scoring.score import ScoredRows, held_out_loss, score_rows
from frozencore_lab.tasks.paper import PAPER_TASKS
from frozencore_lab.tasks.pocket_tasks import POCKET_TASKS
from frozencore_lab.tasks.registry import find_task
from frozencore_lab.tasks.task import Task
from input_files import FEATURES, write_hub_folder
from small_runs import RESOLVED, made_up_record
from tiny import tiny_qwen2

PREFIX = "frozencore_"
_MODULE = "frozencore_tasks"
_FUNCTIONS = '''

def load_rows(file, **_):
    """The rows beside this module, as the harness's ``custom_dataset``."""
    import json
    from pathlib import Path

    from datasets import Dataset, DatasetDict

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").removesuffix("\\n").split("\\n")
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def exact_match(doc, results):
    """Whether the first marked number of the generated text is the gold one."""
    return {"exact_match": float(parse_answer(results[0]) == parse_answer(doc["gold"], gold=True))}
'''


class _Function(str):
    """A name that is written to YAML as ``!function``."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Function, lambda dumper, name: dumper.represent_scalar("!function", str(name)))


def export_tasks(
    tasks: Sequence[Task], folder: Path, *, data_root: Path | None = None, num_evaluation: int | None = None
) -> list[str]:
    """Write the files of every task, and return the harness's task names in order."""
    rows = {
        task.name: [_row(task, example) for example in task.draw_evaluation(data_root, num_evaluation=num_evaluation)]
        for task in tasks
    }
    write_text(folder / f"{_MODULE}.py", inspect.getsource(answers) + _FUNCTIONS)
    for task in tasks:
        write_lines(folder / f"{task.name}.jsonl", rows[task.name])
        text = yaml.dump(_description(task), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
        write_text(folder / f"{task.name}.yaml", text)
    return [PREFIX + task.name for task in tasks]


def _row(task: Task, example: Row) -> dict[str, Any]:
    row: dict[str, Any] = {"id": example.id, "prompt": example.prompt}
    if task.scoring == "exact_match":
        return {**row, "gold": example.completion}
    return {**row, "choices": [c[1:] for c in example.choices], "gold": example.choices.index(example.completion)}


def _description(task: Task) -> dict[str, Any]:
    head: dict[str, Any] = {
        "task": PREFIX + task.name,
        "custom_dataset": _Function(f"{_MODULE}.load_rows"),
        "dataset_kwargs": {"file": f"{task.name}.jsonl"},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "prompt",
        "doc_to_target": "gold",
    }
    if task.scoring == "exact_match":
        head |= {
            "output_type": "generate_until",
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": task.max_new_tokens},
            "process_results": _Function(f"{_MODULE}.exact_match"),
        }
        metrics = ["exact_match"]
    else:
        head |= {"output_type": "multiple_choice", "doc_to_choice": "choices", "target_delimiter": " "}
        metrics = ["acc", "acc_norm"]
    measured = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics]
    return {**head, "metric_list": measured, "metadata": {"version": 1.0}}


def harness_samples(model: nn.Module, encoder: PromptEncoder, task: str, folder: Path) -> list[dict[str, Any]]:
    """The harness's record of every row of a task in a folder of task files."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=encoder.tokenizer, batch_size=8, max_length=encoder.max_length, device="cpu")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with own_random_state():  # simple_evaluate seeds Python, NumPy and torch
        results = lm_eval.simple_evaluate(
            model=lm, tasks=[task], bootstrap_iters=0, task_manager=manager, apply_chat_template=encoder.is_chat
        )
    samples: list[dict[str, Any]] = results["samples"][task]
    return samples


POCKET = str(pocket_model_path())
TASKS = tuple(find_task(name) for name in ("pocket-entailment", "pocket-math"))
NAMES = tuple(f"task:{task.name}" for task in TASKS)


def evaluation(**changes: Any) -> Evaluation:
    return Evaluation(**{"model": POCKET, "data": NAMES, "num_evaluation": 12, "device": "cpu", **changes})


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


def scored(task: Task, rows: list[TokenRow]) -> ScoredRows:
    return ScoredRows(task.name, task.scoring, rows, task.max_new_tokens)


def score_of(model: nn.Module, encoder: PromptEncoder, task: Task, examples: Sequence[Row]) -> TaskScore:
    score = score_rows(model, encoder, scored(task, encoder.encode(examples))).task
    assert score is not None
    return score


def test_every_adapter_scores_as_if_it_were_loaded_alone(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(module, "load_model", lambda *a, **k: loads.append(1) or load_model(*a, **k))
    order = ["cores-0", "cores-1", "lora-0", "lora-1"]
    record = evaluate_adapters(
        evaluation(adapters=tuple(adapters[name] for name in order), with_base=True), tmp_path / "e", no_progress
    )
    assert len(loads) == 1
    assert list(dict.fromkeys(score.subject for score in record.scores)) == ["base", *order]
    found = {(score.subject, score.task): score for score in record.scores}
    for name in order:
        model, tokenizer = load_model(POCKET, device="cpu")
        alone = PeftModel.from_pretrained(model, adapters[name])
        for task in TASKS:
            score = score_of(alone, PromptEncoder(tokenizer), task, task.draw_evaluation(num_evaluation=12))
            assert found[name, task.name].score.accuracy == score.accuracy
            assert found[name, task.name].held_out_loss == pytest.approx(score.held_out_loss, abs=1e-6)
    losses = {score.held_out_loss for score in record.scores}
    assert len(losses) == 10
    assert list(record.adapter_tensors) == order
    assert len(set(record.adapter_tensors.values())) == len(order)
    assert len({score.rows for score in record.scores}) == len(TASKS)
    lines = (tmp_path / "e" / "lora-0" / "pocket-math" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 12
    assert {"id", "prediction", "gold", "correct", "text"} <= json.loads(lines[0]).keys()


def test_the_base_comes_out_of_every_adapter_as_it_went_in(adapters: dict[str, Path], tmp_path: Path) -> None:
    """Also out of a LoRA whose file holds a weight of the base model, and of those that PEFT starts by changing it."""
    base, _ = load_model(POCKET, device="cpu")
    before = fingerprint_model(base)
    holding = Path(shutil.copytree(adapters["lora-0"], tmp_path / "holding"))
    held = load_file(holding / "adapter_model.safetensors")
    held["base_model.model.model.norm.weight"] = torch.full_like(base.model.norm.weight, 0.5)
    save_file(held, holding / "adapter_model.safetensors", {"format": "pt"})
    changing = [tmp_path / start for start in ("pissa", "pissa_niter_4", "olora")]
    for folder in changing:
        start = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": folder.name}
        get_peft_model(load_model(POCKET, device="cpu")[0], LoraConfig(**start)).save_pretrained(str(folder))
    subject = BaseWithAdapter(base)
    for folder in (*adapters.values(), holding, *changing):
        subject.with_adapter(folder)
        assert fingerprint_model(subject.without_adapter()) == before
        assert not any(".base_layer" in name for name, _ in subject.without_adapter().named_parameters())


def test_each_failure_is_a_row_and_the_others_are_scored(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Is 1 a number?"}\n')
    data = ("task:sst2", NAMES[0], "task:sst2-text", str(tmp_path / "bad.jsonl"))
    wrong = {"failed": {"nothing": "There is no task 'nothing'."}}
    record = evaluate_adapters(evaluation(data=data, data_root=tmp_path, **wrong), tmp_path / "e", no_progress)
    assert {score.task: score.failure is None for score in record.scores} == {
        "sst2": False, "pocket-entailment": True, "sst2-text": False, "bad.jsonl": False, "nothing": False,
    }  # fmt: skip
    assert [score.task for score in record.scores if score.rows] == ["pocket-entailment"]
    assert "nyu-mll/glue" in record.failed["sst2"]
    assert EvaluationRecord.model_validate_json((tmp_path / "e" / "result.json").read_text()) == record
    with pytest.raises(DataError, match="nyu-mll/glue"):
        evaluate_adapters(evaluation(data=data[:1], data_root=tmp_path), tmp_path / "f", no_progress)
    with pytest.raises(ArtifactError, match="already holds a finished run"):
        evaluate_adapters(evaluation(data=NAMES[:1]), tmp_path / "e", no_progress)


def test_an_evaluation_shares_its_folder_with_no_other(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(TrainingError, match="another process is running"):
        evaluate_adapters(evaluation(data=NAMES[:1]), tmp_path, no_progress)
    for subject in ("base", "other"):  # killed evaluations
        write_lines(tmp_path / subject / "pocket-entailment" / "predictions.jsonl", [{"id": "stale"}])
    with pytest.raises(ArtifactError, match="other/pocket-entailment/predictions.jsonl of another one"):
        evaluate_adapters(evaluation(data=NAMES[:1]), tmp_path, no_progress)
    shutil.rmtree(tmp_path / "other")
    evaluate_adapters(evaluation(data=NAMES[:1]), tmp_path, no_progress)
    assert "stale" not in (tmp_path / "base" / "pocket-entailment" / "predictions.jsonl").read_text()


def test_a_text_task_has_a_loss_and_no_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = replace(TASKS[0], name="text", scoring="text")
    monkeypatch.setattr(module, "find_source", lambda _: text)
    (score,) = evaluate_adapters(evaluation(data=("task:text",)), tmp_path / "e", no_progress).scores
    model, tokenizer = load_model(POCKET, device="cpu")
    encoder = PromptEncoder(tokenizer)
    rows = encoder.encode(text.draw_evaluation(num_evaluation=12))
    assert (score.score, score.num_examples) == (None, 12)
    assert score.held_out_loss == held_out_loss(model, rows, pad_id=encoder.pad_id)


def test_an_adapter_that_does_not_fit_is_refused_before_the_first_score(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    damaged = shutil.copytree(adapters["lora-0"], tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"nothing")
    stages: list[str] = []
    with pytest.raises(ArtifactError):
        evaluate_adapters(
            evaluation(adapters=(adapters["cores-0"], damaged)), tmp_path / "e", lambda stage, *_: stages.append(stage)
        )
    assert set(stages) == {"load"}


def test_prompts_are_in_the_style_of_the_adapters_run(adapters: dict[str, Path], tmp_path: Path) -> None:
    model, tokenizer = load_model(POCKET, device="cpu")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    shutil.copytree(adapters["cores-0"], run / "adapter")
    record = made_up_record({"task": "svamp"}, resolved={**RESOLVED, "prompt_style": "plain"})
    (run / "result.json").write_text(json.dumps(record.content()))
    assert style_of(run / "adapter") == "plain"
    chat = evaluation(model=str(tmp_path / "model"), data=NAMES[1:], adapters=(run / "adapter",), with_base=True)
    found = evaluate_adapters(chat, tmp_path / "e", no_progress)
    assert found.prompt_styles == {"base": "chat", "run": "plain"}
    plain = evaluate_adapters(replace(chat, prompt_style="plain"), tmp_path / "f", no_progress)
    assert found.scores[0].held_out_loss != plain.scores[0].held_out_loss
    assert found.scores[1].held_out_loss == plain.scores[1].held_out_loss


def test_prompts_of_an_adapter_have_the_tokenizer_that_a_trainer_saved_beside_it(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    """LLaMA-Factory and TRL save a template beside the adapter that the base model lacks, and the length of rows."""
    model, tokenizer = load_model(POCKET, device="cpu")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    folders = [tmp_path / name / "adapter" for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(adapters["cores-0"], folder)
        tokenizer.save_pretrained(folder)
    settings = folders[0] / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 4}))
    here = evaluation(data=NAMES[1:], adapters=(*folders, adapters["cores-0"]), with_base=True)
    found = evaluate_adapters(here, tmp_path / "e", no_progress)
    assert list(found.prompt_styles.values()) == ["plain", "chat", "chat", "plain"]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    whole = evaluation(model=str(tmp_path / "model"), data=NAMES[1:], adapters=(adapters["cores-0"],))
    (asked,) = evaluate_adapters(whole, tmp_path / "f", no_progress).scores
    base, one, two, plain = found.scores
    assert asked.held_out_loss == one.held_out_loss == two.held_out_loss != plain.held_out_loss
    assert asked.rows == one.rows == two.rows != plain.rows == base.rows


def test_own_rows_are_read_as_tune_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Is {i} a number?", "completion": " yes", "source": "me"} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    own = evaluation(data=(str(file),), num_evaluation=2)
    record = evaluate_adapters(own, tmp_path / "out", lambda *said: told.append(said[-1]))
    assert record.reading is not None
    assert record.reading.unused_columns == ("source",)
    assert record.reading.left_out == {"beyond --num-evaluation": 1}
    assert any("1 column not used: source" in note for note in told)


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
        evaluate_adapters(evaluation(data=(str(tmp_path / "rows.jsonl"),)), tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


def test_a_choice_without_an_embedding_is_refused_too(byte_tokenizer: Callable[..., Any]) -> None:
    wrong = TokenRow("row", [1, 2], 1, choices=ChoiceTokens("row", [1], [[2], [9]]))
    with pytest.raises(ModelError, match="but the model has embeddings of 8 tokens only"):
        require_embedded(tiny_qwen2(vocab_size=8), byte_tokenizer(), [wrong])


def test_prompts_beyond_the_limit_are_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"longer than the limit of 5 tokens: 12 rows or more"):
        evaluate_adapters(evaluation(data=NAMES[:1], max_length=5), tmp_path / "e", no_progress)
    record = evaluate_adapters(evaluation(data=NAMES[:1], max_length=5, too_long="cut"), tmp_path / "e", no_progress)
    assert record.scores[0].score.num_cut == 12
    lines = [{"prompt": "Tom has", "completion": " cats"}, {"prompt": "Tom has " * 40, "completion": " cats"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = evaluation(data=(str(tmp_path / "rows.jsonl"),), max_length=32, too_long="skip")
    record = evaluate_adapters(own, tmp_path / "own", no_progress)
    assert record.reading is not None
    assert (record.scores[0].num_examples, record.reading.left_out) == (1, {"too long": 1})
    with pytest.raises(ConfigError, match="--max-length 4096 is beyond the model's context of 512"):
        evaluate_adapters(evaluation(max_length=4096), tmp_path / "f", no_progress)


def test_an_adapter_that_does_not_fit_is_refused_in_one_line(adapters: dict[str, Path], tmp_path: Path) -> None:
    base, folder = load_model(POCKET, device="cpu")[0], adapters["lora-0"]
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(folder / "adapter_model.safetensors")
    some = next(iter(tensors))
    cases = {
        "does not go on this base model": tensors | {some: torch.zeros(3, 3)},
        "but 1 are missing and 0 have no layer": {k: v for k, v in tensors.items() if k != some},
        "but 0 are missing and 1 have no layer": tensors
        | {some.replace("layers.0", "layers.77"): tensors[some].clone()},
    }
    for reason, wrong in cases.items():
        save_file(wrong, damaged / "adapter_model.safetensors")
        with pytest.raises(ArtifactError, match=reason) as error:
            BaseWithAdapter(base).with_adapter(damaged)
        assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match=r"has no adapter_(config.json|model.safetensors)"):
        BaseWithAdapter(base).with_adapter(tmp_path)
    virtual = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    virtual.save_pretrained(tmp_path / "virtual")
    with pytest.raises(ArtifactError, match=r"has virtual tokens \(.*PROMPT_TUNING\), which are not scored"):
        BaseWithAdapter(load_model(POCKET, device="cpu")[0]).with_adapter(tmp_path / "virtual")


def test_adapters_get_short_names_of_their_own() -> None:
    def names(*folders: str) -> list[str]:
        return adapter_names([Path(folder) for folder in folders])

    assert names() == []
    assert names("/runs/a/adapter", "/runs/b/adapter") == ["a", "b"]
    assert names("/x/a/adapter", "/y/a/adapter") == ["x-a", "y-a"]
    assert names("/runs/base") == ["runs-base"]
    assert names("/x/A", "/y/a") == ["x-A", "y-a"]
    assert names("/runs/a/checkpoints/..") == ["a"]
    assert names("/x/Jose\u0301", "/y/मीरा") == ["José", "मीरा"]
    with pytest.raises(ArtifactError, match="the same folder"):
        names("/x/a", "/x/a")


NUM_ROWS = 5
# tiny1m has room for 256 tokens in all
ALL_TASKS = {name: replace(task, max_new_tokens=24) for name, task in (PAPER_TASKS | POCKET_TASKS).items()}
MODELS = {"pocket": POCKET, "tiny1m": str(SHARED / "models" / "tiny1m")}


def root_of(name: str, exported: Path) -> Path:
    return exported.parent / name if name in FEATURES else SHARED / "data"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our tasks as files of the harness."""
    pytest.importorskip("lm_eval")
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    folder = tmp_path_factory.mktemp("lm-eval") / "tasks"
    for name, task in ALL_TASKS.items():
        if name in FEATURES:
            write_hub_folder(root_of(name, folder), name, num_train=2, num_evaluation=NUM_ROWS)
        export_tasks([task], folder, data_root=root_of(name, folder), num_evaluation=NUM_ROWS)
    return folder


def model_and_encoder(name: str, dtype: str = "auto") -> tuple[nn.Module, PromptEncoder]:
    model, tokenizer = load_model(MODELS[name], dtype=dtype)
    return model, PromptEncoder(tokenizer, max_length=context_limit(model, tokenizer), too_long="cut")


def both(
    model: nn.Module, encoder: PromptEncoder, name: str, exported: Path
) -> list[tuple[Prediction, dict[str, Any]]]:
    """Our prediction and the harness's record of every row that needs no cutting."""
    task = ALL_TASKS[name]
    examples = task.draw_evaluation(root_of(name, exported), num_evaluation=NUM_ROWS)
    rows = encoder.encode(examples)
    ours = score_rows(model, encoder, scored(task, rows))
    theirs = harness_samples(model, encoder, PREFIX + name, exported)
    assert [sample["doc"]["id"] for sample in theirs] == [example.id for example in examples]
    generated = task.max_new_tokens if task.scoring == "exact_match" else 0
    return [
        (prediction, dict(sample))
        for row, prediction, sample in zip(rows, ours.predictions, theirs, strict=True)
        if row.num_cut == 0 and row.answer_start + generated <= encoder.max_length
    ]


@pytest.mark.parametrize("model_name", MODELS)
def test_every_task_scores_as_the_harness_scores_it(model_name: str, exported: Path) -> None:
    """Float32; the harness adds up in float32, whose last digit is 1.2e-4 from 1024 nats on."""
    model, encoder = model_and_encoder(model_name)
    for name, task in ALL_TASKS.items():
        if (model_name, name) == ("tiny1m", "gsm8k"):  # its rows are longer
            continue
        rows = both(model, encoder, name, exported)
        assert rows
        for ours, sample in rows:
            if task.scoring == "exact_match":
                assert ours.text == sample["filtered_resps"][0]
                assert ours.correct == sample["exact_match"]
            else:
                theirs = [logprob for logprob, _ in sample["filtered_resps"]]
                assert ours.logprobs == pytest.approx(theirs, abs=1e-4, rel=2.5e-7)
                assert ours.prediction == " " + sample["doc"]["choices"][theirs.index(max(theirs))]
                assert ours.correct == sample["acc"]


@pytest.mark.parametrize("model_name", MODELS)
def test_in_float64_the_difference_is_nil(model_name: str, exported: Path) -> None:
    for ours, sample in both(*model_and_encoder(model_name, "float64"), "hellaswag", exported):
        assert ours.logprobs == pytest.approx([logprob for logprob, _ in sample["filtered_resps"]], abs=1e-8)


@pytest.mark.parametrize("end", [":", "\n"])
def test_chat_prompts_score_as_the_harness_scores_them(end: str, exported: Path) -> None:
    """It moves white space at the end of a template to every choice and scores it there: the same for all of them."""
    model, tokenizer = load_model(MODELS["tiny1m"])
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}" + end + "{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant" + end + "{% endif %}"
    )
    encoder = PromptEncoder(tokenizer, style="chat", max_length=256, too_long="cut")
    for name in ("sst2", "hellaswag"):
        for ours, sample in both(model, encoder, name, exported):
            theirs = [logprob for logprob, _ in sample["filtered_resps"]]
            extra = theirs[0] - ours.logprobs[0] if end == "\n" else 0.0
            assert [value + extra for value in ours.logprobs] == pytest.approx(theirs, abs=1e-4)
            assert ours.correct == sample["acc"]
