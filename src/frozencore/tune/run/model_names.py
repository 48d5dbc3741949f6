"""Short names of models that lie here."""

from __future__ import annotations

from frozencore.tune.pocket import POCKET_MODEL, pocket_model_path
from frozencore.tune.smollm2 import SMOLLM2, smollm2_path


def model_location(name: str) -> str:
    """The folder that a model's short name stands for; any other name as it is.

    Raises:
        ModelError: ``smollm2`` has not been fetched.
    """
    if name == POCKET_MODEL:
        return str(pocket_model_path())
    return str(smollm2_path()) if name == SMOLLM2 else name
