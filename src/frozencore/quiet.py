"""Warnings of other libraries that say nothing to our users."""

from __future__ import annotations

import warnings


def ignore_known_warnings() -> None:
    """In this process. Where workers are processes of their own, each of them calls it."""
    # PEFT asks for it at every get_peft_model.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
