"""A job: one run with all its inputs, its id (their hash), and its kind of study.

A kind runs a job, defines its record, and says whether it trains and whether it runs alone. A new kind is a class here
and a row of :data:`KINDS`. No other code compares names of kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from frozencore.constructors import constructors_reading
from frozencore.errors import ConfigError
from frozencore.options import fingerprint_options
from frozencore.progress import Progress
from frozencore.tune.config import ALIASES, PLACES, RunConfig, make_config
from frozencore.tune.methods import Method
from frozencore.tune.rows.row_sources import STANDARD_INPUT
from frozencore.tune.rows.sources import TASK, is_named
from frozencore_lab.tasks.registry import find_task, task_of

if TYPE_CHECKING:
    from frozencore.tune.adapt import Precomputed
    from frozencore.tune.load import Base, Inputs
    from frozencore.tune.run_rows import RowCache
    from frozencore.tune.scoring.score import Score


class Shared(Protocol):
    """Moments and bases that the runs of a campaign share."""

    def of(self, config: RunConfig, inputs: Inputs, progress: Progress) -> Precomputed | None:
        """Those of one run; None if it computes its own."""


@dataclass(frozen=True)
class Work:
    """The inputs with which a kind of study runs one job.

    Attributes:
        config: The job's configuration on this machine.
        reference: The same with the reference's number of calibration examples; None without a reference.
        folder: The job's folder, in which ``result.json`` is written last.
        base: The loaded model; a job leaves it without an adapter, unless its method changes the model.
        rows, base_scores: Rows and base scores of the worker's earlier jobs.
        shared: Moments and bases that jobs share; None for a job that runs alone.
    """

    config: RunConfig
    reference: RunConfig | None
    folder: Path
    progress: Progress
    base: Base
    rows: RowCache
    base_scores: dict[str, Score]
    shared: Shared | None

    def inputs(self, config: RunConfig) -> tuple[Inputs, Precomputed | None]:
        """The model with the rows of a configuration, and the moments and bases that it shares."""
        from frozencore.tune.load import prepare

        inputs = prepare(config.model, config.rows, config.scoring, self.progress, self.base, row_cache=self.rows)
        return inputs, None if self.shared is None else self.shared.of(config, inputs, self.progress)


@dataclass(frozen=True)
class StudyKind(ABC):
    """The interface of a kind of study.

    Attributes:
        name: The name in a campaign's file and in job ids.
        trains: The record is a ``TunedRecord``, with scores, costs and a recipe that a search may choose. Otherwise it
            is a ``StabilityRecord``.
        is_alone: Each job runs in its own process, alone on the machine, and uses nothing from other jobs, so that
            times and memory can be compared.
        has_reference: The study needs ``reference_size``.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    is_alone: ClassVar[bool] = False
    has_reference: ClassVar[bool] = False

    @abstractmethod
    def run(self, work: Work) -> None:
        """Run one job and write its record."""


class Tune(StudyKind):
    """Calibrate, train and score."""

    name = "tune"

    def run(self, work: Work) -> None:
        """Run what ``frozencore tune`` runs, and resume an interrupted run."""
        from frozencore.tune.run import execute

        inputs, shared = work.inputs(work.config)
        execute(
            work.config, work.folder, work.progress, resume=True, inputs=inputs, base_scores=work.base_scores,
            precomputed=shared,
        )  # fmt: skip


class Profile(Tune):
    """Run as :class:`Tune`, but alone on the machine, to measure times and memory."""

    name = "profile"
    is_alone = True


class Stability(StudyKind):
    """Compare the bases of few calibration examples with those of many (paper, table "basis-stability")."""

    name = "stability"
    trains = False
    has_reference = True

    def run(self, work: Work) -> None:
        """Record the mean principal-angle cosines of P and of Q, over directions and then over layers."""
        from frozencore.adapter.loaded_basis import get_basis
        from frozencore.files.atomic_write import write_json
        from frozencore.maths.linalg import principal_cosines
        from frozencore.tune.adapt import adapt
        from frozencore.tune.folder import RECORD
        from frozencore.tune.load import resolve_targets
        from frozencore.tune.provenance import Provenance
        from frozencore.tune.record import RECORD_FORMAT, RecordedConfig, StabilityRecord
        from frozencore.tune.scoring.forward import unload_adapter

        assert work.reference is not None
        found, num_calibration = [], []
        for config in (work.config, work.reference):
            inputs, shared = work.inputs(config)
            targets = resolve_targets(work.config.method, inputs.model)
            adapted = adapt(config.method, inputs, targets, work.progress, precomputed=shared)
            found.append(get_basis(adapted.model).layers)
            num_calibration.append(len(inputs.rows.calibration))
            unload_adapter(adapted.model)
        few, many = found
        cosines: dict[str, dict[str, float]] = {"P": {}, "Q": {}}
        for layer, basis in few.items():
            cosines["P"][layer] = float(principal_cosines(basis.P, many[layer].P).mean())
            cosines["Q"][layer] = float(principal_cosines(basis.Q, many[layer].Q).mean())
        record = StabilityRecord(
            format=RECORD_FORMAT,
            config=RecordedConfig.of(work.config),
            cosine_P=sum(cosines["P"].values()) / len(cosines["P"]),
            cosine_Q=sum(cosines["Q"].values()) / len(cosines["Q"]),
            layers=cosines,
            num_calibration=dict(zip(("basis", "reference"), num_calibration, strict=True)),
            reference_size=work.reference.rows.calibration_size,
            provenance=Provenance.here(next(work.base.model.parameters()).device),
        )
        write_json(work.folder / RECORD, record.content())


