"""The flags of a verb that takes a run's configuration: one for each option, with its default and its help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, replace
from datetime import date
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import ValidationError

from frozencore.cli.flag_file import ConfigFile
from frozencore.cli.flag_groups import group_of, in_order
from frozencore.constructors import described
from frozencore.errors import ConfigError
from frozencore.options import Option, own_refusal
from frozencore.tune.methods import METHODS
from frozencore.tune.run.config import make_config
from frozencore.tune.run.config_rules import OF_ONE_ALONE
from frozencore.tune.run.options_by_name import in_groups, run_options
from frozencore.tune.suite import TASKS
from frozencore.words import flag_of

SPELLED = {"learning_rate": ("--lr", "--learning-rate")}
OF_ONE_TRAINING = (
    *OF_ONE_ALONE, "refresh_cost", "refresh_memory", "private_delta", "private_clip", "save_steps", "samples",
    "exact_match", "forgetting",
)  # fmt: skip
"""Options that only a training of its own reads."""
_AS_TYPER_READS = (bool, int, float, str, Path)


class TakesRun:
    """A verb as typer is to see it: in place of its first parameter, the configuration, it has the latter's flags.

    They are those of the options that there are when it is asked for them.

    Args:
        without: Options that are of no use to the verb.
        required: Those that it cannot do without, by another name and with its own help.
        defaults: Of options whose default is another here.
    """

    def __init__(
        self,
        verb: Callable[..., None],
        *,
        without: Collection[str] = (),
        required: Mapping[str, tuple[str, str]] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._verb, self._without, self._required, self._defaults = verb, without, required or {}, defaults or {}
        self.__name__, self.__annotations__ = verb.__name__, {}

    @property
    def __signature__(self) -> Signature:
        flags = []
        for name, option in run_options().items():
            if name in self._required:
                flags.append(_required_flag(option, *self._required[name]))
            elif name not in self._without:
                shown = replace(option, default=self._defaults.get(name, option.default))
                flags.append(_flag(shown))
        file = Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
        every = {flag.name: _in_its_group(flag) for flag in [*flags, *self._own(), file]}
        return Signature([every[name] for name in in_order(every)])

    def __call__(self, **given: Any) -> None:
        own = {parameter.name: given.pop(parameter.name) for parameter in self._own()}
        given.pop("config_file", None)
        known = run_options()
        config = make_config(**in_groups({name: _value(known[name], value) for name, value in given.items()}))
        self._verb(config, **own)

    def _own(self) -> list[Parameter]:
        _, *own = signature(self._verb, eval_str=True).parameters.values()
        return [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]


def _in_its_group(flag: Parameter) -> Parameter:
    """The parameter with the box of the help that shows it."""
    kind, info = get_args(flag.annotation)
    return flag.replace(annotation=Annotated[kind, _boxed(info, group_of(flag.name).name)])


def _boxed(info: Any, name: str) -> Any:
    boxed = copy(info)
    boxed.rich_help_panel = name
    return boxed


def _flag(option: Option) -> Parameter:
    """What typer needs to know of it; a value that typer does not know is text."""
    kinds = _kinds(option)
    kind = kinds[0] if len(kinds) == 1 and kinds[0] in _AS_TYPER_READS else str
    missing, optional = option.default is MISSING, NoneType in _parts(option.plain)
    default = option.default if missing or option.default is None or kind is not str else str(option.default)
    return Parameter(
        option.name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if missing else default,
        annotation=Annotated[
            kind | None if optional else kind,
            typer.Option(
                *SPELLED.get(option.name, [flag_of(option.name)]),
                help=_help(option),
                metavar="YYYY-MM-DD" if kinds == [date] else None,
                autocompletion=_offered(option),
            ),
        ],
    )


def _offered(option: Option) -> Callable[[str], list[str]]:
    """What a shell offers for a value: those of an option that has a few, methods, tasks."""

    def beginning_with(incomplete: str) -> list[str]:
        named: Mapping[str, Iterable[str]] = {"method": METHODS, "task": TASKS, "calibration_task": TASKS}
        allowed = [str(value) for kind in _kinds(option) if get_origin(kind) is Literal for value in get_args(kind)]
        return [value for value in (*allowed, *named.get(option.name, ())) if value.startswith(incomplete)]

    return beginning_with


def _required_flag(option: Option, spelled: str, said: str) -> Parameter:
    kind: Any = _kinds(option)[0]
    annotation = Annotated[kind, typer.Option(spelled, help=said)]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, annotation=annotation)


def _help(option: Option) -> str:
    said = described(option)
    if option.name == "method":
        said += f" One of {', '.join(METHODS)}."
    if any(get_origin(kind) is Literal for kind in _kinds(option)[:1]):
        said += f" {option.rule.capitalize()}."
    if _takes_several(option):
        said += " Several are separated by commas."
    return said


def _value(option: Option, given: Any) -> Any:
    """What was meant by the text of a flag; anything else as typer has read it.

    Raises:
        ConfigError: In one line, which flag, what is allowed and what came.
    """
    kinds = _kinds(option)
    if not isinstance(given, str) or (len(kinds) == 1 and (kinds[0] is str or get_origin(kinds[0]) is Literal)):
        return given
    if given == "none" and option.default is not None and NoneType in _parts(option.plain):
        return None
    several = [part.strip() for part in given.split(",") if part.strip()]
    for meant in (given, several) if _takes_several(option) else (given,):
        try:
            return option.adapter.validate_python(meant)
        except ValidationError as error:
            refused = own_refusal(error.errors()[0])
    raise refused or ConfigError(f"{flag_of(option.name)} must be {option.rule}, but {given!r} came.")


def read_choices(words: Sequence[str], among: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values of options to try, by option, from words like ``lr=1e-3,3e-3``.

    Args:
        among: The options that may be given.

    Raises:
        ConfigError: In one line, which word, what is allowed and what came.
    """
    known = run_options()
    by_flag = {flag.removeprefix("--"): name for name in among for flag in (*SPELLED.get(name, ()), flag_of(name))}
    choices: dict[str, tuple[Any, ...]] = {}
    for word in words:
        flag, _, values = word.partition("=")
        name = by_flag.get(flag.strip().replace("_", "-"))
        given = [value.strip() for value in values.split(",") if value.strip()]
        if name is None or not given or name in choices:
            raise ConfigError(
                f"A sweep is one of {', '.join(sorted(by_flag))} with its values, once each, such as lr=1e-3,3e-3, but "
                f"{word!r} came."
            )
        choices[name] = tuple(dict.fromkeys(_value(known[name], value) for value in given))
    return choices


def _takes_several(option: Option) -> bool:
    return any(get_origin(kind) is tuple for kind in _kinds(option))


def _kinds(option: Option) -> list[Any]:
    """The types of its values but None."""
    return [kind for kind in _parts(option.plain) if kind is not NoneType]


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
