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
from frozencore.tune.pocket import pocket_model_path

Command = Callable[..., tuple[int, str, str]]
QUESTION, SECOND = "Tom has 3 cats and buys 2 cats .", "Ann has 2 dogs ."


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter of the pocket model, which answers otherwise than its base."""
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    model = get_peft_model(base, FrozenCoreConfig(r=4, constructor="random", target_modules="all-linear"))
    generator = torch.Generator().manual_seed(3)
    for layer in frozen_core_layers(model, "default").values():
        core = layer.frozencore_R["default"].weight
        core.data = torch.randn(core.shape, generator=generator)
    folder = tmp_path_factory.mktemp("run")
    model.save_pretrained(str(folder / "adapter"))
    return folder


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
    command: Command, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n{SECOND}\n"))
    words = ("chat", adapter, "--with-base", "--max-new-tokens", "12", "--device", "cpu")
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
    wanted = [said_by(base, question, 12).strip() for question in (QUESTION, SECOND)]
    assert answers(out, "base") == wanted
    tuned = PeftModel.from_pretrained(base, adapter / "adapter").eval()
    told = [said_by(tuned, question, 12).strip() for question in (QUESTION, SECOND)]
    assert answers(out, adapter.name) == told
    assert told != wanted


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
