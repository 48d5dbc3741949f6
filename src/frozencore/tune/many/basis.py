"""The basis of all tenants, ``out/basis``, and ``out/tenants.json``, which says what it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from frozencore.adapter.loaded_basis import basis_id, save_basis
from frozencore.calibration.calibration_options import options_of_sums
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import write_json, write_text
from frozencore.files.names import BASIS, MANIFEST_FILE, RUN_FILE
from frozencore.progress import Progress
from frozencore.text import one_line
from frozencore.tune.adapt import Adapted, adapt
from frozencore.tune.calibration_record import CalibratedAdapter
from frozencore.tune.config import RunConfig, as_json, run_options
from frozencore.tune.load import Inputs
from frozencore.tune.make_record import calibrated_on
from frozencore.tune.many.folder import refuse_differing
from frozencore.tune.methods import Targets
from frozencore.tune.processes import is_first
from frozencore.tune.record_part import RecordPart


class Manifest(RecordPart):
    """The inputs of the basis beside the tenants.

    Attributes:
        identity: The options that determine it, and hashes of the base model and of the calibration rows.
        basis: The id of the basis; None until it is saved.
        made: The calibration, for the tenants' records.
    """

    identity: dict[str, Any]
    basis: str | None = None
    made: CalibratedAdapter | None = None

    @classmethod
    def read(cls, file: Path) -> Manifest | None:
        """Read the manifest; None if there is none."""
        if not file.exists():
            return None
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArtifactError(f"{file} is damaged ({one_line(error, 120)}). Choose another --out.") from error


def adapt_for_all(
    config: RunConfig,
    inputs: Inputs,
    targets: Targets,
    out: Path,
    hashes: Mapping[str, str],
    options: str,
    progress: Progress,
) -> Adapted:
    """Add the adapter of all tenants to the model, and save its basis in ``out/basis`` if it has no name yet.

    A resumed run loads that basis. ``out/tenants.json`` says what the basis was made of: it is written before the
    basis, and again after it with the calibration, for the tenants' records. The given ``options`` are written
    first, because ``--resume`` goes on with them.

    Args:
        hashes: SHA-256 of the base model and of its configuration.

    Raises:
        ArtifactError: ``out/basis`` is another one, of a run with other options or rows.
    """
    if config.method.basis is not None:
        return adapt(config.method, inputs, targets, progress)
    folder, file = out / BASIS, out / MANIFEST_FILE
    of_method = {
        name: one
        for name, one in run_options().items()
        if one.part == "method" and one.group != "calibration" and name != "bits"
    }
    identity = {
        **{name: as_json(one.value_in(config)) for name, one in of_method.items()},
        **options_of_sums(vars(config.method.calibration)),
        "seed": config.method.seed,
        "base model": hashes["model"],
        "configuration of the base model": hashes["config"],
        "calibration rows": inputs.rows.fingerprints["calibration"],
    }
    before = Manifest.read(file)
    if before is not None:
        way_out = f"Give the same, choose another --out, or train new tenants without the others: --basis {folder}."
        refuse_differing(str(file), before.identity, identity, way_out=way_out)
    elif folder.exists():
        raise ArtifactError(
            f"Tenants train on the basis that their options give, but {folder} is that of another run. Choose "
            "another --out, or name that basis with --basis."
        )
    if before is not None and before.made is not None:
        on_basis = replace(config.method, basis=str(folder), layers=None)
        adapted = adapt(on_basis, inputs, targets, progress)
        refuse_differing(str(folder), {"basis": before.basis}, {"basis": basis_id(adapted.model)})
        return replace(adapted, made=before.made)
    adapted = adapt(config.method, inputs, targets, progress, measure_rate=True)
    if not adapted.model.peft_config["default"].initial_step:  # else each core is saved with its own basis
        if is_first():
            write_text(out / RUN_FILE, options)
        write_json(file, Manifest(identity=identity).content())
        source = calibrated_on(config, inputs.rows, adapted.made.calibration)
        saved = save_basis(adapted.model, folder, calibrated_on=source, overwrite=True)
        whole = Manifest(identity=identity, basis=saved, made=adapted.made)
        write_json(file, whole.content())
    return adapted
