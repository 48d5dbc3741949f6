"""What ``frozencore`` can be asked for. A verb is a row below and a file, imported when it is named."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

import typer


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: where its function, or its own verbs, are, and what it does.

    Attributes:
        when_ended_early: What is said after Ctrl-C.
        by_several: Whether processes that are started together share its work.
    """

    name: str
    place: str
    help: str
    when_ended_early: str = "the same command starts anew"
    by_several: bool = False


RESUMED = "the same command with --resume goes on from what is there"
GOES_ON = "the same command goes on from what is there"

VERBS = (
    Verb(
        "tune", "tune:tune", "Calibrate, train, score and save an adapter: one run of the recipe.", RESUMED,
        by_several=True,
    ),
    Verb(
        "tune-many", "tune_many:tune_many",
        "Train a core for each of many tenants, all at once on one basis: an adapter and a record each.",
        RESUMED, by_several=True,
    ),
    Verb(
        "calibrate", "calibrate:calibrate",
        "Collect moments and fix the bases, without training: a moments file and an adapter with zero cores.",
    ),
    Verb(
        "advise", "advise:advise",
        "Say before any training what bases, damping and targets would gain on rows that they have not seen.",
    ),
    Verb(
        "evaluate", "evaluate:evaluate",
        "Score a model, or several adapters on it, on many tasks. Exit status 1 if a task could not be scored.",
        GOES_ON,
    ),
    Verb(
        "inspect", "inspect:inspect",
        "Show what a basis is: per layer its size, coherence and core, what it captured, its angles to another.",
    ),
    Verb("export", "export:export", "Write an adapter in a form that is served without frozencore."),
    Verb("adapter", "adapter:adapter_app", "Pack an adapter to cores alone beside a basis, or unpack it."),
    Verb("merge", "adapter:merge", "Write the weighted sum of adapters on one basis: of what they do, exactly."),
    Verb(
        "check", "check:check",
        "Say which serving engines take a LoRA directory; exit status 1 if one of them does not.",
    ),
    Verb(
        "demo", "demo:demo",
        "Adapt the shipped pocket model to its four tasks with every constructor and LoRA; show what each was worth.",
        GOES_ON,
    ),
    Verb("schema", "campaign:schema", "Print the JSON schema of a campaign's YAML file."),
    Verb(
        "doctor", "doctor:doctor",
        "Say what a path is, what is wrong with it and what to do. Exit status 0: sound, 1: not, 2: not one of ours.",
    ),
    Verb("tasks", "evaluate:tasks_app", "List the tasks, show one as a model sees it, or export them."),
    Verb("campaign", "campaign:campaign_app", "Many runs from one specification: plan, run, look, report.", GOES_ON),
)  # fmt: skip


def add_verbs(app: typer.Typer, words: Collection[str]) -> None:
    """Add every verb: those among the words of the command line as they are, of the others only name and help."""
    for verb in VERBS:
        module, _, attribute = verb.place.partition(":")
        found = getattr(import_module(f"frozencore.cli.{module}"), attribute) if verb.name in words else _not_named
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb.name, help=verb.help)
        else:
            app.command(verb.name, help=verb.help)(found)


def _not_named() -> None:
    raise AssertionError("a verb that is called stands among the words of the command line")
