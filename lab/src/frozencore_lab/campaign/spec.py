"""The specification of a campaign: models, options of every run, and studies, from one strict YAML file.

    name: pocket
    models: {pocket: pocket}                 # a short name, and its hub id or folder
    base: {batch_size: 8, accumulation: 1}   # options of every run, as in `frozencore tune`
    studies:
      matched-budget:
        title: Matched-budget comparison
        axes:
          model: [pocket]
          task: [pocket-math, pocket-stories]
          method: [fcca, rawgrad]
          seed: [42, 43, 44]
        search:                              # chosen on validation rows, once for all seeds
          grids:
            - {for: [fcca], warmup: [0.03, 0.1], calibration_size: [128, 256]}
            - {for: [rawgrad], learning_rate: [2e-3, 5e-3]}
        report: {rows: [task], columns: [method], reference: fcca, figure: ranking}

An axis is an option of a run; a study runs the product of its axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from frozencore.constructors import constructors_reading, described
from frozencore.errors import ConfigError
from frozencore.options import Option
from frozencore.text import unknown_name
from frozencore.tune.config import ALIASES, PLACES, as_json, run_options
from frozencore.tune.config_parts import SelectionMetric
from frozencore.tune.methods import METHODS, MethodConfig, core_options
from frozencore_lab.campaign.job import KINDS, NamedKind
from frozencore_lab.typed_yaml import read_typed

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Figure = Literal["ranking", "gains", "lines", "state", "values", "panels", "curves"]

MATCHED = "matched"
"""As a reference: the calibration on the same task."""
MOST_RUNS = 100_000
DEFAULT_METHOD = str(MethodConfig.name)

Value = bool | int | float | str | tuple[str, ...] | tuple[float, ...] | None
Values = Annotated[tuple[Value, ...], Field(min_length=1)]

METHODS_OF_GRID = "for"
DECIDED = ("method", "evaluate_on")
"""Options that a search does not try, beside the axes: a run would be another arm's, or scored on other rows."""


def _campaign_options() -> dict[str, Option]:
    """The options that a campaign may set: those of the machine are the command line's."""
    options = {name: option for name, option in run_options().items() if name not in PLACES}
    return {**options, **{alias: replace(options[name], name=alias) for alias, name in ALIASES.items()}}


def _known_option(name: str) -> str:
    if name not in (known := _campaign_options()):
        raise ConfigError(unknown_name("option", name, known))
    return name


@dataclass(frozen=True)
class _Described:
    """Adds the values, default and help of each option to the JSON schema of a mapping from options.

    Attributes:
        listed: Each option maps to a list of values.
        further: Further keys, with a text as value.
    """

    listed: bool = False
    further: tuple[str, ...] = ()

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        known: dict[str, Any] = {name: {"type": "string"} for name in self.further}
        for name, option in _campaign_options().items():
            known[name] = {**option.json_schema(), "description": described(option)}
            if option.default is not MISSING:
                known[name]["default"] = as_json(option.default)
        if self.listed:
            known = {name: {"type": "array", "items": one, "minItems": 1} for name, one in known.items()}
        return {"type": "object", "properties": known, "additionalProperties": False}


OptionName = Annotated[str, AfterValidator(_known_option)]
GridKey = Annotated[str, AfterValidator(lambda name: name if name == METHODS_OF_GRID else _known_option(name))]
Fixed = Annotated[dict[OptionName, Value], _Described()]
StudyAxes = Annotated[dict[OptionName, Values], _Described(listed=True)]
Grid = Annotated[dict[GridKey, Values], _Described(True, (METHODS_OF_GRID,))]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Search(_Strict):
    """A choice among trials on validation rows, made once for all seeds and separately for all other axes.

    Attributes:
        grids: Products of options, each for the methods named under ``for``.
        seed: The seed of every trial.
        select: The score of the choice: highest accuracy (ties go to the lower held-out loss), or lowest loss.
        beyond: The most trials to add, one at a time, while the best of several learning rates is the largest or the
            smallest tried; the next rate is twice or half as large. 0 adds none.
    """

    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    seed: int = Field(default=42, ge=0, lt=2**32)
    select: SelectionMetric = "accuracy"
    beyond: int = Field(default=4, ge=0, le=16)

    def grid(self, method: str) -> Mapping[str, tuple[Value, ...]]:
        """The options to try for a method, without ``for``; one empty trial if no grid names it."""
        found = next((grid for grid in self.grids if method in grid.get(METHODS_OF_GRID, (method,))), {})
        return {name: values for name, values in found.items() if name != METHODS_OF_GRID}


