"""The help: every text in full, in boxes of a few flags, and the rest when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from frozencore.cli.app import program
from frozencore.cli.help import FLAG_GROUPS
from frozencore.cli.verbs import all_verbs
from frozencore.tune.config import run_options

Command = Callable[..., tuple[int, str, str]]
IN_SIGHT = 10
OF_A_RUN = ("tune", "tune-many", "calibrate")


def verbs() -> Iterator[tuple[list[str], Any]]:
    """The words of each verb, and what typer made of it."""
    for name, command in get_command(program([verb.name for verb in all_verbs()])).commands.items():  # type: ignore[attr-defined]
        yield [name], command
        for own, inner in getattr(command, "commands", {}).items():
            yield [name, own], inner


def plain(shown: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())


def boxes(shown: str) -> dict[str, list[str]]:
    """The flags of each box of a help text."""
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if title := re.match(r"╭─ ([\w ]+) ─", line):
            found[title[1]] = []
        elif flag := re.match(r"│ [* ]{0,3}(--[a-z-]+)", line):
            found[next(reversed(found))].append(flag[1])
    return found


def test_help_shows_every_text_as_it_was_written(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    seen = 0
    for words, verb in verbs():
        shown = plain(command(*words, "--help-all")[1])
        for parameter in verb.params:
            if text := getattr(parameter, "help", None):
                seen += "[" in text
                assert plain(text) in shown, (words, parameter.name)
    assert seen >= 2


def test_the_help_of_a_run_has_boxes_of_few_flags_and_names_the_way_to_the_rest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for verb in OF_A_RUN:
        short, long = (command(verb, flag)[1] for flag in ("--help", "--help-all"))
        few, all_of_them = boxes(short), boxes(long)
        names = [group.name for group in FLAG_GROUPS]
        assert list(few) == [name for name in ("Options", *names) if name in few]
        assert max(map(len, few.values())) <= IN_SIGHT
        rest = sum(map(len, all_of_them.values())) - sum(map(len, few.values()))
        assert rest > 0
        assert f"{rest} more flag{'s' if rest > 1 else ''}: frozencore {verb} --help-all" in short
        assert "--help-all" not in long
    assert set(boxes(command("tune", "--help")[1])) == {"Options", *(group.name for group in FLAG_GROUPS)}


def test_every_flag_of_a_run_stands_in_one_box() -> None:
    named = [name for group in FLAG_GROUPS for name in group.in_sight + group.rest]
    assert len(named) == len(set(named))
    flags = {parameter.name for (words, verb) in verbs() if words[0] in OF_A_RUN for parameter in verb.params}
    assert set(named) <= flags
    bases = next(group for group in FLAG_GROUPS if group.name == "Bases")
    options = run_options()
    unnamed = options.keys() - set(named)
    assert unnamed  # options of constructors and of the calibration pass, which a table adds to
    panels = {
        parameter.name: parameter.rich_help_panel
        for (words, verb) in verbs()
        if words == ["tune"]
        for parameter in verb.params
    }
    assert {panels[name] for name in unnamed} == {bases.name}
