"""Short rows take a model longer to begin with than to compute: advice puts more of them through it at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from frozencore.calibration.batches import Batch, is_of_tokens, put_together
from frozencore.calibration.loss import is_language_model, loss_fn_of
from frozencore.calibration.options import CalibrationOptions

TOKENS_AT_ONCE = 1024  # padding included


def together(model: nn.Module, batches: Sequence[Batch], options: CalibrationOptions | None) -> Sequence[Batch]:
    """The same rows in batches of at most 1,024 tokens; as they came where the loss is not one of tokens."""
    return put_together(batches, TOKENS_AT_ONCE) if _by_row(model, options) else batches


def copies_at_once(model: nn.Module, batches: Sequence[Batch], options: CalibrationOptions | None) -> int:
    """How many copies of these rows are no more than 1,024 tokens; 1 where copies could not be told apart."""
    if not (_by_row(model, options) and all(map(is_of_tokens, batches))):
        return 1
    return max(1, TOKENS_AT_ONCE // max(batch["input_ids"].numel() for batch in batches))


def _by_row(model: nn.Module, options: CalibrationOptions | None) -> bool:
    return is_language_model(model) and (options is None or loss_fn_of(options) is None)
