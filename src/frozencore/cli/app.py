"""The ``frozencore`` command: it calls one verb and turns each error into one line and an exit status."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from frozencore import IMPORTED_AT, __version__
from frozencore.cli.display import console
from frozencore.cli.foreign_flags import counterpart
from frozencore.cli.verbs import (
    DEBUG,
    GROUPS,
    NOTHING_KEPT,
    Verb,
    add_verbs,
    all_verbs,
    named_verb,
    refuse_unknown_verb,
)
from frozencore.device import is_out_of_memory
from frozencore.errors import CalibrationError, ConfigError, FrozenCoreError
from frozencore.quiet import ignore_known_warnings
from frozencore.text import HALF_A_CHARACTER, nearest_name, num_of, one_line
from frozencore.tune.processes import is_first, refuse_several

BASIC_FLAGS = (
    "model", "data", "columns", "eval_data", "task", "tenants", "data_root", "max_length", "calibration_size",
    "method", "rank", "targets", "basis", "learning_rate", "epochs", "batch_size", "accumulation", "slots",
    "select_checkpoint", "output", "resume", "dry_run", "config_file", "all_layers",
)  # fmt: skip
"""The flags of a run that ``--help`` shows; ``--help-all`` shows the others too."""
ROWS = ("--data", "--eval-data", "--calibration-data", "--tenants")
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
_COMPLETES = "_FROZENCORE_COMPLETE"  # a shell sets it when it asks for completions
NEARLY = 0.8  # similarity of a misspelt flag; names less similar mean something else
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer exports only this kind of it
REFUSED, INTERRUPTED, TERMINATED, HUNG_UP = 2, 130, 143, 129  # an error, Ctrl-C, SIGTERM, SIGHUP of a closed terminal


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"frozencore {__version__}\n")
        raise typer.Exit()


def _common(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["FROZENCORE_DEBUG"] = "1"


def program(words: Collection[str]) -> typer.Typer:
    """Build the command line; a verb that is not among the words gets only a name and a help text."""
    first = {verb.group: verb.examples[0] for verb in reversed(all_verbs())}
    verbs = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": list(HELP)},
        help="Fine-tune language models by training only r x r cores between frozen, calibrated bases.",
        epilog="For example:\n\n" + "\n\n".join(first[group] for group in GROUPS if group in first),
    )
    verbs.callback()(_common)
    add_verbs(verbs, words)
    return verbs


def app() -> None:
    """Run the command line; only the named verb is imported."""
    _refuse_other_encoding(sys.argv[1:])
    words = _words()
    named = named_verb(words)
    if named not in [verb.name for verb in all_verbs() if verb.by_several]:
        refuse_several(f"frozencore {named}".strip())
    console.quiet = not is_first()
    if _COMPLETES not in os.environ:
        refuse_unknown_verb(words)
    asked = [HELP[0] if word == HELP_ALL else word for word in sys.argv[1:]]
    command = command_of(program(words), words)
    if _COMPLETES not in os.environ:
        refuse_unknown_flag(command, asked)
        refuse_lost_rows(command, asked)
        _call(command, asked or [HELP[0]])
    else:
        command(asked, prog_name="frozencore")  # shells complete it by this name


def _refuse_other_encoding(words: Sequence[str]) -> None:
    """Refuse words that are not UTF-8: paths are written into records, cards and file names, which are."""
    for word in words:
        if not word.isascii() and HALF_A_CHARACTER.search(word):
            shown = repr(os.fsencode(word))[2:-1]
            raise ConfigError(
                f"Paths and other words must be UTF-8 text, but {shown} is not. Rename the file, or name a link to it."
            )


def command_of(program: typer.Typer, words: Sequence[str]) -> TyperGroup:
    """The program's command, which shows help texts unchanged and hides less important flags."""
    command = get_command(program)
    assert isinstance(command, TyperGroup)
    for verb in _commands(command):
        flags = {str(flag.name): flag for flag in verb.params if isinstance(flag, TyperOption)}
        if "calibration_size" in flags and not {*HELP}.isdisjoint(words):
            rest = [flag for name, flag in flags.items() if name not in BASIC_FLAGS]
            for flag in rest:
                flag.hidden = True
            verb.epilog = f"{verb.epilog}\n\n{num_of(len(rest), 'more flag')}: frozencore {verb.name} {HELP_ALL}"
    if not {*HELP, HELP_ALL}.isdisjoint(words):
        _show_as_text(command)
    return command


def _show_as_text(command: TyperGroup | TyperCommand) -> None:
    """Escape the help texts: Rich would read ``[gguf]`` as markup and drop it."""
    command.help = escape(command.help or "")
    for parameter in command.params:
        if isinstance(parameter, TyperOption | TyperArgument) and parameter.help:
            parameter.help = escape(parameter.help)
    for inner in _commands(command):
        _show_as_text(inner)


def _commands(command: TyperGroup | TyperCommand) -> Iterator[TyperGroup | TyperCommand]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return (one for one in inner if isinstance(one, TyperGroup | TyperCommand))


