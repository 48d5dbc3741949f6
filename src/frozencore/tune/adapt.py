"""Make the adapter of a run: on a saved basis, or with bases computed from its calibration rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from frozencore.adapter.basis import read_header
from frozencore.adapter.calibrate import calibrate
from frozencore.adapter.card import begin_model_card
from frozencore.adapter.core import Core
from frozencore.adapter.learning_rate import proposed_learning_rate
from frozencore.adapter.loaded_adapter import LoadedAdapter, frozen_core_layers
from frozencore.adapter.swap import read_core
from frozencore.calibration.batches import Batch
from frozencore.constructors import COMPRESSED
from frozencore.distributed import num_ranks, own_rank
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import find_adapter
from frozencore.files.atomic_write import atomic_folder, write_json
from frozencore.maths.basis import LayerBasis
from frozencore.maths.capture import Capture, capture_or_none
from frozencore.maths.moments import LayerMoments
from frozencore.options import COMMAND_NAMES, without_lists
from frozencore.progress import Progress
from frozencore.quiet import collect_warnings
from frozencore.text import flag_of, one_line
from frozencore.tune.adapters import add_adapter, keep_start
from frozencore.tune.calibration_record import Alignment, CalibratedAdapter, CalibrationSummary
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import model_bytes
from frozencore.tune.folder import CALIBRATION
from frozencore.tune.load import Inputs
from frozencore.tune.methods import Method, MethodConfig, Targets, core_options
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.training.recipe import Recipe


@dataclass(frozen=True)
class Adapted:
    """A model with the adapter of a run.

    Attributes:
        targets: The adapted layers.
    """

    model: PeftModel
    targets: Targets
    made: CalibratedAdapter

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the base model's weights."""
        return model_bytes(self.model)

    @cached_property
    def num_magnitudes(self) -> int:
        """The number of trained values that are DoRA's magnitudes."""
        return sum(p.numel() for name, p in self.model.named_parameters() if "magnitude" in name)


@dataclass(frozen=True)
class Precomputed:
    """Values of earlier runs with the same model and rows, in place of new computations.

    Attributes:
        moments: The moments by layer for calibration. A method that reads no data is only measured on them.
        bases: The layers of a basis, in place of a calibration.
    """

    moments: Mapping[str, LayerMoments] | None = None
    bases: Mapping[str, LayerBasis] | None = None


def on_named_basis(config: RunConfig) -> RunConfig:
    """Fill a configuration with the method, rank, targets and options of its saved basis, if it names one.

    Raises:
        ConfigError: The configuration gives another method, rank or option than the basis.
        ArtifactError: There is no such basis, or it is damaged.
    """
    if config.method.basis is None:
        return config
    options, method = read_header(config.method.basis).options, config.method
    options = {**options, **options.get("constructor_options", {})}
    targets = options.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        targets = None  # a regular expression: it may name other layers of this model
    decided = {"name": options["constructor"], "r": options["r"], "target_modules": without_lists(targets)}
    core = {name: without_lists(options.get(name, option.default)) for name, option in core_options().items()}
    named = {name: "method" if name == "name" else COMMAND_NAMES[name] for name in decided}
    given = {name: getattr(method, name) for name in decided if named[name] in method.given} | method.core
    for name, value in given.items():
        if value != (its := {**decided, **core}[name]):
            flag = flag_of(named.get(name, name))
            its = one_line(its, 200)  # names of layers may be hundreds
            raise ConfigError(
                f"The basis in {method.basis} determines {flag}: {its}, but {value} was given. Leave it out."
            )
    return replace(config, method=replace(method, **decided, core=core))


def starting_core(config: MethodConfig) -> Core | None:
    """Read the core of ``start_from``; None if training starts from zero.

    Raises:
        ArtifactError: There is no core, or it is on another basis than the configured one.
    """
    if config.start_from is None or config.basis is None:
        return None
    return read_core(find_adapter(config.start_from), read_header(config.basis).id)


def undone_by_rounding(start: Core | None, trained: Core, saved: Core) -> tuple[str, ...]:
    """Warn if rounding moved a core by half of what its training moved it, or more.

    Args:
        start: The core that training started from; None for zero, from which every training moves farther.
    """
    if start is None:
        return ()
    here = trained.values.cpu()
    moved, lost = ((one.values.cpu() - here).norm() for one in (start, saved))
    if lost <= moved / 2:
        return ()
    return (
        f"Rounding to {saved.bits} bits moved the core by {float(lost / moved):.0%} of what this training moved it. "
        "Give --bits 32 where training goes on from a core, and round the last one.",
    )


