"""A verb of the command line."""

from __future__ import annotations

from dataclasses import dataclass

RESUMED = "the same command with --resume goes on from what is there"
GOES_ON = "the same command goes on from what is there"


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: where its function, or its own verbs, are, and what it does.

    Attributes:
        place: Module and attribute, such as ``"frozencore_lab.cli.demo:demo"``; a dot first stands for this package.
        when_ended_early: What is said after Ctrl-C.
        by_several: Whether processes that are started together share its work.
    """

    name: str
    place: str
    help: str
    when_ended_early: str = "the same command starts anew"
    by_several: bool = False
