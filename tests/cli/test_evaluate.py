"""``frozencore evaluate`` and ``chat``: what a user types and sees of models, adapters and rows."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore import FrozenCoreConfig
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.cli.evaluate import runs_trained_on
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.exact_match import stream_greedily
from input_files import write_rows, write_task
from small_runs import RESOLVED, made_up_record

Command = Callable[..., tuple[int, str, str]]
POCKET = ["--model", str(pocket_model_path())]


def test_rows_of_ones_own_are_scored_on_runs_and_their_base(command: Command, tmp_path: Path) -> None:
    rows = [{"q": f"Tom has {i} cats .", "a": " two cats"} for i in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    own = ["--data", tmp_path / "rows.jsonl", "--columns", "prompt=q,completion=a"]
    few = ["--rank", "4", "--calibration-size", "8", "--epochs", "20", "--batch-size", "8", "--accumulation", "1"]
    assert command("tune", *POCKET, *own, *few, "--lr", "0.02", "--out", tmp_path / "run")[0] == 0
    words = ["evaluate", *POCKET, *own, "--adapter", tmp_path / "run", "--with-base", "--out", tmp_path / "e"]
    status, out, _ = command(*words)
    assert status == 0
    base, run = json.loads((tmp_path / "e" / "result.json").read_text())["scores"]
    assert [(score["subject"], score["task"], score["num_examples"]) for score in (base, run)] == [
        ("base", "rows.jsonl", 20), ("run", "rows.jsonl", 20),
    ]  # fmt: skip
    assert run["held_out_loss"] < base["held_out_loss"]
    assert "Load model and rows: 1 in " in out
    assert "(1 task)" in out
    shown = command("inspect", tmp_path / "e")[1]
    said = r"run on rows.jsonl: accuracy \d+\.0 % of 20 rows \(95 % interval .*\), \d\.\d{3} nats/token"
    assert re.search(said, shown)
    assert f"{tmp_path / 'run'} was trained on rows of {tmp_path / 'rows.jsonl'}" in out
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "new.jsonl")
    words[words.index(tmp_path / "rows.jsonl")] = tmp_path / "new.jsonl"
    assert "was trained on" not in command(*words[:-1], tmp_path / "e2")[1]
    (tmp_path / "run" / "result.json").write_text('["no record"]')
    status, said, err = command(*words[:-1], tmp_path / "e3")
    assert (status, err) == (0, "")
    assert "was trained on" not in said
    for scored in ("base: rows.jsonl: 20 in ", "run: rows.jsonl: 20 in "):
        assert re.search(rf"{scored}\d+\.\d s \(completions\)\n{scored}\d+\.\d s \(loss\)", out)


def test_bad_rows_are_left_out_as_the_error_for_them_says(command: Command, tmp_path: Path) -> None:
    write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "Tom has", "completion": answer} for answer in (" two", "", " six")]
    )
    words = ["evaluate", *POCKET, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "e"]
    status, _, err = command(*words)
    assert (status, "--skip-bad leaves such rows out" in err) == (2, True)
    status, out, _ = command(*words, "--skip-bad")
    assert status == 0
    assert "Read 3 rows by prompt and completion; 1 left out (column 'completion' must hold text)" in " ".join(
        out.split()
    )


def test_each_failure_beside_a_good_task_is_a_row_and_the_exit_status_is_one(command: Command, tmp_path: Path) -> None:
    own = write_task(tmp_path / "own", num_train=3)
    tasks = f"svamp,pocket-mth,pocket-sentiment,{own}"
    words = ["--task", tasks, "--data", tmp_path / "none.jsonl", "--data-root", tmp_path]
    status, out, _ = command("evaluate", *POCKET, *words, "--num-evaluation", "5", "--out", tmp_path / "e")
    said = " ".join(out.split())
    assert status == 1
    assert "mean of 2 tasks" in said
    assert "svamp was not scored: Data set ChilleD/SVAMP must lie at" in said
    assert "pocket-mth was not scored: There is no task 'pocket-mth'" in said
    assert "none.jsonl was not scored: " in said
    assert len((tmp_path / "e/base/sums/predictions.jsonl").read_text().splitlines()) == 3
    assert said.index("pocket-mth cannot be scored") < said.index("Load model and rows")


QUESTION, SECOND = "Tom has 3 cats and buys 2 cats .", "Ann has 2 dogs ."


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of trained adapters of the pocket model, which answer otherwise than its base and than one another."""
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    model = get_peft_model(base, FrozenCoreConfig(r=4, constructor="random", target_modules="all-linear"))
    folders = []
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        for layer in frozen_core_layers(model, "default").values():
            core = layer.frozencore_R["default"].weight
            core.data = torch.randn(core.shape, generator=generator)
        folders.append(tmp_path_factory.mktemp("run"))
        model.save_pretrained(str(folders[-1] / "adapter"))
    return folders


