"""``frozencore chat``: scripted questions, the answers of several adapters, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore import FrozenCoreConfig
from frozencore.adapter.layer import frozen_core_layers
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import TextRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.exact_match import stream_greedily

Command = Callable[..., tuple[int, str, str]]
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
    return [part.partition("\n\n")[0].strip() for part in parts]


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
        model, TextRow("base", SECOND, ""), PromptEncoder(tokenizer), max_new_tokens=12,
        tell=lambda words: told.append((len(passes), words)),
    )  # fmt: skip
    assert "".join(words for _, words in told).strip() == said_by(model, SECOND, 12).strip()
    assert 0 < next(done for done, words in told if words) < 12


def test_a_conversation_is_rendered_whole_and_begun_anew_when_asked(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}bot{% endif %}"
    )
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = template
    AutoModelForCausalLM.from_pretrained(pocket_model_path()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seen: list[str] = []
    monkeypatch.setattr(
        "frozencore.tune.scoring.exact_match.stream_greedily",
        lambda model, row, encoder, *, max_new_tokens, tell: (seen.append(row.context), tell("yes")),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\nthree\n/quit\nfour\n"))
    status, _, err = command("chat", "--model", folder, "--system", "Be brief.", "--device", "cpu")
    assert (status, err) == (0, "")
    assert seen == [
        "system Be brief. user one bot",
        "system Be brief. user one assistant yes user two bot",
        "system Be brief. user three bot",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give --model NAME"),
        (("nowhere",), "has no adapter_config.json"),
        (("--model", "./none"), "there is no such folder"),
        (("--model", "pocket", "--system", "x"), "--system needs a chat template"),
        (("--model", "pocket", "--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_what_a_chat_cannot_begin_with_is_one_line(command: Command, words: tuple[str, ...], said: str) -> None:
    status, _, err = command("chat", *words)
    assert (status, err.count("\n")) == (2, 1)
    assert said in err
