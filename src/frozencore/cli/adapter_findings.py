"""What is found in an adapter, in a basis, in a basis model and in a LoRA: what their readers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frozencore.adapter.export.basis_in_model import identity_of, read_bases, read_entry
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.adapter.export.serving.tensor_rules import no_tenant
from frozencore.adapter.saved.basis import load_basis
from frozencore.adapter.saved.folder import read_adapter
from frozencore.adapter.saved.seal import read_folder
from frozencore.cli.findings import Finding, inside
from frozencore.errors import FrozenCoreError
from frozencore.files.adapter_folder import CONFIG_FILE
from frozencore.tune.run.files import ADAPTER, BASIS
from frozencore.words import one_line


@dataclass(frozen=True)
class SeenAdapter:
    """What was seen of a frozen core.

    Attributes:
        sealed: Whether hashes of its tensors were recorded, with which they agree.
        basis_id: Of the basis that cores alone are on.
        base_model: Its name; ``base_recorded``: whether values of its weights are.
    """

    num_layers: int
    num_values: int
    constructor: str
    coordinates: str
    calibrated: bool
    sealed: bool
    basis_id: str | None
    base_model: str | None
    base_recorded: bool

    def findings(self) -> Iterator[Finding]:
        """Weights, bases, seal and base model."""
        said = f"{self.num_layers} layers, {self.num_values:,} trained values, all finite"
        yield Finding("weights and configuration", said)
        of = f"of {self.constructor}, in {self.coordinates} coordinates"
        never = "zero: it was never calibrated and changes nothing. Call frozencore.calibrate and save it again."
        yield Finding("bases", of if self.calibrated else never, self.calibrated)
        yield Finding("seal", "hashes agree" if self.sealed else "none: changes since it was saved go unseen")
        if self.basis_id is not None:
            yield Finding("basis", f"{self.basis_id[:12]}, found; it records the base model")
        else:
            yield _base_model(self.base_model, recorded=self.base_recorded)


@dataclass(frozen=True)
class SeenBasis:
    """What was seen of a basis in a folder of its own."""

    num_layers: int
    identity: str
    constructor: str | None
    calibrated_on: str | None
    base_model: str | None
    base_recorded: bool

    def findings(self) -> Iterator[Finding]:
        """Factors, identity and base model."""
        yield Finding("factors and header", f"{self.num_layers} layers, all finite; hashes agree")
        of = f", calibrated on {self.calibrated_on}" if self.calibrated_on else ""
        yield Finding("identity", f"{self.identity[:12]}, of {self.constructor}{of}")
        yield _base_model(self.base_model, recorded=self.base_recorded)


def other_method(kind: object, num_tensors: int) -> Finding:
    """Of the adapter of another PEFT method, as far as its file tells."""
    return Finding("weights and configuration", f"{kind}, {num_tensors} tensors, all finite")


def _base_model(name: str | None, *, recorded: bool) -> Finding:
    made_on = f"made on {name or 'a model without a name'}"
    return Finding("base model", f"{made_on}, {'recorded' if recorded else 'not recorded: any of its shape fits'}")


def adapter(path: Path) -> Iterator[Finding]:
    """Weights, bases, seal and base model of a frozen core, or of one in the folder ``adapter`` of a folder."""
    if not (path / CONFIG_FILE).exists() and (path / ADAPTER / CONFIG_FILE).is_file():
        yield from beside(path)
        return
    try:
        config, factors = read_adapter(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", one_line(error), sound=False)
        return
    seal = config.seal or {}
    yield from SeenAdapter(
        num_layers=len(factors),
        num_values=sum(f.R.numel() for f in factors.values()) // config.rounds,
        constructor=config.constructor,
        coordinates=config.coordinates,
        calibrated=any(bool(f.P.any()) for f in factors.values()),
        sealed=bool(seal.get("weights_sha256")),
        basis_id=config.basis_id,
        base_model=config.base_model_name_or_path,
        base_recorded=bool(seal.get("base")),
    ).findings()


def beside(path: Path) -> Iterator[Finding]:
    """The adapter and the basis in a folder of ``frozencore calibrate``."""
    yield from inside(path / ADAPTER, ADAPTER, adapter)
    if (path / BASIS).is_dir():
        yield from inside(path / BASIS, BASIS, basis)


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
