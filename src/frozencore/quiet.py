"""Hide or collect the warnings of other libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# The beginning of a warning by the logger that says it. PEFT and transformers import torchao and bitsandbytes wherever
# they are installed; the warnings are about binaries for other machines, about enums, and about a kernel for 4-bit
# weights on the CPU. The next is about the order of
# checkpoints, which their numbers tell as well, and the last about a model's card without a head.
_OF_NO_USE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "%s is an Enum subclass",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "transformers.trainer_utils": "mtime may not be reliable",
    "huggingface_hub.repocard": "Repo card metadata block was not found",
}


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_OF_NO_USE[record.name])


def ignore_known_warnings() -> None:
    """Hide these warnings in this process; every worker process must call it."""
    # PEFT asks for it at every get_peft_model.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # PEFT looks for a config.json beside a GGUF file whenever an adapter on it is saved.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    for name in _OF_NO_USE:
        logging.getLogger(name).addFilter(_is_of_use)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide import warnings of PEFT and transformers inside, without changing a user program's loggers."""
    added = [logger for name in _OF_NO_USE if _is_of_use not in (logger := logging.getLogger(name)).filters]
    for logger in added:
        logger.addFilter(_is_of_use)
    try:
        yield
    finally:
        for logger in added:
            logger.removeFilter(_is_of_use)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the messages of user warnings inside, each once, in place of showing them; hidden ones stay hidden.

    Yields:
        A list that is filled at the end.
    """
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", append=True)  # after what is hidden, so that this stays so
        yield messages
    messages += sorted({str(one.message) for one in caught if one.category is UserWarning})
