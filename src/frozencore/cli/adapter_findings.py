"""What is found in an adapter, in a basis, in a basis model and in a LoRA, where a glance does not settle it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frozencore.adapter.directory import read_adapter
from frozencore.adapter.export.basis_in_model import identity_of, read_bases, read_entry
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.adapter.export.serving.tensor_rules import no_tenant
from frozencore.adapter.seal.integrity import read_folder
from frozencore.adapter.seal.saved_basis import load_basis
from frozencore.cli.adapter_lines import SeenAdapter, SeenBasis, other_method
from frozencore.cli.findings import Finding
from frozencore.errors import FrozenCoreError
from frozencore.one_line import one_line


def adapter(path: Path) -> Iterator[Finding]:
    """Weights, bases, seal and base model of a frozen core."""
    try:
        config, factors = read_adapter(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
        return
    seal = config.seal or {}
    yield from SeenAdapter(
        num_layers=len(factors),
        num_values=sum(f.R.numel() for f in factors.values()),
        constructor=config.constructor,
        coordinates=config.coordinates,
        calibrated=any(bool(f.P.any()) for f in factors.values()),
        sealed=bool(seal.get("weights_sha256")),
        basis_id=config.basis_id,
        base_model=config.base_model_name_or_path,
        base_recorded=bool(seal.get("base")),
    ).findings()


def basis(path: Path) -> Iterator[Finding]:
    """Factors, identity and base model of a basis in a folder of its own."""
    try:
        found = load_basis(path)
    except FrozenCoreError as error:
        yield Finding("factors and header", one_line(error), sound=False)
        return
    yield from SeenBasis(
        len(found.layers),
        found.identity,
        found.options.get("constructor"),
        found.calibrated_on,
        found.base_model,
        bool(found.base),
    ).findings()


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
        yield other_method(values.get("peft_type"), len(tensors))
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
