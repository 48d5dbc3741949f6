"""Report a run's losses and scores, by transformers' own callbacks for TensorBoard, trackio and W&B."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.integrations.integration_utils import TensorBoardCallback, WandbCallback

from frozencore.errors import ConfigError
from frozencore.text import one_line

Reporter = Literal["tensorboard", "trackio", "wandb"]
LOGS = "logs"


@dataclass
class ReportedArguments(TrainingArguments):
    """A Trainer's arguments with the run's configuration, because reporters report all their fields."""

    frozencore: dict[str, Any] = field(default_factory=dict)


def require_reporters(names: Sequence[Reporter]) -> None:
    """Check before any work that the reporters' packages are installed.

    Raises:
        ConfigError: A package is missing.
    """
    for name in set(names).difference(get_available_reporting_integrations() if names else ()):
        raise ConfigError(
            f"To report to {name} takes its package, which is not installed here. pip install {name}, or leave it "
            "out of --report-to."
        )


class Reports(TrainerCallback):
    """The reporters of one run as one callback.

    If a reporter fails, the run warns and no longer calls it. Reporters stay open after the training, for the final
    scores.

    Args:
        folder: The folder of the run. Its name and the time name the run, because trackio continues a run with a known
            name.
        options: The configuration of the run, as JSON values by name.

    Attributes:
        begin_s: Seconds that starting the reporters took, for instance to connect.
    """

    def __init__(self, names: Sequence[Reporter], folder: Path, options: Mapping[str, Any]) -> None:
        self._name = f"{folder.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._options = dict(options)
        self._begun: list[Any] = [make() for make in get_reporting_integration_callbacks(list(names))]
        self._active = list(self._begun)
        self._are_theirs = [isinstance(one, WandbCallback) and one._wandb.run is not None for one in self._begun]
        self._event: tuple[Any, ...] | None = None
        self._model: Any = None
        self.begin_s = 0.0
        for reporter in self._begun:
            if isinstance(reporter, TensorBoardCallback):
                reporter.logging_dir = reporter.logging_dir or str(folder / LOGS)

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        args.run_name = args.run_name or self._name
        assert isinstance(args, ReportedArguments)
        args.frozencore = self._options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self._event, self._model, start = (args, state, control), model, time.perf_counter()
        self._tell("on_train_begin")
        self.begin_s = time.perf_counter() - start

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        self._tell("on_log", logs=dict(logs))

    def on_save(self, *_: Any, **__: Any) -> None:
        self._tell("on_save")

    def tell(self, scores: Mapping[str, float]) -> None:
        """Report scores of the trained model, as ``test_NAME`` at its last step."""
        self._tell("on_log", logs={f"test_{name}": score for name, score in scores.items()})

    def close(self, *, failed: bool) -> None:
        """Close every started reporter; a W&B run that the user started stays open."""
        self._active = list(self._begun)
        self._tell("on_train_end")
        for reporter, is_theirs in zip(self._begun, self._are_theirs, strict=True):
            if isinstance(reporter, WandbCallback) and not is_theirs:
                _fails(reporter._wandb.finish, exit_code=int(failed))

    def _tell(self, event: str, **named: Any) -> None:
        if self._event is not None:
            self._active = [
                one for one in self._active if not _fails(getattr(one, event), *self._event, model=self._model, **named)
            ]


def _fails(tell: Callable[..., Any], *event: Any, **named: Any) -> bool:
    """Call a reporter; warn and return True if it failed."""
    try:
        tell(*event, **named)
    except Exception as error:
        warnings.warn(f"A reporter of the run failed: {one_line(error)}", stacklevel=2)
        return True
    return False


@contextmanager
def reporting(names: Sequence[Reporter], folder: Path, options: Mapping[str, Any]) -> Iterator[Reports | None]:
    """Yield a run's reports and close them at the end, also after an error; None without reporters.

    Args:
        folder: The folder of the run.
        options: The configuration of the run, as JSON values by name.
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
