"""Full fine-tuning through PEFT's ``modules_to_save``: copies of the targets train; the base model is not changed.

On a 16-bit model the copies are float32, and their inputs and outputs keep the model's dtype. PEFT loads a saved copy
in the dtype of the original module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from frozencore.errors import ConfigError
from frozencore.tune.methods.from_peft import FromPEFT
from frozencore.tune.methods.method import AdapterOptions, Targets, targeted_layers

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn


FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class FullFineTuning(FromPEFT):
    """Train every weight of the model, including embeddings and norms, or the weights and biases of named targets.

    The saved adapter is as large as they are.
    """

    unread: ClassVar[tuple[str, ...]] = ("rank",)

    def default_targets(self, model: nn.Module) -> Targets:
        """Every module with its own parameters; for tied embeddings the input embedding."""
        head = cast(Any, model).get_output_embeddings()
        names = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
        return tuple(
            name for name in names if model.get_submodule(name) is not head or not _ties_its_embeddings(model, names)
        )

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        from peft.utils import ModulesToSaveWrapper

        adapted = super().add(model, options, bases)
        for module in adapted.modules():
            if isinstance(module, ModulesToSaveWrapper):
                dtype = next(module.original_module.parameters()).dtype
                _train_in_float32(module.modules_to_save["default"], dtype)
        return adapted

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig
        from peft.utils.constants import DUMMY_TARGET_MODULES

        names = targeted_layers(model, options.targets)
        if not names:
            raise ValueError("no linear layer is called so")
        for name in names:
            if not all(parameter.is_floating_point() for parameter in model.get_submodule(name).parameters()):
                raise ConfigError(
                    f"{self.label} trains the weights themselves, but those of {name} are quantised. Load the model "
                    "without quantisation, or train an adapter."
                )
        return LoraConfig(
            target_modules=DUMMY_TARGET_MODULES,
            modules_to_save=names,
            ensure_weight_tying=_ties_its_embeddings(model, names),
            task_type="CAUSAL_LM",
        )


def _train_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module's weights float32; its output keeps the model's dtype, also if tied weights are float32 already."""
    if dtype.itemsize >= FLOAT32_BYTES:
        return
    module.float()
    module.register_forward_pre_hook(lambda _, given: tuple(x.float() if x.is_floating_point() else x for x in given))
    module.register_forward_hook(lambda _, __, result: result.to(dtype))


def _ties_its_embeddings(model: nn.Module, names: list[str]) -> bool:
    """Return whether the output layer shares the input embeddings' weight, and these are among the modules."""
    inputs, outputs = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    is_named = any(model.get_submodule(name) is inputs for name in names)
    return is_named and outputs is not None and outputs.weight is inputs.weight
