"""A serving engine as a process of its own, in its own environment (``make engines``), asked over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from places import ROOT

ENGINES = ROOT / ".engines"
START_S, STOP_S, ANSWER_S = 900, 20, 600


def environment_of(engine: str) -> Path:
    """The engine's environment; the test is skipped where nobody has made one."""
    folder = ENGINES / engine
    if not (folder / ".installed").is_file():
        pytest.skip(f"no {engine} in {folder}: run `make engines`")
    return folder


@dataclass(frozen=True)
class Answer:
    """The tokens that an engine chose greedily, and the log-probability that it gives each of them."""

    tokens: list[int]
    logprobs: list[float]


class RefusedError(Exception):
    """The engine answered with a status that is not 200, and what it said, or ended at its start."""


class EngineProcess:
    """Started in ``with``, up when that returns, gone with all its children after it."""

    def __init__(self, command: Sequence[str | Path], log: Path, settings: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.command = [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port)]
        self.log = log
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}

    def __enter__(self) -> Self:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        try:
            self._until_up()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop()

    def post(self, path: str, body: object) -> Any:
        """The JSON (or text) of the answer.

        Raises:
            RefusedError: Its status is not 200.
        """
        status, text = self._request("POST", path, json.dumps(body))
        if status != 200:
            raise RefusedError(f"{status}: {text}")
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    def get(self, path: str) -> str:
        """The text of the answer."""
        status, text = self._request("GET", path, None)
        if status != 200:
            raise RefusedError(f"{status}: {text}")
        return text

    def _request(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _until_up(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                raise RefusedError(f"ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", None)[0] == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self.command[0]} was not up after {START_S} s: {self.log.read_text()[-3000:]}")

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # its workers are in the session that it was started with
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
