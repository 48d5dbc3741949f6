"""What is said of an adapter and of a basis that are sound, whoever has looked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frozencore.cli.findings import Finding


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
