"""Recognise what frozencore has saved at a path.

It is an adapter, a basis, a basis model, a moments file, a LoRA, a run, a run of many tenants, an evaluation or a
campaign. A folder of ``frozencore calibrate`` counts as moments, with the adapter and the basis beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from frozencore.calibration.moments_file import KEY
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    BASIS_MODEL_TYPE,
    CONFIG_FILE,
    FACTORS_FILE,
    HEADER_FILE,
    MODEL_CONFIG,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    read_config,
)
from frozencore.tune.run.run_folder import ADAPTER, CACHE, CHECKPOINTS, FAILURE, MOMENTS_FILE, PREDICTIONS, RECORD
from frozencore.tune.training.checkpoints import TENANT_STATES


def kind_of(path: Path) -> str | None:
    """The kind of a path, such as ``"adapter"`` or ``"run"``; None if frozencore wrote nothing there."""
    if path.is_file():
        return "moments" if path.suffix == ".safetensors" and _may_be_moments(path) else None
    if not path.is_dir():
        return None
    if (path / "campaign.json").is_file():
        return "campaign"
    if any((path / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE)):
        return _kind_of_adapter(path)
    if any((path / name).exists() for name in (HEADER_FILE, FACTORS_FILE)):
        return "basis"
    model, record = read_json(path / MODEL_CONFIG), read_json(path / RECORD)
    if isinstance(model, dict) and model.get("model_type") == BASIS_MODEL_TYPE:
        return "basis model"
    if (path / MOMENTS_FILE).is_file():
        return "moments"
    if isinstance(record, dict) and "scores" in record:
        return "evaluation"
    if record is None and _is_of_many(path):
        return "tenants"
    if (isinstance(record, dict) and "config" in record) or any((path / n).is_dir() for n in (CHECKPOINTS, CACHE)):
        return "run"
    if record is None and (path / ADAPTER / CONFIG_FILE).is_file():
        return "adapter"
    if any(path.glob(f"*/*/{PREDICTIONS}")):
        return "evaluation"
    return "run" if record is not None and (path / PREDICTIONS).exists() else None


def _is_of_many(path: Path) -> bool:
    """Return whether ``tune-many`` wrote it: it has records of tenants, failures only, or checkpoints."""
    records = map(read_json, path.glob(f"*/{RECORD}"))
    return (
        any(isinstance(record, dict) and "company" in record for record in records)
        or any(path.glob(f"*/{FAILURE}"))
        or any(path.glob(f"checkpoints/*/{TENANT_STATES}"))
    )


def _may_be_moments(path: Path) -> bool:
    """Return whether a file holds moments; True if it cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            return KEY in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return True


def _kind_of_adapter(path: Path) -> str | None:
    try:
        kind = read_config(path).get("peft_type", PEFT_TYPE)
    except ArtifactError:
        return "adapter"
    return {PEFT_TYPE: "adapter", "LORA": "LoRA"}.get(kind) if isinstance(kind, str) else "adapter"


def read_json(path: Path) -> Any:
    """Read a JSON file; return None if it is missing, and the error if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return error


def saved_in(path: Path) -> Iterator[Path]:
    """Yield the subfolders that frozencore has written."""
    folders = sorted(path.iterdir()) if path.is_dir() else ()
    return (folder for folder in folders if folder.is_dir() and kind_of(folder) is not None)
