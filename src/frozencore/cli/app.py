"""The ``frozencore`` command: one verb a file, each of which parses, calls the library or the lab, and prints."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from typing import Annotated, NoReturn

import typer

from frozencore import __version__
from frozencore.cli.console import console
from frozencore.cli.flag_groups import HELP, HELP_ALL, command_of
from frozencore.cli.other_names import refuse_unknown_verb
from frozencore.cli.verbs import IN_LAB, LAB_MISSING, add_verbs, all_verbs
from frozencore.errors import CalibrationError, ConfigError, FrozenCoreError
from frozencore.quiet import ignore_known_warnings
from frozencore.tune.run.processes import is_first, refuse_several
from frozencore.words import one_line

_ASKS = "_FROZENCORE_COMPLETE"  # set by a shell that asks how a command line could go on
INTERRUPTED, TERMINATED = 130, 143  # the exit status of Ctrl-C, and of SIGTERM


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"frozencore {__version__}\n")
        raise typer.Exit()


def _common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj = console
    if debug:
        os.environ["FROZENCORE_DEBUG"] = "1"


def program(words: Collection[str]) -> typer.Typer:
    """The command line, with the verbs among these words as they are: the others are names and help."""
    verbs = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Fine-tune language models by training only r x r cores between frozen, calibrated bases.",
    )
    verbs.callback()(_common)
    add_verbs(verbs, words)
    return verbs


def app() -> None:
    """Do what the words of the command line ask for; only the verbs among them are imported."""
    words = _words()
    if words[:1] not in [[verb.name] for verb in all_verbs() if verb.by_several]:
        refuse_several(f"frozencore {' '.join(words[:1])}".strip())
    console.quiet = not is_first()
    if _ASKS not in os.environ:
        known = [verb.name for verb in all_verbs()]
        if words[:1] not in [[name] for name in known] and words[:1] in [[name] for name in IN_LAB]:
            raise ConfigError(f"frozencore {words[0]}: {LAB_MISSING}")
        refuse_unknown_verb(words, known)
    asked = [HELP if word == HELP_ALL else word for word in sys.argv[1:]]
    command_of(program(words), words)(asked, prog_name="frozencore")  # shells complete it by this name


def _words() -> list[str]:
    """Of the command line; where a shell asks how it could go on, of what is there of it."""
    if _ASKS not in os.environ:
        return sys.argv[1:]
    begun = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash, and other shells
    return begun.split()[1:]


def _ended_early(status: int, end: BaseException) -> NoReturn:
    """One line: what was saved, where a training says it, and how to go on."""
    how = "interrupted" if status == INTERRUPTED else "terminated"
    ways_on = {verb.name: verb.when_ended_early for verb in all_verbs()}
    way_on = [ways_on[word] for word in sys.argv[1:] if word in ways_on][:1]
    sys.stderr.write(f"frozencore: {one_line('; '.join([how, *_notes(end), *way_on]))}\n")
    sys.exit(status)


def _notes(end: BaseException) -> list[str]:
    """Of an exception and those that it came of: typer makes one of its own of Ctrl-C."""
    cause: BaseException | None = end
    notes: list[str] = []
    while cause is not None:
        notes += getattr(cause, "__notes__", [])
        cause = cause.__cause__ or cause.__context__
    return notes


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit status 2; Ctrl-C is 130, SIGTERM 143."""
    ignore_known_warnings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        app()
    except FrozenCoreError as error:
        if os.environ.get("FROZENCORE_DEBUG"):
            raise
        if is_first() or isinstance(error, CalibrationError):  # of other errors the first says the same
            sys.stderr.write(f"frozencore: {error}\n")
        sys.exit(2)
    except OSError as error:
        if os.environ.get("FROZENCORE_DEBUG"):
            raise
        refused = one_line(f"{error.strerror or error}: {error.filename or ''}")
        sys.stderr.write(f"frozencore: {refused}\n")
        sys.exit(2)
    except KeyboardInterrupt as end:
        _ended_early(INTERRUPTED, end)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):  # typer turns Ctrl-C into the first
            _ended_early(end.code, end)
        raise
    except (RuntimeError, MemoryError) as error:
        from frozencore.device import is_out_of_memory

        if os.environ.get("FROZENCORE_DEBUG") or not is_out_of_memory(error):
            raise
        sys.stderr.write(
            f"frozencore: out of memory ({one_line(error, 200)}): use a smaller --batch-size or "
            "--max-length, --memory-budget for the calibration, or --dtype bfloat16\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