class Report(_Strict):
    """The report of a study: a table of means over seeds, and figures.

    Attributes:
        rows, columns: Axes of the table; each combination of further axes, except the seed, gives a table.
        reference: The column that others are compared with, or the row if tasks are columns. ``matched``: the
            calibration on the same task, for the axis ``calibration_task``.
        differences: Columns whose difference from the reference is shown beside the table. A table with one row of
            tasks shows all differences below; one with tasks as columns shows all of them beside.
        mean: Add the macro-average over the rows.
        best: Add a table of each row's best column, with the outcomes of the runs.
        diverged_as_zero: A diverged run counts as accuracy 0 and is marked; otherwise its cell is empty.
        figure: One or several of ``ranking`` (means by column, best first), ``gains`` (over the reference), ``lines``
            (against the column axis), ``state`` (accuracy against trained values), ``values`` (loss and what was
            forgotten against trained values, cores and LoRA as two lines), ``panels`` (every column of each row,
            beside the base model) and ``curves`` (training loss against steps).
    """

    rows: Annotated[tuple[str, ...], Field(min_length=1)] = ("task",)
    columns: Annotated[tuple[str, ...], Field(min_length=1)] = ("method",)
    reference: str | None = None
    differences: tuple[str, ...] = ()
    mean: bool = True
    best: bool = False
    diverged_as_zero: bool = False
    figure: Figure | tuple[Figure, ...] | None = None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The requested figures, in order."""
        return (self.figure,) if isinstance(self.figure, str) else self.figure or ()


def column_key(column: tuple[Value, ...]) -> str:
    """The key of a column (or row) in ``reference``, ``differences`` and CSV files: its values as in the file."""
    return "/".join("/".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in column)


class Study(_Strict):
    """The product of some axes.

    Attributes:
        kind: The kind of study; see :data:`frozencore_lab.campaign.job.KINDS`.
        fixed: Options of every run of this study, which override the campaign's.
        variants: Methods with options that override ``fixed``, as values of the axis ``method``:
            ``{lora-r1: {method: lora, rank: 1}}``.
    """

    title: str
    kind: NamedKind = Field(default="tune", validate_default=True)
    axes: StudyAxes
    fixed: Fixed = {}
    variants: dict[Name, Fixed] = {}
    search: Search | None = None
    reference_size: int | None = Field(default=None, ge=1)
    report: Report = Report()
    note: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Study:
        for name in ("model", "task", "seed"):
            if name not in self.axes:
                raise ConfigError(f"A study needs the axis {name}: [...].")
        for name, values in self.axes.items():
            if len(set(values)) < len(values):
                raise ConfigError(f"The axis {name} names a value twice: {list(values)}.")
        shown = (*self.report.rows, *self.report.columns)
        for name in shown:
            if name not in self.axes:
                raise ConfigError(unknown_name("axis of this study", name, tuple(self.axes)))
            if shown.count(name) > 1:
                raise ConfigError(f"An axis is one side of a table, but {name} comes twice in its rows and columns.")
        for name in self.fixed:
            if name in self.axes:
                raise ConfigError(f"fixed gives {name}, which is an axis of the study. Leave one out.")
        self._require_reference()
        self._require_variants()
        self._require_grids()
        if self.kind.has_reference != (self.reference_size is not None):
            with_reference = " or ".join(f"'kind: {name}'" for name, kind in KINDS.items() if kind.has_reference)
            raise ConfigError(f"reference_size belongs to {with_reference}, and that kind needs it.")
        if not self.kind.trains and self.search is not None:
            raise ConfigError(f"A {self.kind.name} study trains nothing: it takes no search.")
        return self

    def method_of(self, name: str) -> str:
        """The method of a value of the axis ``method``: the value itself, or the variant's method."""
        return str(self.options_of({"method": name})["method"])

    def options_of(self, axes: Mapping[str, Value]) -> dict[str, Value]:
        """The options of a run from the study's fixed options, its variant's options, and its axis values."""
        return {**self.fixed, **axes, **self.variants.get(str(axes.get("method")), {})}

    def _require_variants(self) -> None:
        for name, options in self.variants.items():
            if name not in self.axes.get("method", ()):
                raise ConfigError(f"The variant {name} is no value of the axis method. Name it there too.")
            if "method" not in options:
                raise ConfigError(f"The variant {name} does not say which method it is: add method: to it.")
            if name in METHODS and options["method"] != name:
                raise ConfigError(f"The variant {name} is of {options['method']}, but {name} is a method. Rename it.")
            for axis in self.axes:
                if axis != "method" and axis in options:
                    raise ConfigError(f"The variant {name} gives {axis}, which is an axis of the study. Leave one out.")

    def _require_grids(self) -> None:
        """Refuse a grid of an unknown method, two for one, and options that make its runs those of another arm."""
        methods = tuple(dict.fromkeys((*map(str, self.axes.get("method", ())), *METHODS)))
        grids = self.search.grids if self.search else ()
        named = [str(name) for grid in grids for name in grid.get(METHODS_OF_GRID, ())]
        for name in named:
            if name not in methods:
                raise ConfigError(unknown_name("method", name, methods))
            if named.count(name) > 1:
                raise ConfigError(f"A method has one grid of its search, but {named.count(name)} are for {name}.")
        for_all = [METHODS_OF_GRID not in grid for grid in grids]
        if any(for_all[:-1]):
            raise ConfigError(f"A grid without {METHODS_OF_GRID!r} is for all methods that are left: it comes last.")
        for grid in grids:
            here = grid.get(METHODS_OF_GRID, methods)
            of_variants = {option for name, own in self.variants.items() if name in here for option in own}
            for option, values in grid.items():
                if option in {*self.axes, *of_variants, *DECIDED}:
                    raise ConfigError(
                        f"A grid tries {option}, which an axis, a variant or the search decides. Leave one of them out."
                    )
                if len(set(values)) < len(values):
                    raise ConfigError(f"A grid names a value of {option} twice: {list(values)}.")

    def _require_reference(self) -> None:
        rows, columns = (
            [column_key(key) for key in product(*(self.axes[axis] for axis in side))]
            for side in (self.report.rows, self.report.columns)
        )
        compared = rows if "task" in self.report.columns else columns
        if self.report.reference not in (None, MATCHED, *compared):
            raise ConfigError(unknown_name("column to compare with", str(self.report.reference), compared))
        for name in self.report.differences:
            if name not in columns:
                raise ConfigError(unknown_name("column to show the difference of", name, columns))
            if self.report.reference not in columns:
                raise ConfigError(f"differences need a reference: one of the columns {', '.join(columns)}.")


