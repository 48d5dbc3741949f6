"""Values that a run computes before training, stored in its folder until it ends; a resumed run loads them.

They are the base model's score and the calibrated adapter, each with its inputs. If the inputs differ, the value is
computed again.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from warnings import WarningMessage

from peft import PeftModel
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel

from frozencore.adapter.calibrate import Calibration
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.whole_file import write_text
from frozencore.text import Progress
from frozencore.tune.adapt import Adapted, adapt
from frozencore.tune.config import MethodConfig
from frozencore.tune.folder import ADAPTER, CACHE, CALIBRATION, CHECKPOINTS
from frozencore.tune.load import Inputs
from frozencore.tune.methods import Method, Targets
from frozencore.tune.training.checkpoints import checkpoints


class RunCache:
    """The values that the run in one folder has computed so far.

    Args:
        out: The run's folder.
        reads_only: Set in all but the first of several processes.
    """

    def __init__(self, out: Path, *, reads_only: bool = False) -> None:
        self._folder = out / CACHE
        self._was_empty = not reads_only and not self._folder.exists()
        self._writes = not reads_only and not checkpoints(out / CHECKPOINTS)  # checkpoints belong to stored values

    def load(self, name: str, kind: Any, of: Mapping[str, Any]) -> Any:
        """Load a value from its file; None if there is no file, or its inputs differ.

        Args:
            name: The name of the file.
            kind: The type of the value, for pydantic.
            of: The inputs of the value, as JSON values by name.
        """
        with suppress(ValidationError):
            if (content := self._read(name, of)) is not None:
                return TypeAdapter(kind).validate_python(content, strict=False)
        return None

    def store(self, name: str, kind: Any, of: Mapping[str, Any], value: Any) -> None:
        """Write a value to its file."""
        self._write(name, of, TypeAdapter(kind).dump_python(value, mode="json"))

    def adapt(
        self,
        of: Mapping[str, Any],
        config: MethodConfig,
        inputs: Inputs,
        targets: Targets,
        progress: Progress,
        warned: Sequence[WarningMessage],
        *,
        moments_file: Path | None = None,
    ) -> Adapted:
        """Put the stored adapter on the model; without one that fits, make it (:func:`adapt`) and store it.

        Args:
            of: The inputs of the adapter, as JSON values by name.
            warned: The warnings so far, which a resumed run repeats.
        """
        adapted = self._load_adapter(of, inputs.model)
        if adapted is None:
            adapted = adapt(config, inputs, targets, progress, moments_file=moments_file)
            self._store_adapter(of, adapted, config.entry, warned)
        return adapted

    def _load_adapter(self, of: Mapping[str, Any], model: PreTrainedModel) -> Adapted | None:
        """Put the stored adapter with its bases on a model, and repeat its warnings; None if nothing fits."""
        with suppress(ValidationError, ArtifactError, KeyError, TypeError):
            if (kept := self._read(CALIBRATION, of)) is not None:
                calibration = TypeAdapter(Calibration).validate_python(kept["calibration"], strict=False)
                adapted = PeftModel.from_pretrained(model, self._folder / ADAPTER, is_trainable=True)
                for message in kept["warnings"]:
                    warnings.warn(message, stacklevel=2)
                return Adapted(adapted, calibration, float(kept["time_s"]), calibration.captures)
        return None

    def _store_adapter(
        self, of: Mapping[str, Any], adapted: Adapted, method: Method, warned: Sequence[WarningMessage]
    ) -> None:
        """Store an adapter whose bases were computed from data, with the warnings so far."""
        if adapted.calibration is None or not self._writes:
            return
        method.save(adapted.model, self._folder / ADAPTER, self._folder)
        content = {
            "calibration": TypeAdapter(Calibration).dump_python(adapted.calibration, mode="json"),
            "time_s": adapted.time_s,
            "warnings": sorted({str(entry.message) for entry in warned if entry.category is UserWarning}),
        }
        self._write(CALIBRATION, of, content)

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """If bad input raises an error inside, remove the values that this process has stored."""
        try:
            yield
        except FrozenCoreError:
            if self._was_empty:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _read(self, name: str, of: Mapping[str, Any]) -> Any:
        """Read the value under a name if its inputs are equal; otherwise None."""
        try:
            content = json.loads((self._folder / name).read_text(encoding="utf-8"))
            return content["found"] if content["of"] == json.loads(json.dumps(of)) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _write(self, name: str, of: Mapping[str, Any], content: Any) -> None:
        if self._writes:
            write_text(self._folder / name, json.dumps({"of": dict(of), "found": content}))
