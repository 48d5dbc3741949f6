"""What a user says about a frozen-core adapter, and PEFT's registration of the method."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from frozencore.adapter.card import CARD_FILE, write_model_card
from frozencore.adapter.layer import PREFIX
from frozencore.constructors import BasisOptions, Constructor, find_constructor
from frozencore.errors import ConfigError
from frozencore.whitening import Whitening


class FrozenCoreType(str, Enum):  # noqa: UP042 - PEFT formats the type with str(), which StrEnum changes
    """PEFT's own enum of methods is closed; a str enum whose name equals its value passes for a member."""

    FROZENCORE = "FROZENCORE"


@dataclass
class FrozenCoreConfig(PeftConfig):
    """Configuration of a frozen-core adapter: ``y = (W + s·P R Qᵀ) x`` with only R (r x r) trained.

    Args:
        r: Rank; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        target_modules: Module names, a regular expression, or ``"all-linear"``; by default the attention projections.
        constructor: How P and Q are chosen: ``fcca``, ``rawgrad``, ``filora``, ``milora``, ``lora_xs``, ``vera``,
            ``eva``, ``random`` or ``signgrad``.
        alpha: The scale is ``s = alpha / r``; None means ``s = 1``.
        whiten, fisher, shrinkage, damping: Metric of ``fcca``, see :class:`frozencore.whitening.Whitening`.
        coordinates: ``qr`` (default), ``polar``, or the ablations ``raw`` and ``scaled_raw``.
        svd_method: ``auto``, ``gram``, ``randomized`` or ``full``.
        filora_fisher: ``dense`` eigenvectors or ``diagonal`` coordinate selection.
        eva_center, eva_output: Variants of ``eva``.
        initial_step: With ``signgrad``: start from the core of one sign step of this size; 0 starts from zero.
        seed: Seed of random directions.
        rank_pattern, alpha_pattern: Ranks and alphas of layers whose name matches a key.
        exclude_modules, layers_to_transform, layers_pattern, modules_to_save: As in ``LoraConfig``.
        trainable_token_indices, ensure_weight_tying: As in ``LoraConfig``.
        init_weights: False starts from cores drawn from torch's global generator instead of zero, so that an untrained
            adapter changes the output: for trying out serving and switching, not for training.
        calibration_tokens: Written by ``calibrate``: how many tokens the bases were computed from.
        load_bases: Written by ``save_pretrained``: P and Q are in the file, so none is built.
    """

    r: int = 16
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    constructor: str = "fcca"
    alpha: float | None = None
    whiten: str = "both"
    fisher: str = "diagonal"
    shrinkage: float = 0.0
    damping: float | list[float] = 1e-3
    coordinates: str = "qr"
    svd_method: str = "auto"
    filora_fisher: str = "dense"
    eva_center: bool = False
    eva_output: str = "weight_times_input"
    initial_step: float = 0.0
    seed: int = 0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    init_weights: bool = True
    calibration_tokens: int | None = None
    load_bases: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = FrozenCoreType.FROZENCORE
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]  # PEFT compares sets
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` cannot be used when `target_modules` is a str. Pass a list of module names, or put the "
                    "layers into the regular expression."
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError(
                "When `layers_pattern` is specified, `layers_to_transform` must also be specified. "
                "It says which of the layers that the pattern counts are adapted."
            )
        if self.initial_step and self.constructor != "signgrad":
            raise ConfigError(f"initial_step belongs to the constructor 'signgrad', but {self.constructor!r} came.")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if alpha is not None and not (isinstance(alpha, int | float) and 0 < alpha < float("inf")):
                raise ConfigError(f"alpha must be positive and finite, but {alpha!r} came.")
        for rank in (self.r, *self.rank_pattern.values()):
            self.basis_options(rank)  # refuses bad values now, not in the middle of a calibration

    @property
    def constructor_entry(self) -> Constructor:
        """The row of the constructor table."""
        return find_constructor(self.constructor)

    @property
    def needs_calibration(self) -> bool:
        """Whether P and Q come from data, so that ``frozencore.calibrate`` must run before training."""
        return self.constructor_entry.needs_data(self.basis_options())

    def basis_options(self, rank: int | None = None) -> BasisOptions:
        """The options of the constructors, checked; ``rank`` overrides r for one layer."""
        find_constructor(self.constructor)
        damping = tuple(self.damping) if isinstance(self.damping, list) else self.damping
        return BasisOptions(
            rank=self.r if rank is None else rank,
            whitening=Whitening(
                sides=self.whiten,  # type: ignore[arg-type]  # a user's string, checked there
                fisher=self.fisher,  # type: ignore[arg-type]
                shrinkage=self.shrinkage,
                damping=damping,  # type: ignore[arg-type]
            ),
            coordinates=self.coordinates,  # type: ignore[arg-type]
            svd_method=self.svd_method,  # type: ignore[arg-type]
            filora_fisher=self.filora_fisher,  # type: ignore[arg-type]
            eva_center=self.eva_center,
            eva_output=self.eva_output,  # type: ignore[arg-type]
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """What is saved: as PEFT does, with sets in order and the note that the bases are in the file beside it."""
        saved = {**super().to_dict(), "load_bases": True}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in saved.items()}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As PEFT does; then fills in the card that PEFT has left empty, where there is one.

        Warns if the weights that were written before it hold no basis: an adapter that was never calibrated.
        """
        super().save_pretrained(str(save_directory), **kwargs)
        if _holds_no_basis(Path(save_directory) / SAFETENSORS_WEIGHTS_NAME):
            warnings.warn(
                f"The adapter saved in {save_directory} was never calibrated: its bases are zero and it changes "
                "nothing. Call frozencore.calibrate(model, dataloader) and save it again.",
                stacklevel=3,
            )
        if (Path(save_directory) / CARD_FILE).exists():
            write_model_card(save_directory)


def _holds_no_basis(path: Path) -> bool:
    """Whether an adapter file has factors that are still zero; all layers get theirs at once, so one tells."""
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        first = next((key for key in file.keys() if f".{PREFIX}P" in key), None)  # noqa: SIM118 - not a mapping
        return first is not None and not bool(file.get_tensor(first).any())
