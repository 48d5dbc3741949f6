"""Score compressed adapters on rows of their tenants, and train each core on from where compression left it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from frozencore.adapter.compress import SHOWN, CompressedAdapters, compress_adapters
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.swap import round_core, swap_core
from frozencore.constructors import COMPRESSED
from frozencore.errors import ConfigError, DivergenceError, ModelError
from frozencore.files.adapter_folder import find_adapter
from frozencore.files.names import ADAPTER, BASIS
from frozencore.files.tenant_names import require_tenant_name
from frozencore.files.tokenizer import has_tokenizer
from frozencore.progress import Progress, as_stage
from frozencore.tune.adapt import rate_for
from frozencore.tune.adapters import add_adapter, save_adapter
from frozencore.tune.config import make_config
from frozencore.tune.evaluate import BaseWithAdapter, adapter_names
from frozencore.tune.folder import START
from frozencore.tune.load import Inputs, load_model, load_tokenizer, tokenizers_of
from frozencore.tune.locate import find_tenants, model_location
from frozencore.tune.many.tenant import Tenant, Trained, train_many
from frozencore.tune.many.tenant_rows import TenantRows, read_tenants
from frozencore.tune.methods import MethodConfig, find_method
from frozencore.tune.run import recipe_of, scoring_trained
from frozencore.tune.scoring.score import Score, score_rows

TRAINED_ON = "trained-on"
"""The folder of a core that was trained on, beside the compressed one."""
EPOCHS, SHARE_OF_RATE = 1, 0.25
"""A core that is trained on takes a quarter of the rate of one that starts at zero: about 5e-3 with SmolLM2."""


def compress_scored(
    adapters: Sequence[str],
    out: Path,
    *,
    rank: int,
    bits: int | None,
    model: str | None,
    tenants: Path | None,
    same_base: bool,
    skip_bad: bool,
    written: Callable[[CompressedAdapters], object],
    progress: Progress,
) -> Scores:
    """Compress adapters, and score each before and after it on the rows of its tenant.

    Args:
        adapters: Folders or hub ids.
        model: The base model.
        tenants: The row files, named after the adapters; None scores nothing.
        bits, same_base, skip_bad: As in ``compress_adapters``; ``skip_bad`` leaves out bad rows too.
        written: Called with the result before the cores are scored.

    Raises:
        FrozenCoreError: A name, a row file, an adapter or the model is wrong.
    """
    named = dict(zip(adapter_names([Path(place) for place in adapters]), adapters, strict=True))
    if not skip_bad:
        for name, place in named.items():
            require_tenant_name(name, place)
    to_score = None
    if tenants is not None:
        to_score = read_rows_of(str(model), tenants, named.keys(), progress, skip_bad=skip_bad)
    base: nn.Module | None = None if to_score is None else to_score[0].model
    if model is not None and base is None:
        base = load_model(model_location(model), device="cpu")[0]
    scores: Scores = {}

    def score_first(names: Collection[str]) -> None:
        if to_score is not None:
            rows = {name: rows_of_one for name, rows_of_one in to_score[1].items() if name in names}
            scores.update(score_adapters(to_score[0], rows, named, progress))

    done = compress_adapters(
        named, out, rank=rank, base=base, same_base=same_base, skip_bad=skip_bad, bits=bits, ready=score_first,
        progress=progress,
    )  # fmt: skip
    written(done)
    if model is not None:
        _warn_of_templates({name: find_adapter(named[name]) for name in done.kept}, model)
    if to_score is not None:
        score_cores(*to_score, out, scores, progress, bits=done.bits)
    return scores


def _warn_of_templates(adapters: Mapping[str, Path], model: str) -> None:
    """Warn of adapters with a chat template of their own beside them, which a core alone does not keep."""
    own = {name: folder for name, folder in adapters.items() if has_tokenizer(folder)}
    if not own:
        return
    tokenizer = load_tokenizer(model)
    with suppress(ModelError):  # a tokenizer that cannot be read is not compressed
        templates = {name: one.chat_template for name, one in tokenizers_of(own, model, tokenizer).items()}
        if others := [name for name, template in templates.items() if template != tokenizer.chat_template]:
            more = " and others" if len(others) > SHOWN else ""
            warnings.warn(
                f"A trainer saved another chat template beside {', '.join(others[:SHOWN])}{more} than {model} has. A "
                "core is scored and asked with the model's: to ask with its own, copy the files of the tokenizer into "
                "NAME/adapter.",
                stacklevel=2,
            )


def read_rows_of(
    model: str, rows: Path, names: Collection[str], progress: Progress, *, skip_bad: bool = False
) -> tuple[Inputs, dict[str, TenantRows]]:
    """Load the base model, and the rows of those adapters that have a file.

    Args:
        skip_bad: Leave out rows with a missing or empty column.

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
    config = make_config(model=model, data=str(rows), exact_match="auto", epochs=EPOCHS, skip_bad=skip_bad)
    return read_tenants(config, files, progress)


