"""Warnings of other libraries that say nothing to our users."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# What torchao says when it is imported, which transformers does with every model wherever it is installed: of its
# binaries for other machines, and of its own enums.
_OF_TORCHAO = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_OF_TORCHAO[record.name])


def ignore_known_warnings() -> None:
    """In this process. Where workers are processes of their own, each of them calls it."""
    # PEFT asks for it at every get_peft_model.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    for name in _OF_TORCHAO:
        logging.getLogger(name).addFilter(_is_of_use)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """While PEFT and transformers are imported on behalf of a user's own program, whose loggers stay as they are."""
    added = [logger for name in _OF_TORCHAO if _is_of_use not in (logger := logging.getLogger(name)).filters]
    for logger in added:
        logger.addFilter(_is_of_use)
    try:
        yield
    finally:
        for logger in added:
            logger.removeFilter(_is_of_use)