class Campaign(_Strict):
    """A whole campaign; see the head of this file."""

    name: Name
    about: str = ""
    models: Annotated[dict[Name, str], Field(min_length=1)]
    base: Fixed = {}
    keep_adapters: bool = False
    studies: Annotated[dict[Name, Study], Field(min_length=1)]

    def options_of(self, study: Study, axes: Mapping[str, Value]) -> dict[str, Value]:
        """The options of a study's runs with these values of its axes.

        A core option in ``base`` applies only to methods that read it.
        """
        own = study.options_of(axes)
        method, of_cores = str({"method": DEFAULT_METHOD, **self.base, **own}["method"]), core_options()
        base = {
            name: value
            for name, value in self.base.items()
            if name not in of_cores or method in constructors_reading(name)
        }
        return {**base, **own}

    @model_validator(mode="after")
    def _names_are_known(self) -> Campaign:
        for name, study in self.studies.items():
            for model in study.axes["model"]:
                if model not in self.models:
                    raise ConfigError(f"Study {name!r}: {unknown_name('model', str(model), tuple(self.models))}")
        return self


def read_campaign(path: Path) -> Campaign:
    """Read a campaign from a YAML (or JSON) file.

    Raises:
        ConfigError: A value is wrong; the message names its line.
    """
    return read_typed(path, Campaign, holds="a campaign", see="See `frozencore schema`.")