def refuse_unknown_flag(command: TyperGroup, words: Sequence[str]) -> None:
    """Raise ConfigError for a flag that the verb does not have: with our flag of that meaning, or of that spelling."""
    parameters = [parameter for one in _named(command, words) for parameter in one.params]
    flags = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)} | {*HELP}
    for word in words:
        given = word.partition("=")[0]
        if not given.startswith("--") or given in flags or given == "--":
            continue
        dashed = given.replace("_", "-")
        nearest = dashed if dashed in flags else nearest_name(given, flags, similar=NEARLY)
        guess = f"Did you mean {nearest}?" if nearest else f"See `{_help_of(command, words)}`."
        instead = None if dashed in flags else counterpart(given)
        raise ConfigError(instead or f"There is no flag {given}. {guess}")


def refuse_lost_rows(command: TyperGroup, words: Sequence[str]) -> None:
    """Raise ConfigError for a second source of rows where a verb reads one: the first would be left out silently."""
    flags = {flag: parameter for one in _named(command, words) for parameter in one.params for flag in parameter.opts}
    given = [word.partition("=")[0] for word in words]
    for name in ROWS:
        if given.count(name) > 1 and name in flags and not getattr(flags[name], "multiple", False):
            raise ConfigError(
                f"{name} names one source of rows here, but {given.count(name)} are given. Join them, or call for each."
            )


def _named(command: TyperGroup, words: Sequence[str]) -> list[TyperGroup | TyperCommand]:
    """The command, the verb in it that the words name, and a verb of that verb."""
    named: list[TyperGroup | TyperCommand] = [command]
    for word in words:
        named += [inner for inner in _commands(named[-1]) if inner.name == word]
    return named


def _help_of(command: TyperGroup, words: Sequence[str]) -> str:
    return " ".join(("frozencore", *(str(one.name) for one in _named(command, words)[1:]), HELP[0]))


def _call(command: TyperGroup, words: Sequence[str]) -> None:
    """Call the command. What typer would refuse in a box of several lines is a ConfigError."""
    try:
        with command.make_context("frozencore", list(words)) as context:
            command.invoke(context)
        sys.exit(0)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if not message:  # a group of verbs without a verb: its help is printed already
            sys.exit(REFUSED)
        raise ConfigError(f"{one_line(message).rstrip('.')}. See `{_help_of(command, words)}`.") from None


def _words() -> list[str]:
    """The words of the command line; when a shell asks for completions, the words typed so far."""
    if _COMPLETES not in os.environ:
        return sys.argv[1:]
    begun = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash, and other shells
    return begun.split()[1:]


def _end_early(status: int, end: BaseException) -> NoReturn:
    """Print in one line what a training saved and how to resume it, then exit."""
    notes = ["interrupted" if status == INTERRUPTED else "terminated"]
    cause: BaseException | None = end
    while cause is not None:  # typer raises an exception of its own for Ctrl-C
        notes += getattr(cause, "__notes__", [])
        cause = cause.__cause__ or cause.__context__
    ways_on = {verb.name: verb.when_ended_early for verb in all_verbs()}
    if NOTHING_KEPT in notes:
        ways_on = dict.fromkeys(ways_on, Verb.when_ended_early)
    notes += [ways_on[word] for word in sys.argv[1:] if word in ways_on][:1]
    _say_and_exit(status, "; ".join(note.removesuffix(".") for note in notes))


def _say_and_exit(status: int, line: str) -> NoReturn:
    sys.stderr.write(f"frozencore: {one_line(line)}\n")
    sys.exit(status)


def _print_warning(message: object, *_: object, **__: object) -> None:
    """One line, without the place in the code that Python adds."""
    sys.stderr.write(f"Warning: {one_line(message)}\n")


def main() -> None:
    """Run as a program: a frozencore error is one line on stderr and exit status 2; a signal gives 128 + its number."""
    console.began = IMPORTED_AT if console.began is None else time.perf_counter()
    ignore_known_warnings()
    warnings.showwarning = _print_warning
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started the program
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python's stderr: its encoding may lack a letter
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(HUNG_UP))
    try:
        app()
    except KeyboardInterrupt as end:
        _end_early(INTERRUPTED, end)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED, HUNG_UP):  # typer turns Ctrl-C into the first
            _end_early(end.code, end)
        raise
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FrozenCoreError, OSError, RuntimeError, MemoryError) as error:
        line = None if os.environ.get("FROZENCORE_DEBUG") else _line_of(error)
        if line is None:
            raise
        if not is_first() and isinstance(error, FrozenCoreError) and not isinstance(error, CalibrationError):
            sys.exit(REFUSED)  # the first process prints the same
        _say_and_exit(REFUSED, line)


def _line_of(error: Exception) -> str | None:
    """The error in one line; None if the error is a bug."""
    if isinstance(error, FrozenCoreError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or ''}"
    if not is_out_of_memory(error):
        return None
    return (
        f"out of memory ({one_line(error, 200)}): use a smaller --batch-size or --max-length, --group-size 50 for "
        "the calibration, or --dtype bfloat16 (docs/odd.md)"
    )
