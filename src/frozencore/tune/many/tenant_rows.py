"""The rows of all tenants, and their distribution over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from frozencore.distributed import assign_owners
from frozencore.errors import ConfigError, FrozenCoreError
from frozencore.progress import Progress, no_progress
from frozencore.text import num_of
from frozencore.tune.adapt import on_named_basis
from frozencore.tune.config import RunConfig
from frozencore.tune.load import Base, Inputs, load, prepare, require_embedded
from frozencore.tune.locate import find_tenants
from frozencore.tune.processes import num_started, own_number
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.sources import is_named
from frozencore.tune.rows.splits import calibration_rows
from frozencore.tune.run_rows import SCORED_TOO, RunRows, other_calibration_rows


@dataclass(frozen=True)
class TenantRows:
    """A tenant's configuration, which has its own file, and its rows."""

    config: RunConfig
    rows: RunRows


def tenants_of(config: RunConfig) -> tuple[RunConfig, dict[str, Path]]:
    """The configuration with its basis, and the row file of each tenant of this process.

    Raises:
        ConfigError: An option cannot be used with many tenants, the method has no cores, or several processes have no
            named basis.
        DataError: There are no row files.
    """
    for name in ("report_to", "save_steps"):
        config.training.refuse_changed(
            (name,),
            "{flag} is for a run that trains alone, but tenants train side by side, in common batches. Leave it out.",
        )
    config = on_named_basis(config).replaced(samples=0, exact_match="no")  # nothing is generated
    if is_named(config.rows.sources[0]) or not config.method.entry.has_bases:
        raise ConfigError(
            f"Tenants have a row file and a core each, on one basis, but {config.method.name!r} trains others."
        )
    files = find_tenants(Path(config.rows.learns))
    if num_started() > 1:
        files = _own_share(config, files)
    return config, files


def _own_share(config: RunConfig, files: Mapping[str, Path]) -> dict[str, Path]:
    """The tenants of this process, in order; the files of each process have about equal sizes."""
    if config.method.basis is None:
        raise ConfigError(
            f"Several processes train on a basis that --basis names, but {num_started()} were started without it. "
            "Calibrate it first (frozencore calibrate --tenants), or start one process."
        )
    if len(files) < num_started():
        raise ConfigError(
            f"Each process trains a tenant at least, but there are {num_of(len(files), 'tenant')} for {num_started()} "
            "processes. Start fewer."
        )
    sizes = {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}
    trains = assign_owners(sizes, num_started())
    return {name: file for name, file in files.items() if trains[name] == own_number()}


def read_tenants(
    config: RunConfig, files: Mapping[str, Path], progress: Progress, base: Base | None = None
) -> tuple[Inputs, dict[str, TenantRows]]:
    """Load the model with the calibration rows of the basis, and each tenant's own rows.

    The basis is calibrated on ``calibration_size`` rows in all, spread over the tenants, or on those of
    ``calibration_data``.

    Args:
        base: The model, if it is not to be loaded.

    Raises:
        FrozenCoreError: A tenant's file cannot be read, split or tokenised; the message names the tenant.
    """
    progress("load", 0, len(files), config.model.name)
    base = base or load(config.model)
    tenants: dict[str, TenantRows] = {}
    for number, (name, file) in enumerate(files.items(), start=1):
        config_here = config.replaced(data=str(file))
        own_rows = config_here.replaced(calibration_data=None).rows
        with naming_tenant(f"{name!r}, {file}"):
            inputs = prepare(config.model, own_rows, config.scoring, no_progress, base)
        tenants[name] = TenantRows(config_here, inputs.rows)
        progress("load", number, len(files), f"{name}: {inputs.rows.in_words}")
    every, size = [one.rows for one in tenants.values()], config.rows.calibration_size
    if config.rows.calibration_data is None:
        calibration = _spread([rows.calibration for rows in every], size)
    else:
        scored = [row for rows in every for row in rows.scored_or_choosing]
        left, num_scored = other_calibration_rows(config.rows, config.scoring, inputs.encoder, scored)
        calibration = calibration_rows(left, size, seed=config.rows.seed)
        require_embedded(base.model, base.tokenizer, calibration)
        if num_scored:
            progress("load", len(files), len(files), f"{num_scored:,} rows are {SCORED_TOO}")
    return replace(inputs, rows=replace(inputs.rows, calibration=calibration)), tenants


def _spread(sets: Sequence[Sequence[TokenRow]], num_rows: int) -> list[TokenRow]:
    """Take the first rows of each set, about equally many of each.

    If there are more sets than rows, one row is taken from sets at equal distances.
    """
    if len(sets) > num_rows:
        sets = [sets[i * len(sets) // num_rows] for i in range(num_rows)]
    counts = [0] * len(sets)
    while sum(counts) < min(num_rows, sum(map(len, sets))):
        unfinished = [i for i, rows in enumerate(sets) if counts[i] < len(rows)]
        for i in unfinished[: num_rows - sum(counts)]:
            counts[i] += 1
    return [row for rows, count in zip(sets, counts, strict=True) for row in rows[:count]]


@contextmanager
def naming_tenant(tenant: str) -> Iterator[None]:
    """Start error messages with the name of the tenant."""
    try:
        yield
    except FrozenCoreError as error:
        raise type(error)(f"Tenant {tenant}: {error}") from error
