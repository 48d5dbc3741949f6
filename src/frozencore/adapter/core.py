"""A core: the trained values of all layers on one basis, in memory and in a file.

    frozencore_core_<basis id>          Σr² values: R (r x r) of each layer, in the order of the layers' names

and for values of 8, 4 or 2 bits (:mod:`frozencore.maths.quantise`), which are read as float32,

    frozencore_core_<basis id>          their codes, packed in bytes
    frozencore_core_<basis id>.4-bit    the scale of each layer, float16; its name has the number of bits
    frozencore_core_<basis id>.ranks    r of each layer, int16

One vector has one name, which for Qwen2.5-3B saves 17 KB of names and shapes beside 147 KB of values. Its name has
the id of the basis, so rounding, sums and averages of state dicts keep it, and another basis refuses it. Sums
are exact: on one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ``. Codes have no sum: ``get_peft_model_state_dict`` gives their
values in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.linalg import all_finite
from frozencore.maths.quantise import BITS, largest_level, levels, pack, quantise, unpack

BASE = "base_model.model."
"""PEFT's prefix of names in an adapter's file."""
CORE = "frozencore_core_"
"""The prefix of the name of a core's values; the basis id follows."""


@dataclass(frozen=True, eq=False)
class PackedValues:
    """Values of 8, 4 or 2 bits, as a file stores them.

    Attributes:
        codes: Their codes, packed in bytes.
        scales: The scale of each layer, float16.
        ranks: r of each layer, int16.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    ranks: Tensor

    def __post_init__(self) -> None:
        num_codes = int(self.ranks.long().square().sum())
        if self.codes.shape != (-(-num_codes * self.bits // 8),) or self.scales.shape != self.ranks.shape:
            raise ArtifactError(
                f"{num_codes} codes of {self.bits} bits and a scale for each of {len(self.ranks)} layers make a core, "
                f"but {len(self.codes)} bytes and {len(self.scales)} scales were given. Save or download it again."
            )

    @property
    def values(self) -> Tensor:
        """The levels, float32."""
        sizes = self.ranks.to(self.codes.device).long().square()
        codes = unpack(self.codes, self.bits, int(sizes.sum()))
        return levels(codes, self.scales.to(codes.device).repeat_interleave(sizes), self.bits)


@dataclass(frozen=True, eq=False)
class Core:
    """Finite values of all layers on a basis.

    Attributes:
        basis_id: The id of the basis.
        values: Σr² floats, at least 32 bits wide.
        packed: The same values in fewer bits, if a file stores them so.
    """

    basis_id: str
    values: Tensor
    packed: PackedValues | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or not self.values.is_floating_point():
            raise ArtifactError(
                f"A core is a vector of floats, but {tuple(self.values.shape)} of {self.values.dtype} were given. "
                "Save or download it again."
            )
        wide = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        if not wide.is_meta and not all_finite(wide):
            raise ArtifactError(
                "A core is finite, but NaN or Inf was given. Train again at a lower learning rate, or sum with other "
                "weights."
            )
        object.__setattr__(self, "values", wide)

    @classmethod
    def of(cls, basis_id: str, cores: Mapping[str, Tensor]) -> Core:
        """Join R (r x r) of all layers, on the device of the first."""
        values = [cores[name].detach().reshape(-1) for name in sorted(cores)]
        return cls(basis_id, torch.cat([R.to(values[0].device) for R in values]))

    @classmethod
    def read(cls, origin: str, tensors: Mapping[str, Tensor]) -> Core:
        """Find the core among the tensors of a file or of a state dict.

        Args:
            origin: The file, for the error.
        """
        for key, tensor in tensors.items():
            if is_core_key(key) and "." not in key.removeprefix(BASE):
                basis_id = key.removeprefix(BASE).removeprefix(CORE)
                bits = next((bits for bits in BITS if f"{key}.{bits}-bit" in tensors), None)
                if bits is None:
                    return cls(basis_id, tensor.detach())
                if f"{key}.ranks" not in tensors:
                    raise ArtifactError(f"{origin} is damaged: its core of {bits} bits has no ranks. Save it again.")
                if tensor.dtype != torch.uint8:
                    raise ArtifactError(
                        f"{origin} has the codes of {bits} bits as {tensor.dtype}: codes cannot be cast or averaged. "
                        "Load the adapters and take peft.get_peft_model_state_dict, or sum them by `frozencore merge`."
                    )
                packed = PackedValues(bits, tensor, tensors[f"{key}.{bits}-bit"], tensors[f"{key}.ranks"])
                return cls(basis_id, packed.values, packed)
        raise ArtifactError(f"{origin} has no frozen core. Give a folder that save_pretrained wrote.")

    @property
    def bits(self) -> int:
        """Bits of a value in a file."""
        return 32 if self.packed is None else self.packed.bits

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The values under their names in a file."""
        key = f"{CORE}{self.basis_id}"
        if (few := self.packed) is None:
            return {key: self.values.contiguous()}
        return {key: few.codes, f"{key}.{few.bits}-bit": few.scales, f"{key}.ranks": few.ranks}

    @property
    def num_bytes(self) -> int:
        """Bytes of the values in a file."""
        return sum(X.nbytes for X in self.tensors.values())

    def in_bits(self, bits: int, ranks: Mapping[str, int]) -> Core:
        """The core with each value at its nearest level of 8, 4 or 2 bits; for 32 bits it is as it was.

        Args:
            ranks: As for :meth:`by_layer`.

        Raises:
            ConfigError: Another number of bits, which no file names, or a value is too large for so few.
        """
        if bits not in (32, *BITS):
            raise ConfigError(f"A core has values of {', '.join(map(str, BITS))} or 32 bits, but {bits!r} was given.")
        if bits == self.bits:
            return self
        if bits == 32:
            return Core(self.basis_id, self.values)
        if (largest := float(self.values.abs().max())) > (most := largest_level(bits)):
            raise ConfigError(
                f"A core of {bits} bits has values of {most:.0e} at most, but {largest:.0e} is one of these. Save it "
                "with 32 bits."
            )
        layers, codes, scales = self.by_layer(ranks), dict[str, Tensor](), dict[str, Tensor]()
        for rank in set(ranks.values()):
            alike = [name for name, r in ranks.items() if r == rank]
            quantised = quantise(torch.stack([layers[name].flatten() for name in alike]), bits)
            codes |= zip(alike, quantised[0], strict=True)
            scales |= zip(alike, quantised[1], strict=True)
        packed = PackedValues(
            bits,
            pack(torch.cat([codes[name] for name in ranks]), bits).cpu(),
            torch.stack([scales[name] for name in ranks]),
            torch.tensor(list(ranks.values()), dtype=torch.int16),
        )
        return Core(self.basis_id, packed.values, packed)

    def by_layer(self, ranks: Mapping[str, int]) -> dict[str, Tensor]:
        """R (r x r) of each layer, as views.

        Args:
            ranks: r by layer name, in the order of the names (:attr:`Basis.ranks`).
        """
        self.require_size(sum(r * r for r in ranks.values()))
        return by_layer(self.values, ranks)

    def require_size(self, size: int) -> None:
        """Refuse a core that has another number of values than its basis has room for."""
        if len(self.values) != size:
            raise ArtifactError(f"A core on this basis has {size} values, but {len(self.values)} were given.")


