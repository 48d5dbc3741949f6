"""Score compressed adapters on rows of their tenants, and train each core on from where compression left it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from frozencore.adapter.swap import swap_core
from frozencore.errors import ConfigError, DivergenceError
from frozencore.files.adapter_folder import adapter_in, folder_of
from frozencore.text import Progress, as_stage
from frozencore.tune.config import make_config
from frozencore.tune.evaluate import BaseWithAdapter
from frozencore.tune.folder import ADAPTER, BASIS, START
from frozencore.tune.load import Inputs
from frozencore.tune.locate import find_tenants
from frozencore.tune.many.tenant import Tenant, Trained, train_many
from frozencore.tune.many.tenant_rows import TenantRows, read_tenants
from frozencore.tune.methods import AdapterOptions, find_method
from frozencore.tune.run import recipe_of
from frozencore.tune.scoring.score import Score, score_rows

TRAINED_ON = "trained-on"
"""The folder of a core that was trained on, beside the compressed one."""
RATE, EPOCHS = 5e-3, 1


def read_rows_of(
    model: str, rows: Path, names: Collection[str], progress: Progress
) -> tuple[Inputs, dict[str, TenantRows]]:
    """Load the base model, and the rows of those adapters that have a file.

    Raises:
        ConfigError: A file has no adapter of its name.
        FrozenCoreError: The model or a tenant's rows cannot be read.
    """
    files = find_tenants(rows)
    if odd := next((name for name in files if name not in names), None):
        raise ConfigError(
            f"A row file of --tenants is named after its adapter, but {files[odd].name} has none: the adapters are "
            f"{', '.join(sorted(names)[:8])}. Rename it, or take it out."
        )
    config = make_config(model=model, data=str(rows), exact_match="auto", learning_rate=RATE, epochs=EPOCHS)
    return read_tenants(config, files, progress)


def score_compressed(
    inputs: Inputs,
    rows: Mapping[str, TenantRows],
    shop: Path,
    adapters: Mapping[str, str | Path],
    progress: Progress,
) -> dict[str, dict[str, Score]]:
    """Score each tenant's held-out rows with the base model, its own adapter, its core, and its core trained on.

    Args:
        rows: Those of tenants whose adapters were compressed.
        shop: The folder of ``frozencore compress``. Cores that were trained on are saved in ``NAME/trained-on``.
        adapters: The adapters that were compressed, by name.
    """
    held, encoder = BaseWithAdapter(inputs.model), inputs.encoder
    found: dict[str, dict[str, Score]] = {name: {} for name in rows}

    def score(name: str, arm: str, model: nn.Module) -> None:
        stage = as_stage(progress, f"{name}, {arm}")
        found[name][arm] = score_rows(model, encoder, rows[name].rows.scored, progress=stage)

    for name in rows:
        folder = adapter_in(folder_of(str(adapters[name])))
        for arm, place in (("base", None), ("own", folder)):  # an adapter changes the base model in place
            score(name, arm, held.with_adapter(place))
    method = find_method("compressed")
    options = AdapterOptions(rank=1, targets="all-linear", seed=0, core={}, basis=str(shop / BASIS))
    model = method.add(held.without_adapter(), options)
    for name, own in rows.items():
        swap_core(model, shop / name / ADAPTER)
        score(name, "compressed", model.eval())
        recipe = recipe_of(own.config.training, method, own.rows, model)
        done: dict[str, Trained] = {}
        tenant = {name: Tenant(own.rows.train, recipe)}
        train_many(model, tenant, done.update, pad_id=encoder.pad_id, progress=progress)
        if (why := done[name].diverged) is not None:
            raise DivergenceError(f"Tenant {name!r}, trained on from its core: {why}")
        swap_core(model, done[name].cores)
        method.save(model, shop / name / TRAINED_ON, shop / name / START)
        score(name, "trained on", model)
    return found
