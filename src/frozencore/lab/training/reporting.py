"""Where a training reports its losses as it goes: TensorBoard, trackio or W&B, through transformers' own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from transformers import TrainerCallback
from transformers.integrations import (
    get_reporting_integration_callbacks,
    is_tensorboard_available,
    is_trackio_available,
    is_wandb_available,
)
from transformers.integrations.integration_utils import TensorBoardCallback

from frozencore.errors import ConfigError

Reporter = Literal["tensorboard", "trackio", "wandb"]
LOGS = "logs"
_AVAILABLE: dict[Reporter, Callable[[], bool]] = {
    "tensorboard": is_tensorboard_available,
    "trackio": is_trackio_available,
    "wandb": is_wandb_available,
}


def require_reporters(names: Sequence[Reporter]) -> None:
    """Before any work is done.

    Raises:
        ConfigError: The package of one of them is not installed.
    """
    for name in names:
        if not _AVAILABLE[name]():
            raise ConfigError(
                f"To report to {name} takes its package, which is not installed here. pip install {name}, or leave it "
                "out of --report-to."
            )


@contextmanager
def reporters(names: Sequence[Reporter], folder: Path) -> Iterator[list[TrainerCallback]]:
    """Callbacks that report; what they have open is closed, after an error too.

    Args:
        folder: Where TensorBoard's files go, unless ``TENSORBOARD_LOGGING_DIR`` says another place.
    """
    require_reporters(names)
    callbacks = [kind() for kind in get_reporting_integration_callbacks(list(names))]
    boards = [callback for callback in callbacks if isinstance(callback, TensorBoardCallback)]
    for board in boards:
        board.logging_dir = board.logging_dir or str(folder)
    try:
        yield callbacks
    finally:
        for board in boards:
            if board.tb_writer is not None:  # as the end of a training leaves it
                board.tb_writer.close()