def said_by(model: torch.nn.Module, text: str, max_new_tokens: int) -> str:
    """The greedy continuation by transformers itself."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                         do_sample=False)  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def answers(out: str, name: str) -> list[str]:
    """The answers of one speaker, in order."""
    parts = out.split(f"\n{name}:\n")[1:]
    return [part.partition("\n\n")[0].replace("(The model ended its answer at once.)", "").strip() for part in parts]


def test_every_adapter_and_the_base_answer_as_they_generate(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n{SECOND}\n"))
    words = ("chat", *adapters, "--with-base", "--max-new-tokens", "12", "--device", "cpu")
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    wanted = []
    for name, folder in (("base", None), *((run.name, run / "adapter") for run in adapters)):
        model = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
        model = model if folder is None else PeftModel.from_pretrained(model, folder).eval()
        wanted.append([said_by(model, question, 12).strip() for question in (QUESTION, SECOND)])
        assert answers(out, name) == wanted[-1]
    assert wanted[0] != wanted[1] != wanted[2]


def test_words_are_told_while_the_answer_is_generated() -> None:
    model, tokenizer = load_model("pocket", device="cpu")
    passes, told = [], []
    model.register_forward_hook(lambda *_: passes.append(1))
    stream_greedily(
        model, tokenizer(SECOND)["input_ids"], PromptEncoder(tokenizer), max_new_tokens=12,
        tell=lambda words: told.append((len(passes), words)),
    )  # fmt: skip
    assert "".join(words for _, words in told).strip() == said_by(model, SECOND, 12).strip()
    assert 0 < next(done for done, words in told if words) < 12


@pytest.fixture
def talk(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], str]]:
    """Talks to the pocket model under a chat template: the prompts that it continues, and what is printed."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}bot"
    AutoModelForCausalLM.from_pretrained(pocket_model_path()).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def talked(typed: str, *words: str | Path, answer: str) -> tuple[list[str], str]:
        seen: list[str] = []
        monkeypatch.setattr(
            "frozencore.cli.speakers.stream_greedily",
            lambda model, context, encoder, *, max_new_tokens, tell: (
                seen.append(encoder.tokenizer.decode(context)),
                tell(answer),
            ),
        )
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status, out, err = command("chat", *words, "--model", tmp_path / "model", "--device", "cpu")
        assert (status, err) == (0, "")
        return seen, out

    return talked


def test_a_conversation_is_rendered_whole_and_begun_anew_when_asked(talk: Callable[..., tuple[list[str], str]]) -> None:
    seen, out = talk("one\ntwo\n/new\nthree\n/quit\nfour\n", "--system", "Be brief.", answer="yes")
    assert seen == [
        "system Be brief. user one bot",
        "system Be brief. user one assistant yes user two bot",
        "system Be brief. user three bot",
    ]
    assert "A question follows those before it. \\ at the end of a line: another follows; /new: a new chat" in out