def adapt(
    config: MethodConfig,
    inputs: Inputs,
    targets: Targets,
    progress: Progress,
    *,
    measure_rate: bool = False,
    precomputed: Precomputed | None = None,
) -> Adapted:
    """Add the adapter to the model, with bases computed from the run's calibration rows.

    Args:
        measure_rate: Measure a learning rate on the calibration rows, which is saved with the basis.
    """
    started, known, calibration = time.perf_counter(), precomputed or Precomputed(), None
    with collect_warnings() as messages:
        model = add_adapter(config.entry, inputs.model, replace(config, target_modules=targets), known.bases)
        if known.bases is None and config.moments_needed:
            batches = own_share(inputs.calibration_batches())
            calibration = calibrate(
                model, batches, options=config.calibration, moments=known.moments, learning_rate=measure_rate,
                progress=progress,
            )  # fmt: skip
    time_s = time.perf_counter() - started
    if calibration is not None:
        captures = calibration.captures
    else:
        captures = _captures(model, known.moments) if config.entry.has_bases else {}
    made = CalibratedAdapter(
        calibration=None if calibration is None else CalibrationSummary.of(calibration),
        alignment=Alignment.of(captures),
        time_s=time_s,
        warnings=(*limits_of_basis(config.basis), *messages),
    )
    return Adapted(model, targets, made)


def rate_for(model: Any, pad_id: int, rows: Sequence[TokenRow], progress: Progress) -> float | None:
    """The learning rate that the calibration of the basis proposed; without one it is measured on training rows.

    None where the gradients of the cores are zero or not finite.
    """
    rate: float | None = model.peft_config["default"].learning_rate
    if rate is None:
        batches = make_batches(rows, pad_id=pad_id, batch_size=1)
        layers = frozen_core_layers(model, "default")
        rate = proposed_learning_rate(model, layers, "default", batches, progress=progress)
    return rate


def with_rate(recipe: Recipe, model: Any, pad_id: int, rows: Sequence[TokenRow], progress: Progress) -> Recipe:
    """A recipe with a learning rate: its own, else :func:`rate_for`.

    Raises:
        ConfigError: No rate is known.
    """
    if recipe.learning_rate is not None:
        return recipe
    if (rate := rate_for(model, pad_id, rows, progress)) is None:
        raise ConfigError("The gradients of the cores are zero or not finite: no rate is known. Give --learning-rate.")
    return replace(recipe, learning_rate=rate)


def limits_of_basis(basis: str | None) -> tuple[str, ...]:
    """Warn of a named basis that was compressed from adapters: it was not chosen for these rows."""
    header = None if basis is None else read_header(basis)
    if header is None or header.options.get("constructor") != COMPRESSED:
        return ()
    return (
        f"The basis in {basis} was compressed from {header.calibrated_on or 'adapters'}. Rows that are unlike those "
        "of these adapters end at a higher loss: if yours are, choose a basis on rows (`frozencore calibrate`), and "
        "compare the held-out losses.",
    )


def save_start(adapted: Adapted, method: Method, folder: Path) -> None:
    """Save what a resumed run, or the end of this one, needs of the adapter's start; for many methods nothing."""
    if adapted.made.calibration is None:
        keep_start(method, adapted.model, folder)
        return
    with atomic_folder(folder, overwrite=True) as aside:
        begin_model_card(aside)
        adapted.model.save_pretrained(str(aside))
        write_json(aside / CALIBRATION, adapted.made.content())


def load_start(model: PreTrainedModel, targets: Targets, folder: Path) -> Adapted:
    """Put the calibrated start of an interrupted run on the model."""
    made = CalibratedAdapter.model_validate_json((folder / CALIBRATION).read_text())
    return Adapted(PeftModel.from_pretrained(model, folder, is_trainable=True), targets, made)


def _captures(model: PeftModel, moments: Mapping[str, LayerMoments] | None) -> dict[str, Capture]:
    """How much of the moments the bases capture, by layer where the moments suffice."""
    if moments is None:
        return {}
    bases = LoadedAdapter.of(model, "default").bases
    found = {name: capture_or_none(moments.get(name), basis) for name, basis in bases.items()}
    return {name: captured for name, captured in found.items() if captured is not None}


def own_share(batches: list[Batch]) -> list[Batch]:
    """The share of the calibration batches of this process; all shares together are the batches of a single process.

    Raises:
        ConfigError: There are fewer batches than processes.
    """
    if len(batches) < num_ranks():
        raise ConfigError(
            f"Each process calibrates on a batch of rows at least, but there are {len(batches)} batches for "
            f"{num_ranks()} processes. Start fewer, or give a larger --calibration-size or a smaller "
            "--calibration-batch."
        )
    return batches[own_rank() :: num_ranks()]
