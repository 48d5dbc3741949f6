"""Share moments and bases between runs: moments for all constructors, weights-only bases for all seeds.

Both are files of the campaign, each computed once under a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peft import PeftModel
from safetensors.torch import load_file, save_file

from frozencore.adapter.bases import get_bases
from frozencore.adapter.calibrate import calibrate
from frozencore.adapter.layer import frozen_core_layers
from frozencore.calibration.calibration_options import options_of_sums
from frozencore.calibration.moments_file import MomentsFingerprint, load_moments, save_moments
from frozencore.files.fingerprint import fingerprint_model, fingerprint_options
from frozencore.files.whole_file import remove_left, whole_file
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import CAPTURE_NEEDS, Capture, capture_if_whole
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.config import RunConfig
from frozencore.tune.methods import Targets
from frozencore.tune.run.adapt import Adapted, adapt_from_data
from frozencore.tune.run.calibrate_only import collect_for
from frozencore.tune.run.prepare import PreparedRun, calibration_batches
from frozencore.tune.run.row_sets import RunRows
from frozencore.words import Progress
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.store import Store

_DECIDE_MOMENTS = (
    "model", "dtype", "targets", "layers", "seed", "task", "data", "num_train", "num_evaluation", "paper_steps",
    "max_length", "truncate", "prompt_style", "calibration_size", "calibration",
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
    if config.rows.calibration_task is not None:  # its rows do not depend on the learned task
        values |= {"task": config.rows.calibration_task, "data": None, "num_train": None, "num_evaluation": None}
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
    sharing = [job for job in jobs if not job.kind.is_alone and _shares_moments(job.config)]
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


def _shares_moments(config: RunConfig) -> bool:
    """Return whether a run shares moments: a memory budget allows no file."""
    return config.method.calibration.memory_budget is None


def calibrating(job: Job) -> list[RunConfig]:
    """The configuration of a job, and if it has a reference, the same with the reference's number of examples."""
    sizes = [job.reference_size] if job.reference_size else []
    return [job.config, *(job.config.replaced(calibration_size=size) for size in sizes)]


@dataclass(frozen=True)
class SharedWork:
    """Add adapters to models with moments and bases from other runs of the campaign."""

    store: Store
    needs: Needs

    def adapt(self, config: RunConfig, prepared: PreparedRun, targets: Targets, progress: Progress) -> Adapted:
        """Run :func:`frozencore.tune.run.adapt.adapt_from_data` with shared moments and weights-only bases."""
        if not _shares_moments(config):
            return adapt_from_data(config, prepared, targets, progress)
        if config.method.entry.weights_only:
            return self._with_weight_bases(config, prepared, targets), None
        model = config.method.entry.add(prepared.model, config.method.adapter_options(targets))
        if not config.method.moments_needed:
            return model, None
        moments = self.moments(config, model, prepared, progress)
        return model, calibrate(model, moments=moments, progress=progress)

    def moments(
        self, config: RunConfig, model: PeftModel, prepared: PreparedRun, progress: Progress
    ) -> dict[str, LayerMoments]:
        """The moments of a run's calibration rows: from the file, or collected for all runs that need them."""
        needs = self.needs.get(moments_key(config), frozenset()) | config.method.moments_needed
        file = self.store.shared / "moments" / moments_file(config, prepared.rows)
        batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
        fingerprint = MomentsFingerprint.of(model, batches, config.method.calibration)
        with self.store.locked(f"moments-{file.stem}"):
            if file.exists():
                there = load_moments(file, fingerprint)
                has = frozenset(next(iter(there.values())).names())
                if needs <= has:
                    return there
                needs |= has
            remove_left(file.parent, file.name)
            found = collect_for(config, model, batches, needs, progress)
            save_moments(file, found, fingerprint)
        return found

    def measure(
        self, config: RunConfig, prepared: PreparedRun, model: PeftModel, progress: Progress
    ) -> dict[str, Capture]:
        """Measure how much of the shared moments a run's bases capture; empty if the campaign needs no G, a and d."""
        shared = _shares_moments(config) and self.needs.get(moments_key(config), frozenset()) >= CAPTURE_NEEDS
        if not (shared and config.method.entry.has_bases):
            return {}
        moments = self.moments(config, model, prepared, progress)
        layers = frozen_core_layers(model, "default")
        bases = {name: known_basis(*layer.factors("default")[:2]) for name, layer in layers.items()}
        found = {name: capture_if_whole(moments[name], basis) for name, basis in bases.items()}
        return {name: captured for name, captured in found.items() if captured is not None}

    def _with_weight_bases(self, config: RunConfig, prepared: PreparedRun, targets: Targets) -> PeftModel:
        content = config.content()
        decides = {name: content[name] for name in _DECIDE_WEIGHT_BASES}
        key = fingerprint_options({**decides, "weights": fingerprint_model(prepared.model)})[:16]
        file = self.store.shared / "weight-bases" / f"{key}.safetensors"
        method, options = config.method.entry, config.method.adapter_options(targets)
        with self.store.locked(f"weight-{key}"):
            if file.exists():
                return method.add(prepared.model, options, load_file(file))
            model = method.add(prepared.model, options)
            remove_left(file.parent, file.name)
            with whole_file(file) as aside:
                save_file(get_bases(model), aside)
        return model
