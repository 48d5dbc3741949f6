"""What a run has found before it trains, kept in its folder until it ends: one that is resumed reads it.

The base model's score and the calibrated adapter, each with the inputs that it depends on. If these
differ, the value is computed again.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from warnings import WarningMessage

from peft import PeftModel
from pydantic import TypeAdapter, ValidationError

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.whole_file import write_text
from frozencore.tune.methods import Method
from frozencore.tune.run.bench import Bench
from frozencore.tune.run.folder import ADAPTER, CALIBRATION, CHECKPOINTS, FOUND
from frozencore.tune.training.checkpoints import checkpoints

T = TypeVar("T")


class Found:
    """Of the run in one folder.

    Args:
        out: The run's folder.
        reads_only: Of several processes on one run, the first alone writes.
    """

    def __init__(self, out: Path, *, reads_only: bool = False) -> None:
        self._out = out
        self._folder = out / FOUND
        self._was_empty = not reads_only and not self._folder.exists()
        self._writes = not reads_only and not checkpoints(out / CHECKPOINTS)  # they are of what is there

    def kept(self, name: str, kind: Any, of: Mapping[str, Any], find: Callable[[], T]) -> T:
        """What the untouched model scored, say: as it was kept, or found and kept.

        Args:
            name: Of the file.
            kind: Of what ``find`` gives, as pydantic takes it.
            of: What it depends on; JSON values by name.
        """
        read: T | None = self.read(name, kind, of)
        if read is not None:
            return read
        found = find()
        self.keep(name, kind, of, found)
        return found

    def read(self, name: str, kind: Any, of: Mapping[str, Any]) -> Any:
        """What was kept, as for :meth:`kept`; None where nothing of the same was."""
        with suppress(ValidationError):
            if (kept := self._read(name, of)) is not None:
                return TypeAdapter(kind).validate_python(kept, strict=False)
        return None

    def keep(self, name: str, kind: Any, of: Mapping[str, Any], found: Any) -> None:
        """Keep what was found, as for :meth:`kept`."""
        self._write(name, of, TypeAdapter(kind).dump_python(found, mode="json"))

    def adapter(
        self,
        of: Mapping[str, Any],
        bench: Bench,
        method: Method,
        find: Callable[[], tuple[PeftModel, Calibration | None]],
        caught: list[WarningMessage],
    ) -> tuple[PeftModel, Calibration | None, float]:
        """The adapter with its bases, what calibration found, and its seconds.

        Where the data were read for it, it is kept; what was warned of meanwhile is said again when it is read.

        Args:
            caught: The warnings so far.
        """
        known = TypeAdapter(Calibration)
        with suppress(ValidationError, ArtifactError, KeyError, TypeError):
            if (kept := self._read(CALIBRATION, of)) is not None:
                read = known.validate_python(kept["calibration"], strict=False)
                model = PeftModel.from_pretrained(bench.model, self._folder / ADAPTER, is_trainable=True)
                for message in kept["warnings"]:
                    warnings.warn(message, stacklevel=2)
                return model, read, float(kept["time_s"])
        started = time.perf_counter()
        model, calibration = find()
        time_s = time.perf_counter() - started
        if calibration is not None and self._writes:
            method.save(model, self._folder / ADAPTER, self._folder)
            content = {
                "calibration": known.dump_python(calibration, mode="json"),
                "time_s": time_s,
                "warnings": sorted({str(entry.message) for entry in caught if entry.category is UserWarning}),
            }
            self._write(CALIBRATION, of, content)
        return model, calibration, time_s

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Where bad input is refused inside, nothing is left of what was kept here before."""
        try:
            yield
        except FrozenCoreError:
            if self._was_empty:
                shutil.rmtree(self._folder, ignore_errors=True)
                with suppress(OSError):
                    self._out.rmdir()
            raise

    def _read(self, name: str, of: Mapping[str, Any]) -> Any:
        """What was kept under a name, if it is of the same; None otherwise."""
        try:
            content = json.loads((self._folder / name).read_text(encoding="utf-8"))
            return content["found"] if content["of"] == json.loads(json.dumps(of)) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _write(self, name: str, of: Mapping[str, Any], content: Any) -> None:
        if self._writes:
            write_text(self._folder / name, json.dumps({"of": dict(of), "found": content}))
