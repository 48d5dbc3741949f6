"""The pocket model: a small language model that comes with the package. Its making and its tasks are in the lab."""

from __future__ import annotations

from pathlib import Path

POCKET_MODEL = "pocket"
"""The name of the shipped model in place of a hub id."""


def pocket_model_path() -> Path:
    """The folder of the shipped model, for ``AutoModelForCausalLM.from_pretrained``."""
    return Path(__file__).parent / "model"
