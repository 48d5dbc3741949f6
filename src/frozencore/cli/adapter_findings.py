"""What is found in an adapter, in a basis, in a basis model and in a LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frozencore.adapter.directory import read_adapter
from frozencore.adapter.export.basis_in_model import identity_of, read_bases, read_entry
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.adapter.export.serving.tensor_rules import no_tenant
from frozencore.adapter.seal.integrity import CONFIG_FILE, read_folder
from frozencore.adapter.seal.saved_basis import load_basis
from frozencore.cli.findings import Finding, inside
from frozencore.errors import FrozenCoreError
from frozencore.lab.run.files import ADAPTER, BASIS
from frozencore.one_line import one_line


def adapter(path: Path) -> Iterator[Finding]:
    """Weights, bases, seal and base model of a frozen core; of a folder with an adapter in it, that one."""
    if not (path / CONFIG_FILE).exists() and (path / ADAPTER / CONFIG_FILE).is_file():
        yield from beside(path)
        return
    try:
        config, factors = read_adapter(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
        return
    num_values = sum(f.R.numel() for f in factors.values())
    yield Finding("weights and configuration", f"{len(factors)} layers, {num_values:,} trained values, all finite")
    calibrated = any(bool(f.P.any()) for f in factors.values())
    yield Finding(
        "bases",
        f"of {config.constructor}, in {config.coordinates} coordinates"
        if calibrated
        else "zero: it was never calibrated and changes nothing. Call frozencore.calibrate and save it again.",
        calibrated,
    )
    seal = config.seal or {}
    yield Finding(
        "seal", "hashes agree" if seal.get("weights_sha256") else "none: changes since it was saved go unseen"
    )
    if config.basis_id is not None:
        yield Finding("basis", f"{config.basis_id[:12]}, found; it records the base model")
        return
    base = f"made on {config.base_model_name_or_path or 'a model without a name'}"
    yield Finding("base model", f"{base}, {'recorded' if seal.get('base') else 'not recorded: any of its shape fits'}")


def beside(path: Path) -> Iterator[Finding]:
    """The adapter and the basis in a folder of ``frozencore calibrate``."""
    yield from inside(path / ADAPTER, "adapter", adapter)
    if (path / BASIS).is_dir():
        yield from inside(path / BASIS, "basis", basis)


def basis(path: Path) -> Iterator[Finding]:
    """Factors, identity and base model of a basis in a folder of its own."""
    try:
        found = load_basis(path)
    except FrozenCoreError as error:
        yield Finding("factors and header", one_line(error), sound=False)
        return
    yield Finding("factors and header", f"{len(found.layers)} layers, all finite; hashes agree")
    of = f", calibrated on {found.calibrated_on}" if found.calibrated_on else ""
    yield Finding("identity", f"{found.identity[:12]}, of {found.options.get('constructor')}{of}")
    base = f"made on {found.base_model or 'a model without a name'}"
    yield Finding("base model", f"{base}, {'recorded' if found.base else 'not recorded: any of its shape fits'}")


def basis_model(path: Path) -> Iterator[Finding]:
    """The layers and the identity of the basis in a base model."""
    try:
        entry, layers = read_entry(path), read_bases(path)
    except FrozenCoreError as error:
        yield Finding("configuration and weights", one_line(error), sound=False)
        return
    yield Finding("configuration and weights", f"{len(layers)} layers with a basis, all finite")
    same = identity_of(layers) == entry["identity"]
    yield Finding(
        "identity",
        entry["identity"][:12] if same else "P and Q are not those that it was written with: export it again",
        same,
    )


def lora(path: Path) -> Iterator[Finding]:
    """A LoRA and who would serve it."""
    try:
        read_folder(path)
        report = check_lora_directory(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
        return
    engines = ", ".join(report.engines) or "no engine"
    tenant = ", on its basis model: it is a tenant" if report.is_tenant else ""
    yield Finding("weights and configuration", f"rank {report.rank}; taken by {engines}{tenant}")
    for problem in report.problems:
        if problem.rule != no_tenant.__name__:
            yield Finding(problem.rule, str(problem), sound=False)


def baseline(path: Path) -> Iterator[Finding]:
    """The adapter of another method, as far as its file tells."""
    try:
        values, tensors = read_folder(path)
        yield Finding("weights and configuration", f"{values.get('peft_type')}, {len(tensors)} tensors, all finite")
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
