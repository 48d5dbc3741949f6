"""PEFT's own methods: each is a PEFT configuration, seeded by the run."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from frozencore.constructors.basis_options import trained_values
from frozencore.errors import ConfigError
from frozencore.tune.methods.method import AdapterOptions, Budget, Method, targeted_layers

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FromPEFT(Method):
    """A method of PEFT at the rank and on the targets of frozen cores, in float32 also on a 16-bit base."""

    @abstractmethod
    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        """The configuration for PEFT."""

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """Add the adapter; the global random state is restored."""
        import torch
        from peft import get_peft_model

        if options.rank < 1:
            raise ConfigError(f"A rank must be at least 1, got {options.rank}.")
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            try:
                return get_peft_model(model, self.config(options, model))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"The targets {options.targets!r} cannot carry {self.label}: {error}") from error


def as_peft_takes(options: AdapterOptions) -> str | list[str]:
    """The targets in the form of a PEFT configuration."""
    return options.targets if isinstance(options.targets, str) else list(options.targets)


@dataclass(frozen=True, kw_only=True)
class LoRA(FromPEFT):
    """LoRA, and DoRA with ``use_dora``, which also trains a magnitude for each output.

    Scale 1 (``lora_alpha = r``) and no dropout. The factors are about ``r (m + n)`` values a layer, where a core has
    ``r r``, and train with smaller steps.
    """

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True

    unread: ClassVar[tuple[str, ...]] = ("refresh_cost", "refresh_memory")

    @property
    def adds_up(self) -> bool:
        """True for plain factors: their sum is a LoRA of higher rank (:mod:`frozencore.tune.training.lora_rounds`)."""
        return not self.use_dora and self.initialisation is True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig

        return LoraConfig(
            r=options.rank,
            lora_alpha=options.rank,
            lora_dropout=0.0,
            bias="none",
            target_modules=as_peft_takes(options),
            init_lora_weights=self.initialisation,
            use_dora=self.use_dora,
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, kw_only=True)
class PiSSA(LoRA):
    """LoRA whose factors start as the leading part of every base weight, which is subtracted from the weight.

    This changes the base model in place, so the factors alone do not fit the original model. The saved adapter is
    therefore the difference from the start: a plain LoRA of twice the rank, which loads on the original weights.
    """

    initialisation: ClassVar[Literal[True, "pissa"]] = "pissa"
    changes_base: ClassVar[bool] = True

    def keep_start(self, model: PeftModel, folder: Path) -> None:
        model.save_pretrained(str(folder))

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        with warnings.catch_warnings():  # PEFT warns to convert although it converts here
            warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
            model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))


@dataclass(frozen=True, kw_only=True)
class IA3(FromPEFT):
    """(IA)³ (Liu et al., 2022): a factor for every output of a layer; all start at one.

    A feed-forward block's last projection is scaled at its inputs, as in the paper, if PEFT knows the architecture. The
    method has no rank: the targets determine the number of trained values.
    """

    unread: ClassVar[tuple[str, ...]] = ("rank",)

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import IA3Config
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as KNOWN

        last = KNOWN.get(cast(Any, model).config.model_type, [])
        if options.targets != "all-linear":
            last = [target for target in options.targets if target.rpartition(".")[2] in last]
        return IA3Config(target_modules=as_peft_takes(options), feedforward_modules=last, task_type="CAUSAL_LM")


@dataclass(frozen=True, kw_only=True)
class VeRAVectors(FromPEFT):
    """VeRA (Kopiczko et al., 2024): two vectors a layer around one random pair of factors for all layers.

    A layer of m outputs trains ``r + m`` values. The random factors come from the run's seed and are saved too, as is
    PEFT's default. The constructor ``vera`` uses the same random pair and trains a core.
    """

    frozen_can_be_made_again: ClassVar[bool] = True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import VeraConfig

        return VeraConfig(
            r=options.rank,
            projection_prng_key=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )


TINYLORA_VALUES = 64  # PEFT's default


@dataclass(frozen=True, kw_only=True)
class TinyLoRA(FromPEFT):
    """TinyLoRA (arXiv 2602.04118): a short vector a layer, spread by fixed random matrices over a core of r².

    The core is between the leading singular vectors of the weight, as in LoRA-XS; the paper uses r = 2. A budget is
    shared equally by the layers; with fewer values than layers, all layers share one vector.
    """

    budget: ClassVar[Budget | None] = "beside the rank"
    frozen_can_be_made_again: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import TinyLoraConfig

        length, tied = TINYLORA_VALUES, False
        if options.rank_budget is not None:
            budget = trained_values(options.rank_budget)
            num_layers = max(1, len(targeted_layers(model, options.targets)))
            tied = budget < num_layers
            length = budget if tied else budget // num_layers
        return TinyLoraConfig(
            r=options.rank,
            u=length,
            weight_tying=float(tied),
            projection_seed=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )


UNILORA_LENGTH = 256  # PEFT's default


@dataclass(frozen=True, kw_only=True)
class UniLoRA(FromPEFT):
    """Uni-LoRA (arXiv 2506.00799): every entry of every LoRA factor is an entry of one short vector.

    The assignment is drawn once from the seed, so the number of trained values does not depend on rank, layers or
    model. A budget is the length of the vector.
    """

    budget: ClassVar[Budget | None] = "beside the rank"

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import UniLoraConfig

        return UniLoraConfig(
            r=options.rank,
            theta_d_length=UNILORA_LENGTH if options.rank_budget is None else trained_values(options.rank_budget),
            proj_seed=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, kw_only=True)
class PromptTuning(FromPEFT):
    """Prompt tuning (Lester et al., 2021): the embeddings of virtual tokens before every row train.

    They start as embeddings of random tokens of the vocabulary, the better of the paper's starts without text. The
    method has no targets. Its rank is the number of virtual tokens; a budget gives as many tokens as fit.
    """

    unread: ClassVar[tuple[str, ...]] = ("targets", "layers", "padding_free")
    budget: ClassVar[Budget | None] = "instead of the rank"

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import PromptTuningConfig

        num_tokens = options.rank
        if options.rank_budget is not None:
            width = cast(Any, model).get_input_embeddings().embedding_dim
            num_tokens = trained_values(options.rank_budget) // width
            if num_tokens < 1:
                raise ConfigError(
                    f"A virtual token of this model is {width} values, but the budget is {options.rank_budget}: give "
                    f"--rank-budget {width} or more."
                )
        return PromptTuningConfig(
            num_virtual_tokens=num_tokens, prompt_tuning_init="SAMPLE_VOCAB", task_type="CAUSAL_LM"
        )
