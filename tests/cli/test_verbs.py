"""The table of verbs: what the help shows of them, what a shell completes, and verbs of other packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from frozencore.cli import verbs as table
from frozencore.cli.app import program
from frozencore.cli.flags import PANELS
from frozencore.cli.verbs import GROUPS, all_verbs
from frozencore.errors import LAB_MISSING
from frozencore.tune.config import run_options
from frozencore.tune.rows import sources

Command = Callable[..., tuple[int, str, str]]
MOST_BASIC_FLAGS = 22


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


def test_verbs_stand_in_four_groups(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = command("-h")
    assert (status, err, out) == (0, "", command("--help")[1])
    found = boxes(out)
    assert list(found) == ["Options", *GROUPS]
    assert [verb for group in GROUPS for verb in found[group]] == [verb.name for verb in all_verbs()]


def test_help_shows_every_text_and_example_as_it_was_written(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    texts_with_brackets, of_verb = 0, {verb.name: verb for verb in all_verbs()}
    for words, verb in verbs():
        shown = plain(command(*words, "--help-all")[1])
        for parameter in verb.params:
            if text := getattr(parameter, "help", None):
                texts_with_brackets += "[" in text
                assert plain(text) in shown, (words, parameter.name)
        if len(words) == 1:
            one = of_verb[words[0]]
            assert one.examples
            assert all(f"frozencore {one.name}" in line and plain(line) in shown for line in (*one.examples,))
            assert plain(one.help) in shown
    assert texts_with_brackets >= 1


@pytest.mark.parametrize("verb", ["tune", "tune-many", "calibrate"])
def test_the_help_of_a_run_shows_few_flags_in_groups_and_names_the_way_to_the_rest(
    verb: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    short, long = (command(verb, flag)[1] for flag in ("--help", "--help-all"))
    few, all_of_them = boxes(short), boxes(long)
    assert list(few) == [name for name in ("Options", *PANELS.values()) if name in few]
    assert sum(map(len, few.values())) <= MOST_BASIC_FLAGS
    rest = sum(map(len, all_of_them.values())) - sum(map(len, few.values()))
    assert f"{rest} more flags: frozencore {verb} --help-all" in short
    assert "--help-all" not in long
    if verb == "tune":
        assert {"--data-root", "--method", "--out", "--columns", "--eval-data"} <= {
            flag for flags in few.values() for flag in flags
        }
        assert len(all_of_them) == 1 + len(PANELS)


def test_every_option_of_a_run_is_a_flag_of_tune_in_the_group_of_its_part() -> None:
    (tune,) = (command for words, command in verbs() if words == ["tune"])
    panels = {parameter.name: parameter.rich_help_panel for parameter in tune.params}
    assert {name: panels[name] for name in run_options()} == {
        name: PANELS[option.part] for name, option in run_options().items()
    }


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if only frozencore were installed."""
    monkeypatch.setattr(table, "entry_points", lambda **_: ())
    table.all_verbs.cache_clear()
    yield
    table.all_verbs.cache_clear()


@pytest.mark.usefixtures("without_lab")
def test_without_the_lab_its_verbs_say_in_one_line_how_to_get_it(command: Command) -> None:
    for verb in table.IN_LAB:
        assert command(verb) == (2, "", f"frozencore: frozencore {verb}: {LAB_MISSING}\n")
    out = command("--help")[1]
    assert "tune-many" in out
    assert "campaign" not in out


def test_without_the_lab_a_task_says_in_one_line_how_to_get_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "source_kind", lambda _: None)
    for given in ("--data task:sst2", "--task sst2"):
        run = command("tune", "--model", "pocket", *given.split(), "--out", "x")
        assert run == (2, "", f"frozencore: task:sst2: {LAB_MISSING}\n")


OFFERED = {
    "": {verb.name for verb in all_verbs()},
    "tu": {"tune", "tune-many"},
    "tune --calibration-": {"--calibration-size", "--calibration-batch", "--calibration-data", "--calibration-task"},
    "tune --method mil": {"milora"},
    "tune --task pocket-m": {"pocket-math"},
    "tune --dtype b": {"bfloat16"},
    "campaign st": {"status"},
}


@pytest.mark.parametrize("begun", OFFERED)
def test_verbs_flags_and_the_values_that_have_names_are_offered(
    begun: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"frozencore {begun}"
    monkeypatch.setenv("_FROZENCORE_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    status, out, err = command()
    assert (status, err) == (0, "")
    assert all(f'"{word}"' in out for word in OFFERED[begun])
    monkeypatch.setenv("_FROZENCORE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    status, out, err = command()
    assert (status, err, set(out.split())) == (0, "", OFFERED[begun])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_that_is_printed_completes_in_a_bash_without_torch(tmp_path: Path) -> None:
    program = tmp_path / "frozencore"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom frozencore_command import main\ntry:\n    main()\nfinally:\n"
        "    print('torch' if 'torch' in sys.modules else 'light', file=sys.stderr)\n"
    )
    program.chmod(0o755)
    asked = (
        'eval "$(frozencore --show-completion bash)"; complete -p frozencore; '
        "COMP_WORDS=(frozencore tune --calibration-s); COMP_CWORD=2; _frozencore_completion frozencore; "
        "echo offered ${COMPREPLY[@]}"
    )
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", asked], env=path, capture_output=True, text=True, check=True)
    assert "-F _frozencore_completion frozencore" in done.stdout
    assert "offered --calibration-size\n" in done.stdout
    assert done.stderr.split() == ["light", "light"]
