"""The verbs of the command line: each is a row here and a file that is imported only when the verb is called."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer

from frozencore.errors import LAB_MISSING, ConfigError
from frozencore.text import unknown_name

DEBUG = "--debug"
RESUMED = "the same command with --resume continues from what is saved"
GOES_ON = "the same command continues from what is saved"
NOTHING_KEPT = "nothing is saved yet"
IN_LAB = ("task", "schema", "campaign", "demo")
GROUPS = ("Train", "Use", "Share", "Study")


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Attributes:
        place: Module and attribute of its function, or of its group of verbs: ``".tune:tune"``. A leading dot means
            this package.
        example: Command lines for its help, without ``frozencore``.
        when_ended_early: How to continue after Ctrl-C, if something is saved.
        by_several: Whether several processes, such as those of torchrun, may share its work.
    """

    name: str
    place: str
    help: str
    example: str | tuple[str, ...] = ()
    group: str = GROUPS[-1]
    when_ended_early: str = "the same command starts from the beginning"
    by_several: bool = False

    @property
    def examples(self) -> tuple[str, ...]:
        """The example lines, as a user types them."""
        lines = (self.example,) if isinstance(self.example, str) else self.example
        return tuple(f"frozencore {line}" for line in lines)


VERBS = (
    Verb(
        "tune", ".tune:tune", "Calibrate, train, score and save an adapter.",
        (
            "tune --model smollm2 --data rows.jsonl --out runs/mine",
            "tune --model smollm2 --data task:svamp --data-root DATA --rank 8 --out runs/svamp",
        ),
        "Train", RESUMED, by_several=True,
    ),
    Verb(
        "tune-many", ".tune:tune_many",
        "Train a core for each of many tenants, together on one basis; each gets an adapter and a record.",
        "tune-many --model smollm2 --tenants rows/ --basis runs/basis/basis --out runs/tenants",
        "Train", RESUMED, by_several=True,
    ),
    Verb(
        "calibrate", ".tune:calibrate",
        "Choose the bases without training; write a basis for many adapters, and an adapter with zero cores.",
        "calibrate --model smollm2 --tenants rows/ --out runs/basis", "Train", by_several=True,
    ),
    Verb(
        "evaluate", ".evaluate:evaluate",
        "Score a model, or several adapters on it, on many tasks. Exit status 1 if a task could not be scored.",
        "evaluate --model smollm2 --adapter runs/mine --data rows.jsonl --out scores", "Use",
    ),
    Verb(
        "chat", ".chat:chat", "Talk with a model and with adapters on it; each streams its answer in turn.",
        "chat runs/mine --with-base", "Use",
    ),
    Verb(
        "inspect", ".inspect:inspect",
        "Say what a folder holds, and show the ranks, sizes and cores of an adapter's or basis's layers.",
        "inspect runs/mine", "Use",
    ),
    Verb(
        "export", ".export:export", "Write an adapter in another form: for an engine, a browser, a link.",
        "export runs/mine --out lora", "Share",
    ),
    Verb(
        "merge", ".export:merge", "Write the weighted sum of adapters that share a basis.",
        "merge tenants/anna tenants/ben --out both", "Share",
    ),
    Verb(
        "compress", ".compress:compress",
        "Compress LoRAs, or adapters on bases of their own, into one basis and a core for each.",
        "compress loras/* --rank 32 --out shop", "Share",
        "the same command starts from the beginning, unless --out is there, which is then whole",
    ),
)  # fmt: skip


@cache
def all_verbs() -> tuple[Verb, ...]:
    """The verbs of this package and of installed packages that add verbs, such as frozencore-lab."""
    return (*VERBS, *(other.load() for other in entry_points(group="frozencore.verbs")))


def add_verbs(app: typer.Typer, words: Collection[str]) -> None:
    """Add every verb; one that is not among the words of the command line gets only a name and a help text."""
    for verb in all_verbs():
        module, _, attribute = verb.place.partition(":")
        called = getattr(import_module(module, __package__), attribute) if verb.name in words else lambda: None
        settings: dict[str, Any] = {
            "help": verb.help,
            "epilog": "\n\n".join(("For example:", *verb.examples)),
            "rich_help_panel": verb.group,
        }
        if isinstance(called, typer.Typer):
            app.add_typer(called, name=verb.name, **settings)
        else:
            app.command(verb.name, **settings)(called)


def named_verb(words: Sequence[str]) -> str:
    """The word where a verb stands, which may be another word; empty if there is none."""
    return next((word for word in words if word != DEBUG), "")


def refuse_unknown_verb(words: Sequence[str]) -> None:
    """Raise ConfigError if the first word is no verb, or is a verb of the lab, which is not installed."""
    word = named_verb(words) or "-"
    verbs = [verb.name for verb in all_verbs()]
    if word.startswith("-") or word in verbs:
        return
    if word in IN_LAB:
        raise ConfigError(f"frozencore {word}: {LAB_MISSING}")
    raise ConfigError(unknown_name("verb", word, verbs))
