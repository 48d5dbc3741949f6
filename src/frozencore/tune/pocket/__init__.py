"""The pocket model and its tasks: a whole experiment offline, in seconds, at no claim to the paper's numbers."""

from __future__ import annotations

from pathlib import Path

from frozencore.tune.pocket.tasks import POCKET_TASKS as POCKET_TASKS

POCKET_MODEL = "pocket"
"""The name that stands for the shipped model where a hub id is asked for."""


def pocket_model_path() -> Path:
    """The folder of the shipped model, as ``AutoModelForCausalLM.from_pretrained`` takes it."""
    return Path(__file__).parent / "model"
