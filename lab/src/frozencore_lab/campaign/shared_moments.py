"""Share moments and bases between runs: moments for all constructors, weights-only bases for all seeds.

Both are files of the campaign, each computed once under a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from frozencore.adapter.basis import load_basis
from frozencore.adapter.loaded_basis import get_basis
from frozencore.calibration.calibration_options import BATCH_SIZE, options_of_sums
from frozencore.calibration.collect import collect_moments
from frozencore.files.atomic_write import remove_left
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.basis import LayerBasis
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.options import fingerprint_options
from frozencore.progress import Progress
from frozencore.tune.adapt import Precomputed
from frozencore.tune.adapters import add_adapter, targeted_layers
from frozencore.tune.config import RunConfig
from frozencore.tune.load import Inputs, resolve_targets
from frozencore.tune.run_rows import RunRows
from frozencore.tune.scoring.forward import unload_adapter
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.moments_file import MomentsFingerprint, load_moments, save_moments
from frozencore_lab.campaign.store import Store

_DECIDE_MOMENTS = (
    "model", "dtype", "targets", "layers", "seed", "data", "num_train", "num_evaluation", "paper_steps",
    "max_length", "too_long", "prompt_style", "calibration_size", "calibration",
)  # fmt: skip
"""Options that decide the moments, beside what the hash of the calibration rows holds."""
_DECIDE_WEIGHT_BASES = ("dtype", "method", "rank", "targets", "layers", "core")

Needs = Mapping[str, frozenset[MomentName]]
"""The moments that all runs together need, by the key of the moments file."""


def moments_key(config: RunConfig) -> str:
    """The key of the moments that runs share, from their options; see :func:`moments_file`."""
    content = config.content()
    values = {name: content[name] for name in _DECIDE_MOMENTS}
    values["calibration"] = options_of_sums(values["calibration"])
    if config.rows.calibration_batch != BATCH_SIZE:
        values["calibration_batch"] = config.rows.calibration_batch
    if config.rows.calibration_data is not None:  # of its rows only those are left out that are scored
        values |= {"data": config.rows.calibration_data, "num_train": None, "num_evaluation": None}
    return fingerprint_options(values)[:16]


def moments_file(config: RunConfig, rows: RunRows) -> str:
    """The name of the file of a run's moments, from its calibration rows.

    If validation rows are a part of the training rows, a trial draws calibration rows from fewer rows than a final run
    that trains on all. Otherwise both draw the same rows and share the file.
    """
    return f"{moments_key(config)}-{rows.fingerprints['calibration'][:16]}.safetensors"


def needs_of(jobs: Iterable[Job]) -> Needs:
    """The moments that the jobs need of each moments file; jobs that run alone collect their own.

    If one method of a campaign reads the gradient G of a model, all runs with bases on this model need G, a and d. So
    each run records how much its bases capture, whether or not its method reads G, and in any order of runs.
    """
    sharing = [job for job in jobs if not job.kind.is_alone]
    measured = {job.config.model.name for job in sharing if "cross" in job.config.method.moments_needed}
    needs: dict[str, frozenset[MomentName]] = {}
    for job in sharing:
        wanted = job.config.method.moments_needed
        if job.kind.trains and job.config.model.name in measured and job.config.method.entry.has_bases:
            wanted |= CAPTURE_NEEDS
        for config in calibrating(job) if wanted else ():
            key = moments_key(config)
            needs[key] = needs.get(key, frozenset()) | wanted
    return needs


def calibrating(job: Job) -> list[RunConfig]:
    """The configuration of a job, and if it has a reference, the same with the reference's number of examples."""
    sizes = [job.reference_size] if job.reference_size else []
    return [job.config, *(job.config.replaced(calibration_size=size) for size in sizes)]


@dataclass(frozen=True)
class SharedWork:
    """The moments and bases of the campaign's runs."""

    store: Store
    needs: Needs

    def of(self, config: RunConfig, inputs: Inputs, progress: Progress) -> Precomputed | None:
        """The moments and the weights-only bases of a run; None if it computes its own.

        A method that reads no data is measured on the moments, if the campaign needs G, a and d anyway.
        """
        method = config.method.entry
        measures = method.has_bases and self.needs.get(moments_key(config), frozenset()) >= CAPTURE_NEEDS
        moments = self.moments(config, inputs, progress) if config.method.moments_needed or measures else None
        return Precomputed(moments, self._weight_bases(config, inputs) if method.weights_only else None)

    def moments(self, config: RunConfig, inputs: Inputs, progress: Progress) -> dict[str, LayerMoments]:
        """The moments of a run's calibration rows: from the file, or collected for all runs that need them."""
        needs = self.needs.get(moments_key(config), frozenset()) | config.method.moments_needed
        file = self.store.shared / "moments" / moments_file(config, inputs.rows)
        batches = inputs.calibration_batches()
        fingerprint = MomentsFingerprint.of(inputs.model, batches, config.method.calibration)
        with self.store.locked(f"moments-{file.stem}"):
            if file.exists():
                there = load_moments(file, fingerprint)
                has = frozenset(next(iter(there.values())).names())
                if needs <= has:
                    return there
                needs |= has
            remove_left(file.parent, file.name)
            names = targeted_layers(inputs.model, resolve_targets(config.method, inputs.model))
            found = collect_moments(
                inputs.model, batches, {name: inputs.model.get_submodule(name) for name in names}, needs=needs,
                options=config.method.calibration, progress=progress,
            )  # fmt: skip
            save_moments(file, found, fingerprint)
        return found

    def _weight_bases(self, config: RunConfig, inputs: Inputs) -> Mapping[str, LayerBasis]:
        """The basis of a method that reads the weights alone: from its folder, or computed for all runs."""
        content = config.content()
        decides = {name: content[name] for name in _DECIDE_WEIGHT_BASES}
        key = fingerprint_options({**decides, "weights": fingerprint_model(inputs.model)})[:16]
        folder = self.store.shared / "weight-bases" / key
        with self.store.locked(f"weight-{key}"):
            if not folder.exists():
                options = replace(config.method, target_modules=resolve_targets(config.method, inputs.model))
                model = add_adapter(config.method.entry, inputs.model, options)
                remove_left(folder.parent, folder.name)
                get_basis(model).write(folder)
                unload_adapter(model)
        return load_basis(folder).layers
