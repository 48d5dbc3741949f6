"""Tenants with a few sums each, and what was trained of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor

from frozencore import frozen_core_layers
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.load import Inputs, load_model, prepare
from frozencore.tune.pocket import pocket_model_path

SIZES = {"anna": 9, "ben": 21, "cleo": 14}


def config_of(data: Path, **overrides: Any) -> RunConfig:
    few = {
        "model": str(pocket_model_path()), "data": data, "rank": 4, "calibration_size": 16, "batch_size": 2,
        "accumulation": 2, "epochs": 2, "device": "cpu",
    }  # fmt: skip
    return make_config(**{**few, **overrides})


def inputs_of(config: RunConfig) -> Inputs:
    return prepare(config.model, config.rows, config.scoring, silent)


def silent(stage: str, done: int, total: int | None, note: str = "", /) -> None:
    pass


def adapter_in(folder: Path, name: str = "adapter", *, is_trainable: bool = False) -> PeftModel:
    base, _ = load_model(str(pocket_model_path()), device="cpu")
    return PeftModel.from_pretrained(base, folder / name, is_trainable=is_trainable)


def cores_in(folder: Path) -> dict[str, Tensor]:
    layers = frozen_core_layers(adapter_in(folder), "default")
    return {name: layer.factors("default")[2].detach() for name, layer in layers.items()}


def difference(cores: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The relative error over all layers."""
    assert cores.keys() == expected.keys()
    distance = sum(float((cores[name] - R).norm() ** 2) for name, R in expected.items())
    return (distance / sum(float(R.norm() ** 2) for R in expected.values())) ** 0.5
