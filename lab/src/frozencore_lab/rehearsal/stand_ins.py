"""All that stands for something in a rehearsal: models, rows, and the place that puts runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from frozencore.errors import ModelError
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.shared import calibrating
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.rehearsal.data import StandInData, lay_out
from frozencore_lab.rehearsal.models import LAYERS, Original, find_original, make_stand_in
from frozencore_lab.rehearsal.place import RehearsalPlace
from frozencore_lab.rehearsal.sample import Sample

CALIBRATED = 5  # examples of the largest calibration


@dataclass(frozen=True)
class StandIns:
    """What a rehearsal runs on, and what that stands for.

    Attributes:
        originals: By model as the campaign says it.
    """

    originals: Mapping[str, Original]
    data: StandInData
    place: RehearsalPlace


def originals_of(campaign: Campaign, models: Mapping[str, str]) -> dict[str, Original]:
    """What is known here of the models that a campaign names.

    Args:
        models: Folders of models to use instead, by the campaign's names of them.

    Raises:
        ModelError: The architecture of a model is not known here.
    """
    return {location: _original(location, models.get(name)) for name, location in campaign.models.items()}


def set_up(
    campaign: Campaign,
    sample: Sample,
    originals: Mapping[str, Original],
    folder: Path,
    *,
    data_root: Path | None,
    models: Mapping[str, str],
) -> StandIns:
    """Make the stand-ins of a campaign.

    Args:
        data_root: Where real data sets may lie; None is the offline cache.
        models: Folders of models to use as they are, by the campaign's names of them.

    Raises:
        DataError: A data set is not at hand and its rows cannot be made up.
    """
    jobs = [run.job for part in sample.parts for run in plan(part, lambda _: None) if run.job]
    data = lay_out([job.config for job in jobs], folder / "data", data_root)
    places = {campaign.models[name]: path for name, path in models.items()}
    ours = {location: name for name, location in campaign.models.items() if location not in places}
    for location, name in ours.items():
        places[location] = str(folder / "models" / name)
        make_stand_in(originals[location], data.texts, Path(places[location]), 1 if sample.is_quick else LAYERS)
    place = RehearsalPlace(
        data.root,
        "cpu",
        places,
        shares=data.shares,
        own_tasks=data.own_tasks,
        stand_ins=tuple(ours),
        calibration_share=CALIBRATED / max(config.calibration_size for job in jobs for config in calibrating(job)),
        tasks_in_16_bits=sample.tasks_in_16_bits,
        is_quick=sample.is_quick,
    )
    return StandIns(originals, data, place)


def _original(location: str, instead: str | None) -> Original:
    """What a campaign names; where nothing is known of that, what is to be used instead."""
    try:
        return find_original(location)
    except ModelError:
        if instead is None:
            raise
        return find_original(instead)
