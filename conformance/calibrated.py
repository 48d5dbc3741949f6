"""A basis for every adapter the moment it is injected: PEFT's tests know of no calibration.

Language models (decoders and encoder-decoders) get the real pass, ``frozencore.calibrate(model, batches)``, on seeded
token ids. Models without a language-model loss get moments of seeded random activations and output errors of each
layer's shape, through ``frozencore.calibrate(model, moments=...)``: the same code from there on.
"""

from __future__ import annotations

from typing import Any

import torch

from frozencore import FrozenCoreModel, LayerMoments, calibrate, frozen_core_layers

NUM_TOKENS = 64
# The quantisation tests lay one adapter on a quantised and on a plain model. Bases calibrated on each would differ, as
# they should; equal moments give both the same.
SAME_MOMENTS = "peft-internal-testing/opt-125m"
BATCHES = [
    {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for ids in torch.randint(3, 90, (2, 4, 8), generator=torch.Generator().manual_seed(0))
]


def seeded_moments(num_out: int, num_in: int) -> LayerMoments:
    generator = torch.Generator().manual_seed(num_out * 10_007 + num_in)
    x = torch.randn(NUM_TOKENS, num_in, generator=generator)
    error = torch.randn(NUM_TOKENS, num_out, generator=generator)
    return LayerMoments(
        num_tokens=NUM_TOKENS,
        cross=error.mT @ x,
        input_square=x.square().sum(0),
        error_square=error.square().sum(0),
    )


def basis_at_injection(tuner: type[FrozenCoreModel]) -> None:
    """Calibrate what ``inject_adapter`` adds, unless its bases come from a file or its tensors are still on meta."""
    inject = tuner.inject_adapter

    def injected(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        inject(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        layers = frozen_core_layers(model, adapter_name)
        on_meta = any(layer.factors(adapter_name)[2].is_meta for layer in layers.values())
        if not config.needs_calibration or config.load_bases or on_meta:
            return
        if all(bool(layer.factors(adapter_name)[0].any()) for layer in layers.values()):
            return  # another adapter of the same configuration lent its bases
        can_generate = getattr(model, "can_generate", None)
        if can_generate is not None and can_generate() and model.name_or_path != SAME_MOMENTS:
            calibrate(self, BATCHES, adapter_name=adapter_name, progress=False)
        else:
            moments = {name: seeded_moments(layer.out_features, layer.in_features) for name, layer in layers.items()}
            calibrate(self, adapter_name=adapter_name, moments=moments, progress=False)

    tuner.inject_adapter = injected  # type: ignore[method-assign]
