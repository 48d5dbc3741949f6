"""What ``frozencore`` can be asked for. A verb is a row below and a file, imported when it is named."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import typer

from frozencore.cli.verb import GOES_ON, RESUMED, Verb

IN_LAB = ("schema", "campaign", "demo")
LAB_MISSING = "this needs the lab. Install it: pip install frozencore-lab, or pip install ./lab in the repository."


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
        "Collect moments and fix the bases, without training: a moments file and an adapter with zero cores.",
    ),
    Verb(
        "advise", ".advise:advise",
        "Say before any training what bases, damping and targets would gain on rows that they have not seen.",
    ),
    Verb(
        "evaluate", ".evaluate:evaluate",
        "Score a model, or several adapters on it, on many tasks. Exit status 1 if a task could not be scored.",
        GOES_ON,
    ),
    Verb(
        "inspect", ".inspect:inspect",
        "Show what a basis is: per layer its size, coherence and core, what it captured, its angles to another.",
    ),
    Verb("export", ".export:export", "Write an adapter in a form that is served without frozencore."),
    Verb("adapter", ".adapter:adapter_app", "Pack an adapter to cores alone beside a basis, or unpack it."),
    Verb("merge", ".adapter:merge", "Write the weighted sum of adapters on one basis: of what they do, exactly."),
    Verb(
        "check", ".check:check",
        "Say which serving engines take a LoRA directory; exit status 1 if one of them does not.",
    ),
    Verb(
        "doctor", ".doctor:doctor",
        "Say what a path is, what is wrong with it and what to do. Exit status 0: sound, 1: not, 2: not one of ours.",
    ),
    Verb("tasks", ".evaluate:tasks_app", "List the tasks, show one as a model sees it, or export them."),
)  # fmt: skip


@cache
def all_verbs() -> tuple[Verb, ...]:
    """Our verbs, and those of packages that are installed beside us, such as frozencore-lab."""
    return (*VERBS, *(other.load() for other in entry_points(group="frozencore.verbs")))


def add_verbs(app: typer.Typer, words: Collection[str]) -> None:
    """Add every verb: those among the words of the command line as they are, of the others only name and help."""
    for verb in all_verbs():
        module, _, attribute = verb.place.partition(":")
        found = getattr(import_module(module, __package__), attribute) if verb.name in words else _not_named
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb.name, help=verb.help)
        else:
            app.command(verb.name, help=verb.help)(found)


def _not_named() -> None:
    raise AssertionError("a verb that is called stands among the words of the command line")