def is_core_key(key: str) -> bool:
    """Whether this is the name of a core's values, or of a part of them."""
    return key.removeprefix(BASE).startswith(CORE)


def by_layer(values: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Split values (..., Σr²) into views (..., r, r), in the order of the ranks."""
    parts = values.split([r * r for r in ranks.values()], dim=-1)
    return {name: part.unflatten(-1, (r, r)) for part, (name, r) in zip(parts, ranks.items(), strict=True)}


def sum_cores(cores: Sequence[Core], names: Sequence[str], weights: Sequence[float] | None) -> Core:
    """The weighted sum of cores on one basis.

    Args:
        names: The name of each core, for the error.
        weights: None is their mean.

    Raises:
        ConfigError: There is no core, the number of weights is wrong, or a weight is not finite.
        ArtifactError: A core is on another basis than the first, or the sum is not finite.
    """
    if not cores:
        raise ConfigError("A sum has one core at least, but none was given.")
    for name, core in zip(names, cores, strict=True):
        if core.basis_id != cores[0].basis_id:
            raise ArtifactError(
                f"Cores are summed on one basis, but {names[0]} is on {cores[0].basis_id} and {name} on "
                f"{core.basis_id}. Sum adapters that were trained on the same basis."
            )
        core.require_size(len(cores[0].values))
    shares = [1 / len(cores)] * len(cores) if weights is None else weights
    if len(shares) != len(cores):
        raise ConfigError(f"A sum of {len(cores)} adapters needs as many weights, but {list(shares)} was given.")
    if odd := [share for share in shares if not isfinite(share)]:
        raise ConfigError(f"The weights of a sum are finite numbers, but {odd[0]} was given.")
    parts = [share * core.values.detach().double() for share, core in zip(shares, cores, strict=True)]
    total = torch.stack(parts).sum(0)
    return Core(cores[0].basis_id, total.to(cores[0].values.dtype))
