"""The verbs of the command line: each is a row here and a file, which is imported only when its verb is called."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import typer

from frozencore.errors import ConfigError
from frozencore.words import nearest_name

RESUMED = "the same command with --resume goes on from what is there"
GOES_ON = "the same command goes on from what is there"
IN_LAB = ("schema", "campaign", "demo")
LAB_MISSING = "this needs the lab. Install it: pip install frozencore-lab, or pip install ./lab in the repository."
VERBS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "fit", "sft", "run"), "tune"),
    **dict.fromkeys(("eval", "score", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("show", "info"), "inspect"),
    **dict.fromkeys(("diagnose", "verify"), "doctor"),
}
"""Verbs of other programs, and the verb here that does the same."""


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Attributes:
        place: Module and attribute of its function, or of its own verbs: ``"frozencore_lab.cli.demo:demo"``. A module
            that starts with a dot is in this package.
        when_ended_early: How to go on after Ctrl-C.
        by_several: Whether several processes, such as those of torchrun, may share its work.
    """

    name: str
    place: str
    help: str
    when_ended_early: str = "the same command starts from the beginning"
    by_several: bool = False


VERBS = (
    Verb(
        "tune", ".tune:tune", "Calibrate, train, score and save an adapter: one run of the recipe.", RESUMED,
        by_several=True,
    ),
    Verb(
        "tune-many", ".tune_many:tune_many",
        "Train a core for each of many tenants, all at once on one basis: an adapter and a record each.",
        RESUMED, by_several=True,
    ),
    Verb(
        "calibrate", ".calibrate:calibrate",
        "Collect moments and choose the bases, without training: a moments file and an adapter whose cores are zero.",
    ),
    Verb(
        "advise", ".advise:advise",
        "Measure, before any training, what bases, damping and targets would gain on rows held out for it.",
    ),
    Verb(
        "evaluate", ".evaluate:evaluate",
        "Score a model, or several adapters on it, on many tasks. Exit status 1 if a task could not be scored.",
        GOES_ON,
    ),
    Verb(
        "chat", ".chat:chat",
        "Talk with a model and with adapters on it: each answers, one after the other, as its words come.",
    ),
    Verb(
        "inspect", ".inspect:inspect",
        "Show the bases of an adapter: size, coherence, cores, what they capture, their angles to another's.",
    ),
    Verb("export", ".export:export", "Write an adapter in a form that is served without frozencore."),
    Verb("adapter", ".adapter:adapter_app", "Pack an adapter to its cores alone beside a basis, or unpack it."),
    Verb("merge", ".adapter:merge", "Write the exact weighted sum of adapters that share a basis."),
    Verb(
        "check", ".export:check",
        "Say which serving engines take a LoRA directory. Exit status 1 if one of them does not.",
    ),
    Verb(
        "doctor", ".doctor:doctor",
        "Say what a path holds, what is wrong with it and what to do. Exit status 0: sound, 1: not, 2: nothing of "
        "frozencore is there.",
    ),
    Verb("tasks", ".tasks:tasks_app", "List the tasks, show one as a model sees it, or export them."),
)  # fmt: skip


@cache
def all_verbs() -> tuple[Verb, ...]:
    """The verbs of this package, and those of installed packages that add some, such as frozencore-lab."""
    return (*VERBS, *(other.load() for other in entry_points(group="frozencore.verbs")))


def add_verbs(app: typer.Typer, words: Collection[str]) -> None:
    """Add every verb; those that are not among the words of the command line have only a name and a help text."""
    for verb in all_verbs():
        module, _, attribute = verb.place.partition(":")
        called = getattr(import_module(module, __package__), attribute) if verb.name in words else _not_called
        if isinstance(called, typer.Typer):
            app.add_typer(called, name=verb.name, help=verb.help)
        else:
            app.command(verb.name, help=verb.help)(called)


def _not_called() -> None:
    raise AssertionError("a verb that is called is among the words of the command line")


def refuse_unknown_verb(words: Sequence[str]) -> None:
    """Refuse a first word that is no verb, and name the verb that is nearest.

    Raises:
        ConfigError: There is no such verb, or it is one of the lab, which is not installed.
    """
    word = next((word for word in words if word != "--debug"), "-")
    verbs = [verb.name for verb in all_verbs()]
    if word.startswith("-") or word in verbs:
        return
    if word in IN_LAB:
        raise ConfigError(f"frozencore {word}: {LAB_MISSING}")
    meant = VERBS_ELSEWHERE.get(word) or nearest_name(word, verbs)
    guess = f"Did you mean {meant!r}? " if meant else ""
    raise ConfigError(f"There is no verb {word!r}. {guess}Known: {', '.join(verbs)}.")
