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

from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.atomic_write import atomic_write
from frozencore.text import num_of, one_line
from frozencore.tune.many.folder import refuse_differing, unfinished_file, unfinished_in
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


@dataclass(frozen=True)
class UnfinishedFiles:
    """The files of tenants between two steps in the folder of all tenants.

    Attributes:
        keys: What a run must share to go on from a file, by tenant.
    """

    out: Path
    keys: Mapping[str, Mapping[str, Any]]

    def read(self) -> dict[str, Unfinished]:
        """Read the files that are there."""
        names = unfinished_in(self.out, self.keys)
        return {name: Unfinished.read(unfinished_file(self.out, name), self.keys[name]) for name in names}

    def write(self, unfinished: Mapping[str, Unfinished]) -> str:
        """Write a file for each tenant, and say whose steps are saved."""
        lost: dict[str, Exception] = {}
        for name, one in unfinished.items():
            try:
                one.write(unfinished_file(self.out, name), self.keys[name])
            except (FrozenCoreError, OSError) as error:
                lost[name] = error
        saved = f"the steps of {num_of(len(unfinished) - len(lost), 'tenant')} are saved"
        names = ", ".join(map(repr, lost))
        return f"{saved}, but not those of {names} ({next(iter(lost.values()))})" if lost else saved
