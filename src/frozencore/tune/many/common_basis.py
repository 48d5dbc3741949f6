"""The basis of all tenants of a run: a named one, or one that the run calibrates and saves beside its tenants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frozencore.adapter.bases import basis_fingerprint, save_basis
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import write_json
from frozencore.text import Progress, one_line
from frozencore.tune.adapt import (
    CALIBRATION_TYPE,
    Adapted,
    adapt,
    adapter_identity,
    calibration_content,
    with_calibration,
)
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import BASIS, MANIFEST
from frozencore.tune.load import Inputs
from frozencore.tune.make_record import calibrated_on
from frozencore.tune.many.folder import refuse_differing
from frozencore.tune.methods import Targets


def adapt_for_all(
    config: RunConfig, inputs: Inputs, targets: Targets, out: Path, model_hash: str, progress: Progress
) -> Adapted:
    """Add the adapter of all tenants to the model, and save its basis in ``out/basis`` if it has no name yet.

    A resumed run loads that basis. ``out/tenants.json`` says what the basis was made of: it is written before the
    basis, and again after it with the calibration that the tenants' records tell.

    Raises:
        ArtifactError: ``out/basis`` is another one, of a run with other options or rows.
    """
    if config.method.basis is not None:
        return adapt(config.method, inputs, targets, progress)
    of = adapter_identity(config.method, targets, {"model": model_hash, **inputs.rows.fingerprints})
    identity = json.loads(json.dumps(of))
    folder, file = out / BASIS, out / MANIFEST
    made = _read_manifest(file)
    if made is not None:
        refuse_differing(str(file), made["identity"], identity)
    elif folder.exists():
        raise ArtifactError(
            f"Tenants train on the basis that their options give, but {folder} is that of another run. Choose "
            "another --out, or name that basis with --basis."
        )
    if made is not None and "basis" in made:
        return _load(config, inputs, targets, folder, made, progress)
    adapted = adapt(config.method, inputs, targets, progress)
    if not adapted.model.peft_config["default"].initial_step:  # else each core is saved with its own basis
        write_json(file, {"identity": identity})
        said = calibrated_on(config.method, config.rows, inputs.rows, adapted.calibration)
        save_basis(adapted.model, folder, calibrated_on=said, overwrite=True)
        content = {
            "identity": identity,
            "basis": basis_fingerprint(adapted.model),
            **calibration_content(adapted),
        }
        write_json(file, content)
    return adapted


def _load(
    config: RunConfig, inputs: Inputs, targets: Targets, folder: Path, made: Mapping[str, Any], progress: Progress
) -> Adapted:
    """Add the adapter on the saved basis, with the numbers and warnings of its calibration."""
    on_basis = config.method.model_copy(update={"basis": str(folder)})
    adapted = adapt(on_basis, inputs, targets, progress)
    refuse_differing(str(folder), {"hash of basis": made["basis"]}, {"hash of basis": basis_fingerprint(adapted.model)})
    return with_calibration(adapted, made)


def _read_manifest(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        made = dict(json.loads(file.read_text(encoding="utf-8")))
        dict(made["identity"])
        CALIBRATION_TYPE.validate_python(made.get("calibration"), strict=False)
        if "basis" in made:
            float(made["time_s"]), list(made["warnings"])
        return made
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{file} is damaged ({one_line(error, 120)}). Choose another --out.") from error
