"""The kinds of study: each runs a job, defines its record, and says whether it trains and whether it runs alone.

A new kind is a class here and a row of :data:`KINDS`. No other code compares names of kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from frozencore.tune.config import RunConfig
from frozencore.words import Progress

if TYPE_CHECKING:
    from frozencore.tune.adapt import Shared
    from frozencore.tune.load import Base, Inputs
    from frozencore.tune.read_rows import RowCache
    from frozencore.tune.scores import Score
    from frozencore_lab.campaign.shared_moments import SharedWork


@dataclass(frozen=True)
class Work:
    """The inputs with which a kind of study runs one job.

    Attributes:
        config: The job's configuration on this machine.
        reference: The same with the reference's number of calibration examples; None without a reference.
        folder: The job's folder, in which ``result.json`` is written last.
        base: The loaded model; a job leaves it without an adapter, unless its method changes the model.
        rows, base_scores: Rows and base scores of the worker's earlier jobs.
        store: Moments and bases that jobs share; None for a job that runs alone.
    """

    config: RunConfig
    reference: RunConfig | None
    folder: Path
    progress: Progress
    base: Base
    rows: RowCache
    base_scores: dict[str, Score]
    store: SharedWork | None

    def inputs(self, config: RunConfig) -> tuple[Inputs, Shared | None]:
        """The model with the rows of a configuration, and the moments and bases that it shares."""
        from frozencore.tune.load import prepare

        inputs = prepare(config.model, config.rows, config.scoring, self.progress, self.base, row_cache=self.rows)
        return inputs, None if self.store is None else self.store.of(config, inputs, self.progress)


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
            shared=shared,
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
        from frozencore.adapter.bases import get_bases
        from frozencore.files.whole_file import write_json
        from frozencore.maths.linalg import principal_cosines
        from frozencore.tune.adapt import adapt
        from frozencore.tune.folder import RECORD
        from frozencore.tune.load import resolve_targets
        from frozencore.tune.record import RECORD_FORMAT, Provenance, RecordedConfig, StabilityRecord
        from frozencore.tune.scoring.forward import take_off

        assert work.reference is not None
        found, num_calibration = [], []
        for config in (work.config, work.reference):
            inputs, shared = work.inputs(config)
            targets = resolve_targets(work.config.method, inputs.model)
            adapted = adapt(config.method, inputs, targets, work.progress, shared=shared)
            found.append(get_bases(adapted.model))
            num_calibration.append(len(inputs.rows.calibration))
            take_off(adapted.model)
        few, many = found
        cosines: dict[str, dict[str, float]] = {"P": {}, "Q": {}}
        for name, basis in few.items():
            layer, _, side = name.rpartition(".")
            cosines[side][layer] = float(principal_cosines(basis, many[name]).mean())
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
