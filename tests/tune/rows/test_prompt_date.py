"""Prompts of chat templates that print the date: the same text on every day, the day that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as chat_template_utils

from frozencore.errors import ArtifactError, ConfigError
from frozencore.tune.config import make_config
from frozencore.tune.evaluation.evaluate import Evaluation, evaluate
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PROMPT_DATE, PromptEncoder, with_fixed_date
from frozencore.tune.run.prepare import prepare
from frozencore.tune.suite import find_task

LLAMA = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}"""  # as Llama 3.2's
REGARDLESS = "  {% if true %}{{ strftime_now('%A, %B %-d, %Y (%Y-%m-%d)') }}{% endif %}\n \n"
MESSAGES = "{% for m in messages %}<s>{{ m.content }}</s>\n{% endfor %}"
BOTH = LLAMA + REGARDLESS + MESSAGES
HELLO = [{"role": "user", "content": "Is it?"}]
EXAMPLE = Example("row-1", "Is it?", " yes", (" yes", " no"))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes it another day of January 2031."""

    def set_day(day: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2031, 1, day, 12)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    return set_day


@pytest.fixture
def dated(byte_tokenizer: Callable[..., Any]) -> Any:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = BOTH
    return tokenizer


def test_prompts_are_the_same_tokens_tomorrow(dated: Any, on: Callable[[int], None]) -> None:
    rows, without = [], []
    for day in (1, 2):
        on(day)
        encoder = PromptEncoder(dated)
        text = encoder.render(EXAMPLE)
        rows.append((encoder.training_rows([text]), encoder.choice_rows([text]), encoder.context_rows([text])))
        without.append(dated.apply_chat_template(HELLO, tokenize=False))
    assert rows[0] == rows[1]
    assert without[0] != without[1]  # the clock that the templates asked was ours to fake


@pytest.mark.parametrize("template", [BOTH, REGARDLESS, "\n" + REGARDLESS, "\n\n  {{- strftime_now('%F') }} ", LLAMA])
def test_the_fixed_date_stands_where_the_template_puts_the_days(
    template: str, dated: Any, on: Callable[[int], None]
) -> None:
    """On that very day the tokenizer itself gives the same text, to the byte."""
    on(5)
    dated.chat_template = template if template == BOTH else template + MESSAGES
    plain = dated.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert "2031" in plain
    encoder = PromptEncoder(dated, today=date(2031, 1, 5))
    shown = encoder.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)  # as the harness
    assert encoder.render(EXAMPLE).context == shown == plain
    assert "2031" not in PromptEncoder(dated).render(EXAMPLE).context


def test_every_directive_is_spelled_as_strftime_spells_it(dated: Any) -> None:
    directives = "%a %A %w %d %b %B %m %y %Y %H %I %M %S %f %p %j %U %W %c %x %X %G %u %V %F %T %-d %-m %-H %-j"
    dated.chat_template = f"{{{{ strftime_now('{directives}') }}}}"
    for today in (date(2024, 7, 6), date(2031, 12, 29)):
        shown = with_fixed_date(dated, today).apply_chat_template(HELLO, tokenize=False)
        assert shown == datetime(today.year, today.month, today.day).strftime(directives)


def test_templates_by_name_and_templates_without_a_date(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(chat=True)
    assert with_fixed_date(tokenizer, PROMPT_DATE) is tokenizer
    assert with_fixed_date(byte_tokenizer(), PROMPT_DATE).chat_template is None
    tokenizer.chat_template = {"default": "{{ strftime_now('%Y') }}", "tool_use": "tools"}
    named = with_fixed_date(tokenizer, PROMPT_DATE)
    assert [named.apply_chat_template(HELLO, tokenize=False, chat_template=name) for name in (None, "tool_use")] == [
        "2024", "tools",
    ]  # fmt: skip


@pytest.fixture
def dated_model(tmp_path: Path) -> Path:
    """The pocket model with a chat template that prints the date."""
    folder = tmp_path / "dated"
    folder.mkdir()
    for file in pocket_model_path().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": BOTH}))
    return folder


def test_a_run_says_its_date_and_has_its_rows(dated_model: Path) -> None:
    options = {
        "model": str(dated_model), "task": "pocket-sentiment", "num_train": 8, "num_evaluation": 4,
        "calibration_size": 4, "device": "cpu",
    }  # fmt: skip
    default, same, other = (
        make_config(**options, **date) for date in ({}, {"prompt_date": "2024-07-26"}, {"prompt_date": "2025-01-01"})
    )
    assert default.content()["prompt_date"] == "2024-07-26"
    assert default == same
    rows = [prepare(config, lambda *_: None).rows.fingerprints for config in (default, other)]
    assert rows[0] != rows[1]


def test_scores_of_another_date_are_not_taken_for_these(dated_model: Path, tmp_path: Path) -> None:
    task = find_task("pocket-sentiment")
    evaluation = Evaluation(model=str(dated_model), tasks=(task,), num_evaluation=4, device="cpu")
    record = evaluate(evaluation, tmp_path / "out", lambda *_: None)
    assert record["prompt_date"] == "2024-07-26"
    other = Evaluation(
        model=str(dated_model), tasks=(task,), num_evaluation=4, device="cpu", prompt_date=date(2025, 1, 1)
    )
    with pytest.raises(ArtifactError, match="holds the score of another model, adapter, set of rows or options"):
        evaluate(other, tmp_path / "out", lambda *_: None)


def test_a_date_that_is_none_is_one_line(command: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--model", "pocket", "--task", "pocket-math", "--out", tmp_path / "out", "--prompt-date", "26 Jul 2024")
    for verb in ("tune", "evaluate", "calibrate"):
        status, _, error = command(verb, *words)
        assert (status, "--prompt-date must be a day as YYYY-MM-DD, but '26 Jul 2024' came" in error) == (2, True)
    with pytest.raises(ConfigError, match="--prompt-date: "):
        make_config(model="pocket", task="pocket-math", prompt_date="tomorrow")
