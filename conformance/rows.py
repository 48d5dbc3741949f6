"""PEFT's table rows for LoRA, said in the words of a frozen core; what cannot be said stays as an excluded case."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from peft import LoraConfig

from frozencore import FrozenCoreConfig

RENAMED = {"lora_alpha": "alpha", "init_lora_weights": "init_weights"}
OURS = {field.name for field in fields(FrozenCoreConfig)}
NO_OP = {"lora_dropout": None, "bias": "none"}  # a core has no dropout, whatever the row's; biases are never trained
LINEAR_MODELS = {"MLP", "EmbConv1D"}  # of the custom models; "emb" is an embedding
OWN_CUSTOM_ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("Ranks and alphas by layer", "MLP",
     {"target_modules": ["lin0", "lin1"], "r": 6, "rank_pattern": {"lin0": 4}, "alpha_pattern": {"lin0": 12.0}}),
    ("Excluded module", "MLP", {"target_modules": ".*lin.*", "exclude_modules": ["lin1"], "alpha": 3.0}),
    ("Conv1D beside linear", "EmbConv1D", {"target_modules": ["conv1d", "lin0"], "alpha": 4.0}),
]  # fmt: skip


QUANTISED_ROWS = [
    (FrozenCoreConfig, {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    (FrozenCoreConfig, {"r": 4, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"]}),
]  # PEFT's table holds no LoRA row


class UntranslatableError(ValueError):
    """Says what of the row only LoRA has."""


class _StandsForOurs(type):
    """Compares equal to our config class, so that what a test asks only of LoRA is asked of us."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is FrozenCoreConfig

    __hash__ = type.__hash__


class LoraSpelling(FrozenCoreConfig, metaclass=_StandsForOurs):
    """``LoraConfig(...)`` in the body of a test: gives a frozen-core config with the same meaning."""

    def __new__(cls, **options: Any) -> FrozenCoreConfig:  # type: ignore[misc]
        return FrozenCoreConfig(**translated(options))


def translated(options: dict[str, Any]) -> dict[str, Any]:
    """LoRA options as frozen-core options.

    Raises:
        UntranslatableError: One of them has no counterpart.
    """
    result = {}
    for name, value in copy.deepcopy(options).items():
        if name in NO_OP and NO_OP[name] in (None, value):
            continue
        original, name = name, RENAMED.get(name, name)
        if name not in OURS or (name == "init_weights" and not isinstance(value, bool)):
            raise UntranslatableError(f"the row uses {original}, which only LoRA has")
        result[name] = value
    if {"emb", "embed_tokens"} & set(result.get("target_modules") or []):
        raise UntranslatableError("the row adapts an embedding; a frozen core sits on linear layers")
    return result


def retargeted(file: str, names: list[str], values: list[Any]) -> list[Any] | None:
    """The parameter sets for a frozen core; None if the table holds no adapter method, or only others."""
    if file == "test_quantization" and names == ["config_cls", "config_kwargs"]:
        return QUANTISED_ROWS
    rows = [row.values if isinstance(row, ParameterSet) else row for row in values]
    if names in (["config_cls"], ["config_class"]):
        return [FrozenCoreConfig]
    if names == ["config_class", "mandatory_kwargs"]:
        return [(FrozenCoreConfig, {})]
    if not any(name.startswith("config") or name == "peft_config" for name in names):
        return None
    rows = [row if len(names) > 1 or isinstance(row, tuple) else (row,) for row in rows]
    rows = [row for row in rows if any(cell is LoraConfig or type(cell) is LoraConfig for cell in row)]
    if not rows:
        return None
    result = []
    for row in rows:
        try:
            ours = tuple(_cell(name, cell) for name, cell in zip(names, row, strict=True))
            result.append(ours if len(names) > 1 else ours[0])
        except UntranslatableError as error:
            result.append(pytest.param(*row, marks=pytest.mark.skip(reason=f"excluded: {error}")))
    if "model_id" in names and "test_name" in names:
        result += [(name, model, FrozenCoreConfig, options) for name, model, options in OWN_CUSTOM_ROWS]
    return result


def _cell(name: str, cell: Any) -> Any:
    if name == "model_id" and cell not in LINEAR_MODELS:
        raise UntranslatableError(
            "the row adapts a convolution, attention module or bare parameter, not a linear layer"
        )
    if cell is LoraConfig:
        return FrozenCoreConfig
    if type(cell) is LoraConfig:  # its subclasses are other methods
        return LoraSpelling(**_given(cell))
    if isinstance(cell, dict):
        return translated(cell)
    if name == "tuner_method" and cell == "lora":
        return "frozencore"  # under LoRA's name the test goes on to weighted combinations
    return cell


def _given(config: LoraConfig) -> dict[str, Any]:
    """The options of a config that are not LoRA's defaults."""
    default = LoraConfig()
    names = (field.name for field in fields(config) if field.init and field.name not in ("peft_type", "peft_version"))
    pairs = {name: (getattr(config, name, None), getattr(default, name, None)) for name in names}
    return {name: value for name, (value, usual) in pairs.items() if value != usual}
