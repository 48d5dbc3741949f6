"""The ``frozencore`` command: it calls one verb and turns each error into one line and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Annotated, NoReturn

import typer

from frozencore import __version__, _imported_at
from frozencore.cli.console import console
from frozencore.cli.help import HELP, HELP_ALL, command_of, refuse_unknown_flag
from frozencore.cli.verbs import NOTHING_KEPT, Verb, add_verbs, all_verbs, refuse_unknown_verb
from frozencore.errors import CalibrationError, FrozenCoreError
from frozencore.quiet import ignore_known_warnings
from frozencore.tune.run.processes import is_first, refuse_several
from frozencore.words import one_line

_COMPLETES = "_FROZENCORE_COMPLETE"  # a shell sets it when it asks for completions
REFUSED, INTERRUPTED, TERMINATED = 2, 130, 143  # exit statuses of an error, of Ctrl-C and of SIGTERM


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"frozencore {__version__}\n")
        raise typer.Exit()


def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["FROZENCORE_DEBUG"] = "1"


def program(words: Collection[str]) -> typer.Typer:
    """Build the command line; a verb that is not among the words gets only a name and a help text."""
    verbs = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Fine-tune language models by training only r x r cores between frozen, calibrated bases.",
    )
    verbs.callback()(_common)
    add_verbs(verbs, words)
    return verbs


def app() -> None:
    """Run the command line; only the named verb is imported."""
    words = _words()
    if words[:1] not in [[verb.name] for verb in all_verbs() if verb.by_several]:
        refuse_several(f"frozencore {' '.join(words[:1])}".strip())
    console.quiet = not is_first()
    if _COMPLETES not in os.environ:
        refuse_unknown_verb(words)
    asked = [HELP if word == HELP_ALL else word for word in sys.argv[1:]]
    command = command_of(program(words), words)
    if _COMPLETES not in os.environ:
        refuse_unknown_flag(command, asked)
    command(asked, prog_name="frozencore")  # shells complete it by this name


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
    _say_and_exit(status, "; ".join(notes))


def _say_and_exit(status: int, line: str) -> NoReturn:
    sys.stderr.write(f"frozencore: {one_line(line)}\n")
    sys.exit(status)


def main() -> None:
    """Run as a program: a frozencore error is one line on stderr and exit status 2; Ctrl-C gives 130, SIGTERM 143."""
    console.began = _imported_at if console.began is None else time.perf_counter()
    ignore_known_warnings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        app()
    except KeyboardInterrupt as end:
        _end_early(INTERRUPTED, end)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):  # typer turns Ctrl-C into the first
            _end_early(end.code, end)
        raise
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
    from frozencore.device import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    return (
        f"out of memory ({one_line(error, 200)}): use a smaller --batch-size or --max-length, --memory-budget for the "
        "calibration, or --dtype bfloat16"
    )


if __name__ == "__main__":
    main()
