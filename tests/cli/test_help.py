"""The help: verbs in groups, the flags of a run in few lines, and the rest when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from frozencore.cli.app import program
from frozencore.cli.flags import PANELS
from frozencore.cli.verbs import GROUPS, all_verbs
from frozencore.tune.config import run_options

Command = Callable[..., tuple[int, str, str]]
OF_A_RUN = ("tune", "tune-many", "calibrate")
MOST_IN_SIGHT = 20


def verbs() -> Iterator[tuple[list[str], Any]]:
    """The words of each verb, and what typer made of it."""
    for name, command in get_command(program([verb.name for verb in all_verbs()])).commands.items():  # type: ignore[attr-defined]
        yield [name], command
        for own, inner in getattr(command, "commands", {}).items():
            yield [name, own], inner


def plain(shown: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())


def boxes(shown: str) -> dict[str, list[str]]:
    """The flags or verbs of each box of a help text."""
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if title := re.match(r"╭─ ([\w ]+) ─", line):
            found[title[1]] = []
        elif flag := re.match(r"│ [* ]{0,3}((?:--)?[a-z][a-z-]*)", line):
            found[next(reversed(found))].append(flag[1])
    return found


def test_verbs_stand_in_four_groups_with_an_example_each(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = command("-h")
    assert (status, err, out) == (0, "", command("--help")[1])
    found = boxes(out)
    assert list(found) == ["Options", *GROUPS]
    assert [verb for group in GROUPS for verb in found[group]] == [verb.name for verb in all_verbs()]
    for verb in all_verbs():
        shown = plain(command(verb.name, "-h")[1])
        assert verb.examples
        assert all(f"frozencore {verb.name}" in line and plain(line) in shown for line in verb.examples)


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


@pytest.mark.parametrize("verb", OF_A_RUN)
def test_the_help_of_a_run_shows_few_flags_in_groups_and_names_the_way_to_the_rest(
    verb: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    short, long = (command(verb, flag)[1] for flag in ("--help", "--help-all"))
    few, all_of_them = boxes(short), boxes(long)
    assert list(few) == [name for name in ("Options", *PANELS.values()) if name in few]
    assert sum(map(len, few.values())) <= MOST_IN_SIGHT
    rest = sum(map(len, all_of_them.values())) - sum(map(len, few.values()))
    assert f"{rest} more flags: frozencore {verb} --help-all" in short
    assert "--help-all" not in long
    if verb == "tune":
        assert {"--data-root", "--method", "--out"} <= {flag for flags in few.values() for flag in flags}
        assert len(all_of_them) == 1 + len(PANELS)


def test_every_option_of_a_run_is_a_flag_of_tune_in_the_group_of_its_part() -> None:
    (tune,) = (command for words, command in verbs() if words == ["tune"])
    panels = {parameter.name: parameter.rich_help_panel for parameter in tune.params}
    assert {name: panels[name] for name in run_options()} == {
        name: PANELS[option.part] for name, option in run_options().items()
    }
