"""A basis for every adapter the moment it is injected: PEFT's tests know of no calibration.

The moments come from seeded random activations and output errors of each layer's shape, not from the test's model:
most of the tests' models have no loss to differentiate. From there on it is what a user gets:
``frozencore.calibrate(model, moments=...)``.
"""

from __future__ import annotations

from typing import Any

import torch

from frozencore import FrozenCoreModel, LayerMoments, calibrate, frozen_core_layers

NUM_TOKENS = 64


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
        if config.needs_calibration and not config.load_bases and not on_meta:
            moments = {name: seeded_moments(layer.out_features, layer.in_features) for name, layer in layers.items()}
            calibrate(self, adapter_name=adapter_name, moments=moments, progress=False)

    tuner.inject_adapter = injected  # type: ignore[method-assign]
