"""A run that leaves its bases to its calibration rows: what they say is asked once, and made its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from frozencore.adapter.advice.advise import Advice
from frozencore.adapter.advice.settings import Setting, bases_to_try, dampings_to_try
from frozencore.adapter.advice.trials import Worth
from frozencore.calibration.shards import from_first
from frozencore.constructors import find_constructor
from frozencore.constructors.options import AUTO, trained_values
from frozencore.errors import ConfigError
from frozencore.lab.methods import UNTIL_CHOSEN, Targets
from frozencore.lab.run.adapting import adapter_of
from frozencore.lab.run.advising import advise_run
from frozencore.lab.run.bench import Bench
from frozencore.lab.run.config import RunConfig, make_config
from frozencore.lab.run.files import CHOICE
from frozencore.lab.run.found import Found
from frozencore.lab.run.left_open import flags_of_open, left_open, until_chosen
from frozencore.lab.run.record_of_bases import BasesChoice, ComparedBases
from frozencore.options import options_of
from frozencore.progress import Progress


def refuse_given_moments(config: RunConfig, moments_file: Path | None) -> None:
    """Refuse a moments file beside what is left open.

    Raises:
        ConfigError: Both came.
    """
    if moments_file is not None and (names := left_open(config)):
        raise ConfigError(
            f"{flags_of_open(names)} reads the calibration rows in two halves, but a moments file is of all of them: "
            "leave --moments out, or name what to train."
        )


def on_chosen_bases(
    config: RunConfig,
    bench: Bench,
    targets: Targets,
    hashes: Mapping[str, str],
    found: Found,
    progress: Progress,
) -> tuple[RunConfig, BasesChoice | None]:
    """The configuration with the bases that its calibration rows speak for; as it is where it leaves nothing open.

    Of several processes the first asks, and all train what it has chosen.

    Args:
        found: What was chosen is kept there, for a run that resumes.
    """
    if not left_open(config):
        return config, None
    settings = [[setting.method, setting.options] for setting in settings_to_compare(config)]
    of = {**adapter_of(config, targets, hashes), "settings": settings, "seed": config.seed}
    choice = from_first(lambda: found.kept(CHOICE, BasesChoice, of, lambda: _choose(config, bench, progress)))
    return _with_bases(config, choice.method, choice.options), choice


def settings_to_compare(config: RunConfig) -> list[Setting]:
    """What an open configuration may become: the first of them where another is not clearly better."""
    method = UNTIL_CHOSEN if config.method == AUTO else config.method
    read, given = options_of(find_constructor(method).options), config.core.model_dump(exclude_defaults=True)
    options = {name: value for name, value in until_chosen(given).items() if name in read}
    budget = None if config.rank_budget is None else trained_values(config.rank_budget)
    rank = config.rank if budget is None else None
    if config.method == AUTO:
        every: Iterable[Setting] = bases_to_try(rank, budget, **options)
    else:
        fcca = Setting(method, options, rank=rank, rank_budget=budget)
        every = chain([fcca], dampings_to_try(fcca))
    return [setting for setting in every if _allowed(config, setting)]


def _allowed(config: RunConfig, setting: Setting) -> bool:
    """Whether the run's other options go with it: one that is refreshed needs bases that read data."""
    try:
        _with_bases(config, setting.method, setting.options)
    except ConfigError:
        return False
    return True


def _with_bases(config: RunConfig, method: str, options: Mapping[str, Any]) -> RunConfig:
    core = until_chosen(config.core.model_dump()) | dict(options)
    return make_config(**{**config.model_dump(exclude={"core"}), "method": method, "core": core})


def _choose(config: RunConfig, bench: Bench, progress: Progress) -> BasesChoice:
    def tell(stage: str, done: int, total: int | None, note: str = "") -> None:
        progress("choose" if stage == "calibration" else stage, done, total, note)

    advice: Advice = advise_run(config, bench, tell, bases=settings_to_compare(config))
    chosen = advice.best_bases
    return BasesChoice(
        asked=left_open(config),
        **_told(chosen),
        compared=tuple(ComparedBases(**_told(worth)) for worth in advice.bases),
        rows=advice.num_rows,
        loss=advice.base_loss,
        time_s=advice.time_s,
    )


def _told(worth: Worth) -> dict[str, Any]:
    return {"method": worth.setting.method, "options": dict(worth.setting.options), "gain": worth.gain}
