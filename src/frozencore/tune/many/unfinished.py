"""Tenants between two steps: what ``tune-many`` keeps when it is told to stop, and goes on from.

out/unfinished/NAME.safetensors     core, moments of AdamW and the best core so far; losses and scores as JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_write
from frozencore.text import one_line
from frozencore.tune.many.folder import refuse_differing
from frozencore.tune.record import StepScored


@dataclass(frozen=True)
class Unfinished:
    """The training of a tenant after some steps.

    Attributes:
        tensors: ``values``, and AdamW's ``first`` and ``second`` moments, (Σr²,) float32; ``best`` after a score.
        steps_s: The tenant's share of each step's seconds.
    """

    tensors: Mapping[str, Tensor]
    losses: list[float]
    steps_s: list[float]
    scores: list[StepScored] = field(default_factory=list)
    scoring_s: float = 0.0

    def write(self, file: Path, key: Mapping[str, Any]) -> None:
        """Write the file, with what a run must share to go on from it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "key": key, "losses": self.losses, "steps_s": self.steps_s, "scoring_s": self.scoring_s,
            "scores": [score.content() for score in self.scores],
        }  # fmt: skip
        with atomic_write(file) as aside:
            tensors = {name: X.cpu().contiguous() for name, X in self.tensors.items()}
            save_file(tensors, aside, {"state": json.dumps(state)})

    @classmethod
    def read(cls, file: Path, key: Mapping[str, Any]) -> Unfinished:
        """Read the file.

        Raises:
            ArtifactError: It is damaged, or is of a run with other rows, options, basis or base model.
        """
        try:
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                state = json.loads(opened.metadata()["state"])
            scores = [StepScored.model_validate(score) for score in state["scores"]]
            found = cls(tensors, state["losses"], state["steps_s"], scores, state["scoring_s"])
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            way_out = "Remove it to train this tenant anew."
            raise ArtifactError(f"{file} is damaged ({one_line(error, 120)}). {way_out}") from error
        refuse_differing(str(file), state["key"], json.loads(json.dumps(key)))
        return found