Scores = dict[str, dict[str, Score | str]]
"""Scores by tenant and arm; the reason in place of a score if training on gave no core."""


def score_adapters(
    inputs: Inputs, rows: Mapping[str, TenantRows], adapters: Mapping[str, str | Path], progress: Progress
) -> Scores:
    """Score each tenant's held-out rows with the base model and with its adapter, before anything is written.

    Args:
        adapters: The adapters to compress, by name.

    Raises:
        ArtifactError: An adapter does not go on the base model.
    """
    base, scores = BaseWithAdapter(inputs.model), Scores()
    for name, tenant_rows in rows.items():
        folder, scores[name] = find_adapter(str(adapters[name])), {}
        for arm, place in (("base", None), ("own", folder)):  # an adapter changes the base model in place
            scores[name][arm] = _score(inputs, tenant_rows, base.with_adapter(place), f"{name}, {arm}", progress)
    base.without_adapter()
    return scores


def score_cores(
    inputs: Inputs, rows: Mapping[str, TenantRows], shop: Path, scores: Scores, progress: Progress, *, bits: int
) -> None:
    """Add the scores of each tenant's core, and of its core trained on, which is saved in ``NAME/trained-on``.

    Args:
        bits: Bits of a saved value of the cores that are trained on.
        shop: The folder of ``frozencore compress``.
        scores: The scores that :func:`score_adapters` returned.

    A core with trained modules beside it is scored with them, and not trained on.
    """
    base = BaseWithAdapter(inputs.model)
    with_modules = [name for name in scores if read_adapter(shop / name / ADAPTER).modules]
    for name in with_modules:
        model = base.with_adapter(shop / name / ADAPTER)
        scores[name]["compressed"] = _score(inputs, rows[name], model, f"{name}, compressed", progress)
        scores[name]["trained on"] = "Only cores are trained on, and this adapter has other trained modules."
    base.without_adapter()
    method = find_method(COMPRESSED)
    options = MethodConfig(basis=str(shop / BASIS))
    model = add_adapter(method, inputs.model, options)
    for name in scores:
        if name in with_modules:
            continue
        tenant_rows = rows[name]
        swap_core(model, shop / name / ADAPTER)
        scores[name]["compressed"] = _score(inputs, tenant_rows, model.eval(), f"{name}, compressed", progress)
        rate = rate_for(model, inputs.encoder.pad_id, tenant_rows.rows.train, as_stage(progress, f"rate of {name}"))
        if rate is None:
            scores[name]["trained on"] = "No rate is known: the gradients of the core are zero or not finite."
            continue
        recipe = recipe_of(tenant_rows.config.training, method, tenant_rows.rows, model)
        recipe = replace(recipe, learning_rate=SHARE_OF_RATE * rate)
        done: dict[str, Trained] = {}
        tenant = {name: Tenant(tenant_rows.rows.train, recipe)}
        train_many(model, tenant, done.update, pad_id=inputs.encoder.pad_id, progress=progress)
        if (why := done[name].diverged) is not None:
            scores[name]["trained on"] = why
            continue
        core = done[name].core
        assert core is not None
        swap_core(model, core)
        try:
            with scoring_trained(recipe):
                rounded = round_core(model, bits)
                scores[name]["trained on"] = _score(inputs, tenant_rows, model, f"{name}, trained on", progress)
        except DivergenceError as error:
            scores[name]["trained on"] = str(error)
        else:
            save_adapter(method, model, shop / name / TRAINED_ON, shop / name / START, rounded)


def _score(inputs: Inputs, tenant_rows: TenantRows, model: nn.Module, what: str, progress: Progress) -> Score:
    return score_rows(model, inputs.encoder, tenant_rows.rows.scored, progress=as_stage(progress, what))
