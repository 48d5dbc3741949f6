"""The rows of all tenants, and their distribution over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from frozencore.distributed import assign_owners, num_ranks, own_rank
from frozencore.errors import ConfigError, FrozenCoreError, TrainingError
from frozencore.files.whole_file import whole_folder
from frozencore.text import Progress, num_of
from frozencore.tune.adapt import on_named_basis
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import CHECKPOINTS
from frozencore.tune.load import Inputs, load, prepare
from frozencore.tune.locate import find_tenants
from frozencore.tune.read_rows import RunRows


@dataclass(frozen=True)
class TenantRows:
    """A tenant's configuration, which has its own file, and its rows."""

    config: RunConfig
    rows: RunRows


def tenants_of(config: RunConfig) -> tuple[RunConfig, dict[str, Path]]:
    """The configuration with its basis, and the row file of each tenant.

    Raises:
        ConfigError: An option cannot be used with many tenants, or the method has no cores.
        DataError: There are no row files.
    """
    if config.training.report_to is not None:
        raise ConfigError(
            "--report-to is for a run that trains alone, but tenants train side by side, on one basis and in common "
            "batches. Leave one out."
        )
    config = on_named_basis(config)
    if config.rows.data is None or not config.method.entry.has_bases:
        raise ConfigError(
            f"Tenants have a row file and a core each, on one basis, but {config.method.name!r} trains others."
        )
    return config, find_tenants(Path(config.rows.learns))


def read_tenants(
    config: RunConfig, files: Mapping[str, Path], progress: Progress
) -> tuple[Inputs, dict[str, TenantRows]]:
    """Load the model with the rows of the basis, and each tenant's own rows.

    The basis is calibrated on ``calibration_size`` rows of each tenant, or of the calibration task if one is named.

    Raises:
        FrozenCoreError: A tenant's file cannot be read, split or tokenised; the message names the tenant.
    """
    inputs, own = _read_each(config, files, progress)
    sets = [one.rows.calibration for one in own.values()]
    calibration = sets[0] if config.rows.calibration_task is not None else [row for rows in sets for row in rows]
    every_row = [row for one in own.values() for row in one.rows.train]
    return replace(inputs, rows=RunRows(None, (), every_row, calibration, [], "none")), own


def _read_each(
    config: RunConfig, files: Mapping[str, Path], progress: Progress
) -> tuple[Inputs, dict[str, TenantRows]]:
    """Load the model with the rows of the last tenant, and each tenant's own rows, with calibration rows."""
    progress("load", 0, len(files), config.model.name)
    base = load(config.model)
    own: dict[str, TenantRows] = {}
    for number, (name, file) in enumerate(files.items(), start=1):
        config_here = config.replaced(data=str(file))
        with naming_tenant(f"{name!r}, {file}"):
            inputs = prepare(config.model, config_here.rows, config.scoring, lambda *_: None, base)
        own[name] = TenantRows(config_here, inputs.rows)
        progress("load", number, len(files), f"{name}: {inputs.rows.in_words}")
    return inputs, own


@contextmanager
def naming_tenant(tenant: str) -> Iterator[None]:
    """Start error messages with the name of the tenant."""
    try:
        yield
    except FrozenCoreError as error:
        raise type(error)(f"Tenant {tenant}: {error}") from error


def own_tenants(tenants: Mapping[str, TenantRows]) -> dict[str, TenantRows]:
    """The tenants of this process, in order; all processes get about as many training tokens.

    Raises:
        ConfigError: There are fewer tenants than processes.
    """
    if len(tenants) < num_ranks():
        raise ConfigError(
            f"Each process trains a tenant at least, but there are {num_of(len(tenants), 'tenant')} for {num_ranks()} "
            "processes. Start fewer."
        )
    num_tokens = {name: sum(len(row.input_ids) for row in one.rows.train) for name, one in tenants.items()}
    trains = assign_owners(num_tokens, num_ranks())
    return {name: one for name, one in tenants.items() if trains[name] == own_rank()}


class ShareFolders:
    """The checkpoint folders of the processes: the first has the usual folder, the others are beside it.

    Args:
        out: The run's folder.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._rank, self._size = out, own_rank(), num_ranks()

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, also inside :func:`frozencore.distributed.each_by_itself`."""
        return self._rank == 0

    def require_as_many(self) -> None:
        """Check that a resumed run has the same number of processes.

        Raises:
            TrainingError: The number differs, so the shares differ.
        """
        begun = 1 + len(list((self._out / CHECKPOINTS).glob("share-*")))
        if (self._out / CHECKPOINTS).is_dir() and begun != self._size:
            raise TrainingError(
                f"Each process goes on with the tenants that it has begun with, but {begun} began "
                f"{self._out} and {self._size} came. Resume it with {begun}."
            )

    def make(self) -> None:
        """Make all folders in the first process, so that their number is known from the start."""
        begun = self._out / CHECKPOINTS
        if self._rank > 0 or self._size == 1 or begun.is_dir():
            return
        with whole_folder(begun, overwrite=None) as folder:  # a kill leaves all of them or none
            for rank in range(1, self._size):
                (folder / self._of(rank).name).mkdir()

    @property
    def own(self) -> Path:
        return self._of(self._rank)

    def _of(self, rank: int) -> Path:
        begun = self._out / CHECKPOINTS
        return begun / f"share-{rank + 1}" if rank else begun
