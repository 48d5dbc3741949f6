"""Tenants over the processes that were started together: each trains its own share, and nothing is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from frozencore.errors import ConfigError, TrainingError
from frozencore.ranks import num_ranks, own_rank, spread
from frozencore.tune.run.files import CHECKPOINTS
from frozencore.tune.run.many.rows import TenantRows
from frozencore.words import num_of


def own_tenants(tenants: Mapping[str, TenantRows]) -> dict[str, TenantRows]:
    """The tenants that this process trains, in their order: all shares have about as many tokens to train on.

    Raises:
        ConfigError: There are fewer tenants than processes.
    """
    if len(tenants) < num_ranks():
        raise ConfigError(
            f"Each process trains a tenant at least, but there are {num_of(len(tenants), 'tenant')} for {num_ranks()} "
            "processes. Start fewer."
        )
    num_tokens = {name: sum(len(row.input_ids) for row in one.rows.train) for name, one in tenants.items()}
    trains = spread(num_tokens, num_ranks())
    return {name: one for name, one in tenants.items() if trains[name] == own_rank()}


class ShareFolders:
    """Where each share's checkpoints are while it trains: the first's as if it were alone, and beside them the others'.

    Args:
        out: The run's folder.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._rank, self._size = out, own_rank(), num_ranks()

    def require_as_many(self) -> None:
        """Of a run that has begun.

        Raises:
            TrainingError: By another number of processes: its shares are others.
        """
        begun = 1 + len(list((self._out / CHECKPOINTS).glob("share-*")))
        if (self._out / CHECKPOINTS).is_dir() and begun != self._size:
            raise TrainingError(
                f"Each process goes on with the tenants that it has begun with, but {begun} began "
                f"{self._out} and {self._size} came. Resume it with {begun}."
            )

    def make(self) -> None:
        """All of them, by the first, so that their number is known from the beginning."""
        if self._rank > 0:
            return
        for rank in range(1, self._size):
            self._of(rank).mkdir(parents=True, exist_ok=True)

    @property
    def own(self) -> Path:
        return self._of(self._rank)

    def _of(self, rank: int) -> Path:
        begun = self._out / CHECKPOINTS
        return begun / f"share-{rank + 1}" if rank else begun