KINDS: dict[str, StudyKind] = {kind.name: kind for kind in (Tune(), Stability(), Profile())}

NamedKind = Annotated[
    StudyKind,
    GetPydanticSchema(
        lambda _kind, _handler: core_schema.no_info_after_validator_function(
            KINDS.__getitem__,
            core_schema.literal_schema(list(KINDS)),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda kind: kind.name),
        )
    ),
]
"""A kind as a pydantic field: its name in files, the kind itself in the model."""


ID_DIGITS = 16
DEFAULTS = {"batch_size": 1, "samples": 0, "exact_match": "no"}
"""The values of runs that name no others, where those of ``tune`` differ."""
CORE_LEARNING_RATE = 1e-2
"""The learning rate of cores in runs that name none, so that constructors are compared at one rate."""
WHOLE = 32
"""The bits of cores in runs that name none; an id leaves them out."""


def default_learning_rate(method: Method) -> float:
    """The learning rate of a method in runs that name none."""
    return method.learning_rate or CORE_LEARNING_RATE


@dataclass(frozen=True)
class Place:
    """The machine of runs, with its folders of models by name; it is not part of a campaign's identity."""

    data_root: Path | None = None
    device: str = "auto"
    models: dict[str, str] = field(default_factory=dict)

    def put(self, config: RunConfig) -> RunConfig:
        """The configuration for this machine."""
        model = self.models.get(config.model.name, config.model.name)
        return config.replaced(data_root=self.data_root, device=self.device, model=model)


@dataclass(frozen=True)
class Job:
    """One run of a campaign, and the reference's calibration examples if its kind has a reference."""

    kind: StudyKind
    config: RunConfig
    reference_size: int | None = None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The inputs of the run: options that are not at their defaults, and numbers from the task or method.

        A new option of a later version does not change it; a task stands under its own name.
        """
        values = {
            name: value
            for name, value in self.config.content(changed=True).items()
            if name not in PLACES and (name, value) != ("bits", WHOLE)
        }
        method = self.config.method.name
        core = {name: value for name, value in values.pop("core", {}).items() if method in constructors_reading(name)}
        values |= {"core": core} if core else {}
        training, entry = self.config.training, self.config.method.entry
        values |= {"learning_rate": training.rate_of(entry) or "auto", "warmup": training.warmup_of(entry)}
        for alias, name in ALIASES.items():
            if name in values and is_named(values[name]):
                values[alias] = values.pop(name).removeprefix(f"{TASK}:")
        if "forgetting" in values:
            values["forgetting"] = [name.removeprefix(f"{TASK}:") for name in values["forgetting"]]
        if (learned := task_of(self.config)) is not None:
            task = find_task(learned)
            protocol = {name: getattr(task, name) for name in ("epochs", "num_train", "num_evaluation")}
            values = protocol | values
        return {"kind": self.kind.name, "reference_size": self.reference_size, **values}

    @cached_property
    def id(self) -> str:
        """Hash of the resolved configuration, 16 hexadecimal digits."""
        return fingerprint_options(self.resolved)[:ID_DIGITS]


def make_job(kind: str, options: dict[str, Any], reference_size: int | None = None) -> Job:
    """Make a job from options of a run by name, including core options; a wrong option is a ``ConfigError``."""
    config = make_config(strict=True, **{**DEFAULTS, **options})
    if STANDARD_INPUT in (*config.rows.sources, config.rows.eval_data, config.rows.calibration_data):
        raise ConfigError("data: the standard input can be read once, but each run reads its rows. Give a file.")
    if "learning_rate" not in options:
        config = config.replaced(learning_rate=default_learning_rate(config.method.entry))
    if "bits" not in options and config.method.entry.has_bases:
        config = config.replaced(bits=WHOLE)
    return Job(KINDS[kind], config, reference_size)
