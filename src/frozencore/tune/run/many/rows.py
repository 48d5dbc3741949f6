"""The model and the rows of all tenants, read and tokenised before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from frozencore.errors import ConfigError, FrozenCoreError
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.bench import Base, Bench, prepare
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.loading import load_model
from frozencore.tune.run.many.tenants import find_tenants
from frozencore.tune.run.named_basis import on_named_basis
from frozencore.tune.run.rows import RunRows
from frozencore.words import Progress


@dataclass(frozen=True)
class TenantRows:
    """A tenant's configuration, which is that of all but for its own file, and its rows."""

    config: RunConfig
    rows: RunRows


def tenants_of(config: RunConfig) -> tuple[RunConfig, dict[str, Path]]:
    """The configuration on its basis, and the row file of each tenant.

    Raises:
        ConfigError: It asks for what many tenants cannot have, or for a method without cores.
        DataError: There are no row files.
    """
    config.refuse_alone("tenants")
    config = on_named_basis(config)
    if config.data is None or not config.method_entry.has_bases:
        raise ConfigError(
            f"Tenants have a row file and a core each, on one basis, but {config.method!r} trains others."
        )
    return config, find_tenants(Path(config.learns))


def read_tenants(
    config: RunConfig, files: Mapping[str, Path], progress: Progress
) -> tuple[Bench, dict[str, TenantRows]]:
    """A bench for the basis, whose rows are of all tenants, and each tenant's own rows.

    Raises:
        FrozenCoreError: In one line, which tenant's file cannot be read, split or tokenised, and why.
    """
    progress("load", 0, len(files), config.model)
    base = Base(*load_model(config.model, dtype=config.dtype, device=config.device))
    own: dict[str, TenantRows] = {}
    for number, (name, file) in enumerate(files.items(), start=1):
        config_here = config.model_copy(update={"data": str(file)})
        try:
            bench = prepare(config_here, lambda *_: None, base)
        except FrozenCoreError as error:
            raise type(error)(f"Tenant {name!r}, {file}: {error}") from error
        own[name] = TenantRows(config_here, bench.rows)
        progress("load", number, len(files), f"{len(bench.rows.train)} training rows of {name}")
    calibration = _calibration_rows(config, own)
    own = {name: replace(one, rows=replace(one.rows, calibration=calibration)) for name, one in own.items()}
    every_row = [row for one in own.values() for row in one.rows.train]
    shared = RunRows(None, (), every_row, calibration, [], "none")
    return Bench(base.model, bench.encoder, shared), own


def _calibration_rows(config: RunConfig, own: Mapping[str, TenantRows]) -> list[TokenRow]:
    """As many as a run of one tenant would read, drawn from all of them; of another task where one is named."""
    if config.calibration_task is not None:
        return next(iter(own.values())).rows.calibration

    def place(drawn: tuple[str, TokenRow]) -> bytes:
        name, row = drawn
        return sha256(f"{config.seed + 1}:{name}:{row.id}".encode()).digest()

    every = [(name, row) for name, one in own.items() for row in one.rows.train]
    return [row for _, row in sorted(every, key=place)[: config.calibration_size]]
