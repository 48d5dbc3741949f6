"""Where a run reports its losses and scores: TensorBoard, trackio or W&B, through transformers' own callbacks."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_tensorboard_available, is_trackio_available, is_wandb_available
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from frozencore.errors import ConfigError
from frozencore.one_line import one_line

Reporter = Literal["tensorboard", "trackio", "wandb"]
LOGS = "logs"
OPTIONS = "frozencore"  # under which a run's options stand, beside transformers' own
_AVAILABLE: dict[Reporter, Callable[[], bool]] = {
    "tensorboard": is_tensorboard_available,
    "trackio": is_trackio_available,
    "wandb": is_wandb_available,
}


class TensorBoardReporter(TensorBoardCallback):
    """TensorBoard's files, in a folder unless ``TENSORBOARD_LOGGING_DIR`` says another place."""

    logging_dir: str | None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.logging_dir = self.logging_dir or str(folder / LOGS)

    def tell_options(self, options: Mapping[str, Any]) -> None:
        self.tb_writer.add_text(OPTIONS, json.dumps(options, indent=2))

    def close(self, *, failed: bool) -> None:
        if self.tb_writer is not None:
            self.tb_writer.close()


class TrackioReporter(TrackioCallback):
    """A run of trackio's."""

    def __init__(self, folder: Path) -> None:
        super().__init__()

    def tell_options(self, options: Mapping[str, Any]) -> None:
        self._trackio.config.update({OPTIONS: options}, allow_val_change=True)

    def close(self, *, failed: bool) -> None:
        if self._trackio.context_vars.current_run.get() is not None:
            self._trackio.finish()


class WandbReporter(WandbCallback):
    """A run of W&B's; one that somebody has begun before is theirs: it is told, and left open."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._theirs = self._wandb.run is not None

    def tell_options(self, options: Mapping[str, Any]) -> None:
        self._wandb.config.update({OPTIONS: options}, allow_val_change=True)

    def close(self, *, failed: bool) -> None:
        if not self._theirs and self._wandb.run is not None:
            self._wandb.finish(exit_code=int(failed))


_REPORTERS: dict[Reporter, type[TensorBoardReporter | TrackioReporter | WandbReporter]] = {
    "tensorboard": TensorBoardReporter,
    "trackio": TrackioReporter,
    "wandb": WandbReporter,
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


class Reports(TrainerCallback):
    """The reporters of one run as one callback; the end of its training leaves them open, for the scores that follow.

    Args:
        folder: The run's. It names the run, with the time: trackio goes on with a run whose name it knows.
        options: What the run was asked for: JSON values by name.

    Attributes:
        begin_s: Seconds that it took them to begin, which may be a connection to somewhere.
    """

    def __init__(self, names: Sequence[Reporter], folder: Path, options: Mapping[str, Any]) -> None:
        self._name = f"{folder.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._options = dict(options)
        self._reporters = [_REPORTERS[name](folder) for name in names]
        self._end: tuple[Any, ...] | None = None
        self.begin_s = 0.0

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        args.run_name = args.run_name or self._name

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *more: Any, **named: Any) -> None:
        start = time.perf_counter()
        for reporter in self._reporters:
            reporter.on_train_begin(args, state, *more, **named)
            if state.is_world_process_zero:
                reporter.tell_options(self._options)
        self.begin_s = time.perf_counter() - start

    def on_log(self, *event: Any, **named: Any) -> None:
        for reporter in self._reporters:
            reporter.on_log(*event, **named)

    def on_save(self, *event: Any, **named: Any) -> None:
        for reporter in self._reporters:
            reporter.on_save(*event, **named)

    def on_train_end(self, *event: Any, **named: Any) -> None:
        self._end = event, named

    def tell(self, scores: Mapping[str, float]) -> None:
        """Report scores of what was trained, as ``test_NAME`` at its last step."""
        if self._end is not None:
            self.on_log(*self._end[0], logs={f"test_{name}": score for name, score in scores.items()})

    def close(self, *, failed: bool) -> None:
        """End what was begun; a reporter that cannot is a warning, for the run is what it is without it."""
        for reporter in self._reporters:
            try:
                if self._end is not None:
                    event, named = self._end
                    reporter.on_train_end(*event, **named)
                reporter.close(failed=failed)
            except Exception as error:
                warnings.warn(f"A reporter of the run did not end well: {one_line(error)}", stacklevel=2)


@contextmanager
def reporting(names: Sequence[Reporter], folder: Path, options: Mapping[str, Any]) -> Iterator[Reports | None]:
    """What reports a run, closed in the end, after an error too; None where nobody is to be told.

    Args:
        folder: The run's.
        options: What the run was asked for: JSON values by name.
    """
    require_reporters(names)
    if not names:
        yield None
        return
    reports, failed = Reports(names, folder, options), True
    try:
        yield reports
        failed = False
    finally:
        reports.close(failed=failed)
