"""The sum over rows of their gradients, each cut to a length of at most C.

    Σ_i g_i · min(1, C / ‖g_i‖)

‖g_i‖ is over all cores together. A row whose gradient is not finite adds nothing, so the bound holds for it too.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_ABOVE = 1 + 1e-5  # so that rounding makes no row longer than C


def clipped_sum(gradients: Float[Tensor, "rows k"], clip: float) -> tuple[Float[Tensor, " k"], Float[Tensor, " rows"]]:
    """The sum, and the length of each row's gradient before it was cut."""
    norms = torch.linalg.vector_norm(gradients, dim=1)
    finite = norms.isfinite()
    factors = (clip / (norms * _ABOVE)).clamp(max=1.0).where(finite, 0.0)
    return factors @ gradients.masked_fill(~finite.unsqueeze(1), 0.0), norms
