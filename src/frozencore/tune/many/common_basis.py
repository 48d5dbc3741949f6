"""The basis of all tenants of a run: a named one, or one that the run calibrates and saves beside its tenants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from frozencore.adapter.bases import basis_fingerprint, save_basis
from frozencore.calibration.calibration_options import options_of_sums
from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import write_json
from frozencore.text import Progress, one_line
from frozencore.tune.adapt import Adapted, adapt
from frozencore.tune.calibration_record import CalibratedAdapter
from frozencore.tune.config import RunConfig, run_options
from frozencore.tune.folder import BASIS, MANIFEST
from frozencore.tune.load import Inputs
from frozencore.tune.make_record import calibrated_on
from frozencore.tune.many.folder import refuse_differing
from frozencore.tune.methods import Targets
from frozencore.tune.record_part import RecordPart


class Manifest(RecordPart):
    """What the basis beside the tenants was made of.

    Attributes:
        identity: The options that determine it, and hashes of the base model and of the calibration rows.
        basis: The hash of the basis; None until it is saved.
        made: The calibration that the tenants' records tell.
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
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{file} is damaged ({one_line(error, 120)}). Choose another --out.") from error


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
    folder, file = out / BASIS, out / MANIFEST
    of_method = {
        name: one for name, one in run_options().items() if one.part == "method" and one.group != "calibration"
    }
    identity = to_jsonable_python(
        {
            **{name: one.value_in(config) for name, one in of_method.items()},
            **options_of_sums(vars(config.method.calibration)),
            "seed": config.method.seed,
            "base model": model_hash,
            "calibration rows": inputs.rows.fingerprints["calibration"],
        }
    )
    before = Manifest.read(file)
    if before is not None:
        refuse_differing(str(file), before.identity, identity)
    elif folder.exists():
        raise ArtifactError(
            f"Tenants train on the basis that their options give, but {folder} is that of another run. Choose "
            "another --out, or name that basis with --basis."
        )
    if before is not None and before.made is not None:
        on_basis = config.method.model_copy(update={"basis": str(folder)})
        adapted = adapt(on_basis, inputs, targets, progress)
        found = {"hash of basis": basis_fingerprint(adapted.model)}
        refuse_differing(str(folder), {"hash of basis": before.basis}, found)
        return replace(adapted, made=before.made)
    adapted = adapt(config.method, inputs, targets, progress)
    if not adapted.model.peft_config["default"].initial_step:  # else each core is saved with its own basis
        write_json(file, Manifest(identity=identity).content())
        said = calibrated_on(config.method, config.rows, inputs.rows, adapted.made.calibration)
        save_basis(adapted.model, folder, calibrated_on=said, overwrite=True)
        whole = Manifest(identity=identity, basis=basis_fingerprint(adapted.model), made=adapted.made)
        write_json(file, whole.content())
    return adapted
