"""Values are finite in the dtype in which they are used, or they are refused where they come in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from torch import nn

from adapted import adapted, cores_of, train_at_random
from frozencore import CoreBank, FrozenCoreConfig, load_basis, save_basis, swap_core
from frozencore.errors import ArtifactError, ModelError
from frozencore.tune.evaluation.adapters import BaseWithAdapter
from frozencore.tune.rows import TokenRow
from frozencore.tune.scoring.score import held_out_loss
from tiny import tiny_qwen2

BEYOND_FLOAT16 = 1e5


def scaled(model: nn.Module, side: str, value: float) -> nn.Module:
    with torch.no_grad():
        for layer in cores_of(model):
            getattr(layer, f"frozencore_{side}")["default"].mul_(value)
    return model


@pytest.mark.parametrize("side", ["P", "Q"])
def test_bases_that_a_narrow_model_cannot_hold_are_refused_when_they_are_loaded(side: str, tmp_path: Path) -> None:
    model = scaled(adapted("random", coordinates="raw", trained=True), side, BEYOND_FLOAT16)
    model.save_pretrained(str(tmp_path / "own"))
    save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "cores"))
    PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "own"))
    for name in ("own", "cores"):
        with pytest.raises(ArtifactError, match=r"torch\.float16 does not"):
            PeftModel.from_pretrained(tiny_qwen2().half(), str(tmp_path / name), allow_other_base=True)
    with pytest.raises(ArtifactError, match=r"torch\.float16 does not"):
        adapted(basis=str(tmp_path / "basis"), model=tiny_qwen2(), dtype=torch.float16, r=FrozenCoreConfig.r,
                constructor=FrozenCoreConfig.constructor, calibrated=False)  # fmt: skip
    assert load_basis(tmp_path / "basis").layers


def test_cores_that_a_bank_in_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = adapted("random")
    train_at_random(model, size=BEYOND_FLOAT16)
    model.save_pretrained(str(tmp_path))
    CoreBank(adapted("random"), 1).put("a", tmp_path)
    with pytest.raises(ArtifactError, match=r"torch\.float16 does not"):
        CoreBank(adapted("random"), 1, dtype=torch.float16).put("a", tmp_path)


@pytest.mark.parametrize("value", [1e300, 3.5e38])
def test_cores_of_a_state_dict_that_no_float32_holds_are_refused(value: float) -> None:
    model = adapted("random")
    cores = {layer.name: torch.full((3, 3), value, dtype=torch.float64) for layer in cores_of(model)}
    for enter in (lambda: swap_core(model, cores), lambda: CoreBank(model, 1).put("a", cores)):
        with pytest.raises(ArtifactError):
            enter()
    state = {
        f"base_model.model.{layer.name}.frozencore_{side}": getattr(layer, f"frozencore_{side}")["default"]
        for layer in cores_of(model) for side in "PQ"
    } | {f"base_model.model.{name}.frozencore_R.weight": core for name, core in cores.items()}  # fmt: skip
    with pytest.raises(ArtifactError, match="no float32 holds"):
        set_peft_model_state_dict(model, state)


def test_a_finite_core_that_makes_logits_that_are_not_is_said_where_it_is_scored(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    with torch.no_grad():
        for layer in cores_of(model):
            layer.core("default").fill_(3e38)
    model.save_pretrained(str(tmp_path / "adapter"))
    worn = BaseWithAdapter(tiny_qwen2()).with_adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match="not finite.*a core that is too large"):
        held_out_loss(worn, [TokenRow("row-1", list(range(2, 8)), 3)], pad_id=0)