def test_a_question_may_have_several_lines_as_rows_have(talk: Callable[..., tuple[list[str], str]]) -> None:
    seen, _ = talk("Headline: Rain\\\nClickbait?\nand\\\n\\\nthis\n", answer="no")
    assert seen == [
        "user Headline: Rain\nClickbait? bot",
        "user Headline: Rain\nClickbait? assistant no user and\n\nthis bot",
    ]
    assert talk("the last\\\n", answer="no")[0] == ["user the last\\ bot"]  # no line follows


def test_an_answer_as_long_as_the_context_keeps_place_for_the_question(
    talk: Callable[..., tuple[list[str], str]],
) -> None:
    seen, out = talk("one\n", "--max-new-tokens", "100000", answer="yes")
    assert seen == ["user one bot"]
    assert "left out" not in out


@pytest.mark.parametrize(("data", "is_named"), [("task:svamp", False), ("rows.jsonl", True)])
def test_evaluation_rows_of_a_task_are_new_to_a_run_on_its_training_rows(
    data: str, is_named: bool, tmp_path: Path
) -> None:
    record = made_up_record({"task": "svamp"}, config={"model": "a", "dtype": "auto", "data": data})
    (tmp_path / "result.json").write_text(json.dumps(record.content()))
    assert list(runs_trained_on(data, [tmp_path / "adapter"])) == [tmp_path] * is_named


@pytest.mark.parametrize(
    ("own", "prompt"),
    [
        ({"prompt_style": "chat", "system": "Be brief."}, "system Be brief. user one bot"),
        ({"prompt_style": "plain"}, "one"),
    ],
)
def test_chat_takes_style_and_system_text_of_the_run_and_says_that_an_answer_is_empty(
    own: dict[str, str], prompt: str, talk: Callable[..., tuple[list[str], str]], adapters: list[Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(adapters[0], tmp_path / "run"))
    record = made_up_record({"task": "svamp"}, resolved={**RESOLVED, **own})
    (run / "result.json").write_text(json.dumps(record.content()))
    seen, out = talk("one\n", run, answer="")
    assert seen == [prompt]
    assert "ended its answer at once" in out


def test_chat_writes_prompts_with_the_tokenizer_that_a_trainer_saved_beside_the_adapter(
    talk: Callable[..., tuple[list[str], str]], adapters: list[Path], tmp_path: Path
) -> None:
    trained = Path(shutil.copytree(adapters[0] / "adapter", tmp_path / "trained"))
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = "{% for m in messages %}Q {{ m.content }} {% endfor %}A"
    tokenizer.save_pretrained(trained)
    seen, _ = talk("one\n", trained, adapters[1], answer="yes")
    assert seen == ["Q one A", "user one bot"]


def test_a_chat_of_tokens_without_embeddings_and_one_of_a_damaged_tokenizer_are_one_line(
    command: Command, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that adds tokens to the tokenizer, and trains no embeddings, saves such an adapter."""
    trained = Path(shutil.copytree(adapters[0] / "adapter", tmp_path / "trained"))
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }} {% endfor %}A"
    tokenizer.save_pretrained(trained)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    status, _, err = command("chat", trained, *POCKET)
    assert (status, err.count("\n")) == (2, 1)
    assert "holds the token '<|user|>' (869), but the model has embeddings of 869" in err
    (trained / "tokenizer.json").write_text("{")
    status, _, err = command("chat", trained, *POCKET)
    assert (status, err.count("\n")) == (2, 1)
    assert f"The tokenizer beside the adapter in {trained} cannot be read" in err


def test_chat_says_that_a_core_of_zeros_is_not_trained(
    talk: Callable[..., tuple[list[str], str]], adapters: list[Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    get_peft_model(base, FrozenCoreConfig(r=4, constructor="random")).save_pretrained(str(tmp_path / "shop"))
    _, out = talk("one\n", adapters[0], tmp_path / "shop", answer="yes")
    assert "shop is not trained: its core is zero" in " ".join(out.split())
    assert out.count("is not trained") == 1
