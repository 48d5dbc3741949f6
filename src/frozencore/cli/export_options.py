"""What ``frozencore export`` may be asked for; checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from frozencore.cli.options import DTYPE_NAMES, require_name
from frozencore.errors import ConfigError

FORMS = ("lora", "gguf-lora", "merged", "basis-model", "tenant")


@dataclass(frozen=True)
class Wanted:
    """What ``frozencore export`` was asked for; checked when made.

    Attributes:
        base: Folder, GGUF file or hub id of the base model; of a tenant, the folder of its basis model.
        rank: Of a LoRA; by default the adapter's own.
        with_code: Put the architecture's code into a basis model.

    Raises:
        ConfigError: An unknown form or dtype, or an option of another form.
    """

    to: str = "lora"
    base: str | None = None
    dtype: str = "auto"
    rank: int | None = None
    with_code: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        require_name("export", self.to, FORMS)
        require_name("dtype", self.dtype, DTYPE_NAMES)
        if self.rank is not None and self.to not in ("lora", "gguf-lora"):
            raise ConfigError(f"--rank is of a LoRA, and --to {self.to} has none: leave it out, or --to lora.")
        if self.with_code and self.to != "basis-model":
            raise ConfigError(f"--with-code is of a basis model, and --to {self.to} has no code: leave it out.")
