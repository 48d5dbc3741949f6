"""The groups in which the help of a run shows its flags: a few of each in sight, the rest behind ``--help-all``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from frozencore.cli.other_names import refuse_other_flags
from frozencore.words import num_of

HELP, HELP_ALL = "--help", "--help-all"


@dataclass(frozen=True)
class Group:
    """A box of the help; the names are those of a verb's parameters.

    Attributes:
        in_sight: The flags that ``--help`` shows.
        rest: Those that only ``--help-all`` shows.
    """

    name: str
    in_sight: tuple[str, ...]
    rest: tuple[str, ...] = ()


FLAG_GROUPS = (
    Group(
        "Data",
        ("model", "data", "task", "columns", "max_length", "truncate", "skip_long", "num_train", "num_evaluation"),
        ("data_root", "skip_bad", "packing", "prompt_style", "prompt_date"),
    ),
    Group("Method", ("method", "rank", "targets", "rank_budget", "alpha", "basis", "dtype", "device"), ("layers",)),
    Group("Bases", ("calibration_size", "damping", "memory_budget", "moments"), ("calibration_task",)),
    Group(
        "Steps",
        ("learning_rate", "epochs", "batch_size", "accumulation", "warmup", "seed", "refresh", "sweep", "slots"),
        ("padding_free", "refresh_cost", "refresh_memory"),
    ),
    Group("Privacy", ("private_epsilon", "private_delta"), ("private_clip",)),
    Group(
        "Scoring",
        ("select_checkpoint", "patience", "samples", "exact_match"),
        ("evaluate_on", "select_by", "max_new_tokens", "forgetting", "paper_steps"),
    ),
    Group("Output", ("output", "resume", "dry_run", "report_to", "all_layers", "config_file"), ("save_steps",)),
)
_OTHER = FLAG_GROUPS[2]  # what is not named is an option of a constructor or of the calibration pass


def group_of(flag: str) -> Group:
    """The group that a parameter of a verb belongs to."""
    return next((group for group in FLAG_GROUPS if flag in group.in_sight + group.rest), _OTHER)


def in_order(flags: Iterable[str]) -> list[str]:
    """Flags as the help shows them: group by group, those in sight first."""

    def place(flag: str) -> tuple[int, int]:
        group = group_of(flag)
        names = group.in_sight + group.rest
        return FLAG_GROUPS.index(group), names.index(flag) if flag in names else len(names)

    return sorted(flags, key=place)


def command_of(program: typer.Typer, words: Iterable[str]) -> TyperGroup:
    """The program as it is run: its help shows every text as it stands, and of long verbs the flags in sight."""
    words = list(words)
    command = get_command(program)
    assert isinstance(command, TyperGroup)
    for verb in _commands(command):
        if verb.name in words[:1] and _takes_run(verb):
            flags = [spelled for parameter in verb.params for spelled in parameter.opts]
            refuse_other_flags([word for word in words if word.startswith("-")], [*flags, HELP, HELP_ALL])
    if HELP in words or HELP_ALL in words:
        _show_as_text(command)
    if HELP in words and HELP_ALL not in words:
        _hide_rest(command)
    return command


def _show_as_text(command: TyperGroup | TyperCommand) -> None:
    """Rich reads ``[lm-eval]`` in a help text as markup and leaves it out."""
    command.help = escape(command.help or "")
    for parameter in command.params:
        if isinstance(parameter, TyperOption | TyperArgument) and parameter.help:
            parameter.help = escape(parameter.help)
    for inner in _commands(command):
        _show_as_text(inner)


def _hide_rest(program: TyperGroup) -> None:
    """Of each verb that takes a run: leave out the flags that are not in sight, and say how many there are."""
    for verb in filter(_takes_run, _commands(program)):
        flags = {str(flag.name): flag for flag in verb.params if isinstance(flag, TyperOption)}
        rest = [flag for name, flag in flags.items() if name not in group_of(name).in_sight]
        for flag in rest:
            flag.hidden = True
        verb.epilog = f"{num_of(len(rest), 'more flag')}: frozencore {verb.name} {HELP_ALL}"


def _takes_run(verb: TyperGroup | TyperCommand) -> bool:
    return any(parameter.name == "calibration_size" for parameter in verb.params)


def _commands(command: TyperGroup | TyperCommand) -> Iterable[TyperGroup | TyperCommand]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return [one for one in inner if isinstance(one, TyperGroup | TyperCommand)]
