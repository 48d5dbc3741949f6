"""The help of a verb: flags in groups, the important ones with ``--help`` and all with ``--help-all``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from frozencore.errors import ConfigError
from frozencore.words import nearest_name, num_of

HELP, HELP_ALL = "--help", "--help-all"
FLAGS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("--r", "--lora-r", "--lora-rank", "--lora-dim"), "--rank"),
    **dict.fromkeys(("--lora-alpha", "--scale"), "--alpha"),
    **dict.fromkeys(("--target-modules", "--lora-target-modules", "--lora-target", "--modules"), "--targets"),
    **dict.fromkeys(("--model-name-or-path", "--model-name", "--base-model", "--base"), "--model"),
    **dict.fromkeys(("--dataset", "--dataset-name", "--train-file", "--train-data", "--data-path"), "--data"),
    **dict.fromkeys(("--num-train-epochs", "--num-epochs"), "--epochs"),
    **dict.fromkeys(("--per-device-train-batch-size", "--micro-batch-size", "--train-batch-size"), "--batch-size"),
    **dict.fromkeys(("--gradient-accumulation-steps", "--grad-accum"), "--accumulation"),
    **dict.fromkeys(("--output-dir", "--save-dir", "-o"), "--output"),
    **dict.fromkeys(("--max-seq-length", "--max-seq-len", "--cutoff-len", "--block-size"), "--max-length"),
    "--warmup-ratio": "--warmup",
    "--resume-from-checkpoint": "--resume",
    **dict.fromkeys(("--constructor", "--peft-type"), "--method"),
    **dict.fromkeys(("--torch-dtype", "--precision"), "--dtype"),
}
"""Flags of other programs, and the flag here that means the same."""


@dataclass(frozen=True)
class Group:
    """A group of flags in the help, by the names of the verb's parameters.

    Attributes:
        in_sight: The flags that ``--help`` shows.
        rest: The flags that only ``--help-all`` shows.
    """

    name: str
    in_sight: tuple[str, ...]
    rest: tuple[str, ...] = ()


FLAG_GROUPS = (
    Group(
        "Data",
        (
            "model",
            "data",
            "task",
            "tenants",
            "columns",
            "eval_data",
            "max_length",
            "truncate",
            "skip_long",
            "num_train",
        ),
        ("num_evaluation", "loss_on", "data_root", "skip_bad", "prompt_style", "prompt_date"),
    ),
    Group(
        "Method",
        ("method", "rank", "targets", "alpha", "basis", "dtype", "device"),
        ("layers",),
    ),
    Group("Bases", ("calibration_size", "damping", "memory_budget", "moments"), ("calibration_task",)),
    Group(
        "Steps",
        ("learning_rate", "epochs", "batch_size", "accumulation", "warmup", "seed", "slots"),
    ),
    Group(
        "Scoring",
        ("select_checkpoint", "patience", "samples", "exact_match"),
        ("evaluate_on", "select_by", "max_new_tokens", "forgetting", "paper_steps", "rows_by_seed"),
    ),
    Group(
        "Output",
        ("output", "resume", "dry_run", "report_to", "push_to_hub", "all_layers", "config_file"),
        ("save_steps",),
    ),
)
_OTHER = FLAG_GROUPS[2]  # flags without a group are options of a constructor or of the calibration pass


def group_of(flag: str) -> Group:
    """The group that a parameter of a verb belongs to."""
    return next((group for group in FLAG_GROUPS if flag in group.in_sight + group.rest), _OTHER)


def in_order(flags: Iterable[str]) -> list[str]:
    """Sort flags for the help: group by group, in each group the visible ones first."""
    named = [name for group in FLAG_GROUPS for name in group.in_sight + group.rest]
    places = {name: place for place, name in enumerate(named)}
    return sorted(flags, key=lambda flag: (FLAG_GROUPS.index(group_of(flag)), places.get(flag, len(named))))


def command_of(program: typer.Typer, words: Sequence[str]) -> TyperGroup:
    """Make the program's command, which shows help texts unchanged and hides less important flags."""
    command = get_command(program)
    assert isinstance(command, TyperGroup)
    for verb in filter(_takes_run, _commands(command)):
        if HELP in words:
            _hide_rest(verb)
    if HELP in words or HELP_ALL in words:
        _show_as_text(command)
    return command


def refuse_unknown_flag(command: TyperGroup, words: Sequence[str]) -> None:
    """Refuse a flag that the verb does not have, and name the one that was meant; typer lists all that look similar.

    Raises:
        ConfigError: Such a flag is among the words.
    """
    named: list[TyperGroup | TyperCommand] = [command]
    for word in words:
        named += [inner for inner in _commands(named[-1]) if inner.name == word]
    parameters = [parameter for one in named for parameter in one.params]
    flags = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)} | {HELP}
    for word in words:
        came = word.partition("=")[0]
        spelled = came.replace("_", "-")
        meant = FLAGS_ELSEWHERE.get(spelled, spelled)
        if not came.startswith("-") or came in flags:
            continue
        if meant in flags:
            raise ConfigError(f"There is no flag {came}. Give {meant} instead.")
        if came.startswith("--") and (nearest := nearest_name(came, flags)) is not None:
            raise ConfigError(f"There is no flag {came}. Did you mean {nearest}?")


def _show_as_text(command: TyperGroup | TyperCommand) -> None:
    """Escape the help texts: Rich would read ``[lm-eval]`` as markup and drop it."""
    command.help = escape(command.help or "")
    for parameter in command.params:
        if isinstance(parameter, TyperOption | TyperArgument) and parameter.help:
            parameter.help = escape(parameter.help)
    for inner in _commands(command):
        _show_as_text(inner)


def _hide_rest(verb: TyperGroup | TyperCommand) -> None:
    """Hide the less important flags, and say how many there are."""
    flags = {str(flag.name): flag for flag in verb.params if isinstance(flag, TyperOption)}
    rest = [flag for name, flag in flags.items() if name not in group_of(name).in_sight]
    for flag in rest:
        flag.hidden = True
    verb.epilog = f"{num_of(len(rest), 'more flag')}: frozencore {verb.name} {HELP_ALL}"


def _takes_run(verb: TyperGroup | TyperCommand) -> bool:
    return any(parameter.name == "calibration_size" for parameter in verb.params)


def _commands(command: TyperGroup | TyperCommand) -> Iterator[TyperGroup | TyperCommand]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return (one for one in inner if isinstance(one, TyperGroup | TyperCommand))
