"""Put several saved adapters on one base model in turn; the base model is loaded once and not changed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved.state import UncalibratedWarning, read_folder
from frozencore.errors import ArtifactError
from frozencore.tune.scoring.forward import take_off
from frozencore.words import one_line

BASE = "base"


class BaseWithAdapter:
    """A base model with at most one adapter at a time: frozen cores, LoRA, or another PEFT method."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self._adapted: PeftModel | None = None

    def without_adapter(self) -> nn.Module:
        if self._adapted is not None:
            self.base, self._adapted = take_off(self._adapted), None
        return self.base

    def with_adapter(self, folder: Path | None) -> nn.Module:
        """The base model with the adapter saved in a folder, in evaluation mode; None gives the base model alone.

        Raises:
            ArtifactError: There is no adapter, it is damaged or a pickle, or it does not fit this base.
        """
        if folder is None:
            return self.without_adapter()
        if not (folder / "adapter_config.json").is_file():
            raise ArtifactError(
                f"--adapter {folder} must be a folder of save_pretrained, but has no adapter_config.json."
            )
        read_folder(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # missing tensors raise an error below
                warnings.simplefilter("always", UncalibratedWarning)
                base = self.without_adapter()
                config = _read_config(folder)
                if config.is_prompt_learning:  # it shifts every position
                    raise ArtifactError(
                        f"--adapter {folder} holds virtual tokens ({config.peft_type}), which are not scored here. "
                        "Give an adapter that changes layers."
                    )
                self._adapted = PeftModelForCausalLM(base, config)
                found = self._adapted.load_adapter(str(folder), adapter_name="default")
        except ArtifactError:
            raise
        except Exception as error:  # PEFT and safetensors raise many kinds of errors for a folder that does not fit
            reason = one_line(error, 200)
            raise ArtifactError(f"--adapter {folder} does not go on this base model: {reason}") from error
        odd = [*found.missing_keys, *found.unexpected_keys]
        if odd:
            raise ArtifactError(
                f"--adapter {folder} must fit this base model tensor by tensor, but {len(found.missing_keys)} tensors "
                f"are missing and {len(found.unexpected_keys)} have no layer, for instance {odd[0]}. "
                f"Give the base model that it was trained on."
            )
        return self._adapted.eval()


def adapter_names(folders: list[Path]) -> list[str]:
    """A short unique name for each adapter folder, from the last parts of its path.

    ``runs/a/adapter`` and ``runs/b/adapter`` become ``a`` and ``b``. No name equals the base model's.

    Raises:
        ArtifactError: A folder comes twice, or two differ only in upper and lower case.
    """
    whole = [Path(os.path.abspath(folder)).parts for folder in folders]  # resolves `..` but not links
    parts = [[part for part in own if part != "adapter"] or ["adapter"] for own in whole]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["-".join(own[-length:]).strip("/") for own in parts]
        if len({BASE, *map(str.casefold, names)}) == len(names) + 1:  # some file systems ignore case
            return names
    if not folders:
        return []
    raise ArtifactError("Two --adapter options name the same folder, or differ in case only. Give each once.")


def _read_config(folder: Path) -> PeftConfig:
    """Read the configuration; a local frozen core is checked as a whole first."""
    config = PeftConfig.from_pretrained(str(folder))
    if isinstance(config, FrozenCoreConfig):
        config = FrozenCoreConfig.from_pretrained(str(folder))
    config.inference_mode = True
    return config
