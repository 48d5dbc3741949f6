"""Folders of adapters without a model: read once, written with another core, summed.

adapter_model.safetensors   the core, and P and Q if no folder has them (:mod:`frozencore.adapter.state_dict`)
adapter_config.json         the configuration, with the basis id
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from frozencore.adapter.basis import Basis, load_basis, require_same_id
from frozencore.adapter.card import with_scores, with_sizes
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import Core, sum_cores
from frozencore.adapter.state_dict import basis_tensors, layers_in, module_tensors
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.adapter_folder import PEFT_TYPE, damaged, missing, read_config
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.names import CARD_FILE, CONFIG_FILE, HEADER_FILE, PICKLE_FILE, WEIGHTS_FILE
from frozencore.files.tokenizer import copy_tokenizer
from frozencore.text import one_line


@dataclass(frozen=True)
class SavedAdapter:
    """The content of an adapter's folder.

    Attributes:
        basis: P and Q of the file; None if they are in a folder, which :meth:`find_basis` reads.
        modules: The tensors of trained modules and tokens.
    """

    folder: Path
    config: FrozenCoreConfig
    core: Core
    basis: Basis | None
    modules: Mapping[str, Tensor]

    def find_basis(self) -> Basis:
        """The basis: of the file, beside it, or where the configuration names it."""
        return self.basis or self.config.find_basis(str(self.folder))

    @cached_property
    def ranks(self) -> dict[str, int]:
        """r by layer name, in the order of a core's values."""
        return self.find_basis().ranks

    def write(
        self,
        out: Path,
        core: Core,
        *,
        scores: Mapping[str, float | str] | None = None,
        overwrite: bool | None = None,
    ) -> None:
        """Write a new folder with another core on the same basis, and this adapter's configuration, card and tokenizer.

        The configuration names the place where the basis was found, which may have moved since training.

        Args:
            core: Its values are written in its bits.
            scores: Those of the card in place of this adapter's.
            overwrite: As in ``atomic_folder``.
        """
        tensors = {**core.tensors, **self.modules}
        if self.basis is not None:
            tensors |= basis_tensors(self.basis)
        with atomic_folder(out, overwrite=overwrite, reads=[self.folder, self.config.basis]) as aside:
            save_file({key: X.contiguous() for key, X in tensors.items()}, aside / WEIGHTS_FILE, {"format": "pt"})
            config = read_config(self.folder) | ({"basis": self.config.basis} if self.config.basis else {})
            (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            copy_tokenizer(self.folder, aside)
            if (self.folder / CARD_FILE).is_file():
                card = (self.folder / CARD_FILE).read_text(encoding="utf-8")
                if scores is not None:
                    card = with_scores(card, scores)
                num_bytes = (aside / WEIGHTS_FILE).stat().st_size
                (aside / CARD_FILE).write_text(with_sizes(card, core, num_bytes), encoding="utf-8")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the weights of an adapter of any PEFT method: safetensors, mapped, or another method's tensors in a pickle.

    Raises:
        ArtifactError: The file is missing or damaged, has more than tensors, or is a frozen core's pickle.
    """
    file = weights_file(folder)
    try:
        if file.name == WEIGHTS_FILE:
            return load_file(file)
        tensors = dict(torch.load(file, map_location="cpu", weights_only=True))
        for name, X in tensors.items():
            if not (isinstance(name, str) and isinstance(X, Tensor)):
                raise TypeError(f"{name!r:.40} is no name of a tensor")
        return tensors
    except Exception as error:  # torch.load raises many kinds for a damaged file and for one of more than tensors
        raise damaged(folder, error) from error


def weights_file(folder: Path) -> Path:
    """The file with the tensors of an adapter: a pickle only of another method, and if there is no other.

    Raises:
        ArtifactError: There is none.
    """
    file, pickled = folder / WEIGHTS_FILE, folder / PICKLE_FILE
    if file.is_file():
        return file
    if not pickled.is_file() or read_config(folder).get("peft_type") == PEFT_TYPE:
        raise ArtifactError(missing(folder, WEIGHTS_FILE))
    return pickled


def read_adapter(folder: str | Path) -> SavedAdapter:
    """Read a folder that ``save_pretrained`` wrote.

    Raises:
        ArtifactError: A file is missing or damaged, it is another method's, or P and Q do not fit the basis id.
    """
    folder = Path(folder)
    kind = read_config(folder).get("peft_type")
    if kind != PEFT_TYPE:
        raise ArtifactError(
            f"{folder} has a {one_line(kind, 40)} adapter, not a frozen core. Read it with PEFT, or let `frozencore "
            "compress` make a core of it."
        )
    tensors = read_tensors(folder)
    try:
        config = FrozenCoreConfig.from_pretrained(folder)
        assert isinstance(config, FrozenCoreConfig)
        core, beside = Core.read(str(folder), tensors), None
        if layers := layers_in(tensors, config.scale_of):
            beside = config.make_basis(layers, base=config.base_record)
            require_same_id(str(folder), core.basis_id, "P, Q, scales and base record beside it make", beside.id)
    except FrozenCoreError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # values of other types than a file has
        raise damaged(folder, error) from error
    return SavedAdapter(folder, config, core, beside, module_tensors(tensors))


def read_basis(folder: Path) -> Basis:
    """Read the basis in a folder of a basis, or that of an adapter."""
    return load_basis(folder) if (folder / HEADER_FILE).is_file() else read_adapter(folder).find_basis()


def merge_adapters(
    adapters: Sequence[str | Path], out: str | Path, *, weights: Sequence[float] | None = None, bits: int = 32
) -> Path:
    """Write the weighted sum of saved adapters on one basis, in the form of the first.

    Args:
        adapters: Folders of the adapters.
        out: New folder.
        weights: A weight for each adapter; by default 1/K, the mean.
        bits: Bits of a saved value: 32, 8, 4 or 2. The sum itself is computed in float64.

    Raises:
        ConfigError: There is no adapter, the number of weights or of bits is wrong, or modules besides cores were
            trained.
        ArtifactError: Bases differ, the sum is not finite, or a folder cannot be read or written.
    """
    read = [read_adapter(folder) for folder in adapters]
    for saved in read:
        saved.config.require_core_alone(f"the adapter in {saved.folder}", "Only cores are summed")
    core = sum_cores([saved.core for saved in read], [str(saved.folder) for saved in read], weights)
    read[0].write(Path(out), core if bits == 32 else core.in_bits(bits, read[0].ranks), scores={})
    return Path(out)
