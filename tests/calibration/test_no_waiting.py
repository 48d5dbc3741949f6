"""A pass asks the device for no value before it is over: a model without storage, which has none, goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frozencore import CalibrationOptions, collect_moments
from frozencore.calibration.taps import FiniteBatches, LayerRecorder
from frozencore.errors import CalibrationError
from frozencore.maths.moments import MOMENT_NAMES
from tiny import ATTENTION, batches_of, draw_examples, tiny_qwen2

EXAMPLES = draw_examples(num_examples=8, seed=3)
BATCHES = batches_of(EXAMPLES, 4)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if name.endswith(ATTENTION)}


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens": "completion", "weighting": "token_sum"}, {"skip_first": 2}],
    ids=["default", "completion", "skip"],
)
def test_a_pass_reads_nothing_off_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(FiniteBatches, "look", lambda self: looked.append(len(self.waiting)))
    model = tiny_qwen2().to("meta")
    model.set_attn_implementation("eager")  # the other one's mask asks on the way whether there is padding
    moments = collect_moments(
        model, BATCHES, layers_of(model), needs=frozenset(MOMENT_NAMES), options=CalibrationOptions(**options)
    )
    assert looked == [2 * len(BATCHES)]  # once, behind all batches: the flags of both sides of each
    here = tiny_qwen2()
    counted = collect_moments(here, BATCHES, layers_of(here), options=CalibrationOptions(**options))
    assert {name: layer.num_tokens for name, layer in moments.items()} == {
        name: layer.num_tokens for name, layer in counted.items()
    }


def test_flags_that_wait_name_the_first_batch_and_the_layer_that_met_it_first() -> None:
    """As they would on a device, where they are looked at together."""

    def recorder(name: str, fine: bool) -> LayerRecorder:
        found = LayerRecorder(name, None)
        found.input_finite, found.error_finite = torch.tensor(fine), torch.tensor(True)
        return found

    waiting, seen = FiniteBatches(), [(True, True, True), (True, False, False), (False, True, True)]

    def add_all() -> None:
        for index, fine in enumerate(seen):
            waiting.add(index, {name: recorder(name, one) for name, one in zip("abc", fine, strict=True)})

    with pytest.raises(CalibrationError, match=r"input of layer 'b' in calibration batch 1 \(2 of 3 layers\)"):
        add_all()
