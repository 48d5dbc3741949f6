"""The pocket model and its tasks: a whole experiment offline in seconds, not comparable with the paper's numbers."""

from __future__ import annotations

from pathlib import Path

from frozencore.tune.pocket.tasks import POCKET_TASKS as POCKET_TASKS

POCKET_MODEL = "pocket"
"""The name of the shipped model in place of a hub id."""


def pocket_model_path() -> Path:
    """The folder of the shipped model, for ``AutoModelForCausalLM.from_pretrained``."""
    return Path(__file__).parent / "model"
