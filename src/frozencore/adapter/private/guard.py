"""Looks at the first step of a private training: noise hides a training that learns nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from frozencore.errors import TrainingError

FAR = 100.0  # times longer than the typical gradient of a row: a clipping length that drowns it in noise


class Guard:
    """Refuses to go on where a core gets no gradient, does not move, or its gradients drown in noise.

    Attributes:
        clipped_share: The share of rows of the last step that were cut; 0 for a step without rows.
    """

    def __init__(self, cores: Mapping[str, Tensor], clip: float) -> None:
        self._cores, self._clip = cores, clip
        self._norms: list[Tensor] = []
        self._has_gradient = torch.zeros(len(cores), dtype=torch.bool)
        self._looked = self._moved = False
        self._before: dict[str, Tensor] = {}
        self.clipped_share = 0.0

    def before_step(self, rate: float) -> None:
        """Keep the cores as they are before the first step with a learning rate above 0."""
        if not self._moved and rate > 0:
            self._before = {name: core.detach().clone() for name, core in self._cores.items()}

    def see(self, gradients: Tensor, norms: Tensor) -> None:
        """Note the gradients (rows x Σr²) of the rows of a pass, and their lengths."""
        self._norms.append(norms)
        if not self._looked:
            sizes = [core.numel() for core in self._cores.values()]
            found = torch.stack([part.any() for part in gradients.split(sizes, dim=1)])
            self._has_gradient |= found.cpu()

    def after_step(self) -> None:
        """Look, once there was a step with rows, and once there was one with a learning rate above 0."""
        norms = torch.cat(self._norms) if self._norms else torch.empty(0)
        self._norms.clear()
        self.clipped_share = float((norms > self._clip).float().mean()) if len(norms) else 0.0
        if len(norms) and not self._looked:
            self._look(norms)
        if self._before and not self._moved:
            self._require_moved()

    def _look(self, norms: Tensor) -> None:
        names = list(self._cores)
        without = [name for name, found in zip(names, self._has_gradient.tolist(), strict=True) if not found]
        if without:
            raise TrainingError(
                f"Private training needs a gradient for every core, but {without[0]!r} ({len(without)} of {len(names)})"
                " has none in any row of the first step: only noise would train it. Check the labels and the targets."
            )
        finite = norms[norms.isfinite()]
        if not len(finite) or float(finite.median()) * FAR < self._clip:
            typical = f"{float(finite.median()):.2g}" if len(finite) else "not finite"
            raise TrainingError(
                f"The gradient of a row is typically {typical} long, but private training clips at {self._clip:g} and "
                "adds noise in proportion: the noise would hide it. Clip near the typical length."
            )
        self._looked = True

    def _require_moved(self) -> None:
        still = [name for name, core in self._cores.items() if torch.equal(core, self._before[name])]
        if still:
            raise TrainingError(
                f"Every core moves in a step of private training, but {still[0]!r} ({len(still)} of "
                f"{len(self._cores)}) did not. Let the optimiser have all trainable parameters."
            )
        self._moved, self._before = True, {}
