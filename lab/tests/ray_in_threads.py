"""A Ray cluster for tests of the driver's side: actors are threads of this process, and answers can be lost.

It has the calls that :mod:`frozencore_lab.campaign.ray_pool` makes and behaves as Ray does in them: ``wait`` gives the
first answer that is there, ``get`` raises what the actor raised as a ``RayTaskError``, and every answer of an actor
that is gone is a ``RayActorError``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception):
    """The root of Ray's errors."""


class RayTaskError(RayError):
    """An error raised by a method of an actor."""


class RayActorError(RayError):
    """The actor is gone."""


class Actor:
    """An object whose methods run in threads, each call at once, as with ``max_concurrency``."""

    def __init__(self, made: Any, options: dict[str, Any]) -> None:
        self.made = made
        self.options = options
        self.is_killed = False
        self._answers: list[tuple[str, Future[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._call(name, words))

    def lose(self, *names: str, message: str = "the actor's node is gone") -> None:
        """The unfinished answers of those methods, or of all, never come."""
        for name, answer in self._answers:
            if not names or name in names:
                with suppress(InvalidStateError):
                    answer.set_exception(RayActorError(message))

    def _call(self, name: str, words: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._answers.append((name, answer))
        threading.Thread(target=_answer, args=(answer, getattr(self.made, name), words), daemon=True).start()
        return answer


class Cluster(ModuleType):
    """Stands for the module ``ray``, connected to a cluster with these resources."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError)

    def __init__(self, resources: dict[str, float], *, is_joined: bool = True, refusal: BaseException | None = None):
        super().__init__("ray")
        self.resources = resources
        self.is_joined = is_joined
        self.refusal = refusal
        self.hired: list[Actor] = []

    def is_initialized(self) -> bool:
        return self.is_joined

    def init(self, **_: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.is_joined = True

    def shutdown(self) -> None:
        self.is_joined = False

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.resources)

    def remote(self, kind: Callable[..., Any]) -> Any:
        def options(**chosen: Any) -> Any:
            return SimpleNamespace(remote=lambda *words: self._hire(Actor(kind(*words), chosen)))

        return SimpleNamespace(options=options)

    def wait(self, answers: Sequence[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        wait_for(answers, timeout, return_when=FIRST_COMPLETED)
        ready = [answer for answer in answers if answer.done()][:1]
        return ready, [answer for answer in answers if answer not in ready]

    def get(self, answer: Future[Any]) -> Any:
        return answer.result()

    def kill(self, actor: Actor) -> None:
        if actor.is_killed:
            raise RayActorError("it was killed before")
        actor.is_killed = True
        actor.lose()

    def _hire(self, actor: Actor) -> Actor:
        self.hired.append(actor)
        return actor


def _answer(answer: Future[Any], method: Callable[..., Any], words: tuple[Any, ...]) -> None:
    try:
        result = method(*words)
    except Exception as error:
        with suppress(InvalidStateError):
            answer.set_exception(RayTaskError(str(error)))
    else:
        with suppress(InvalidStateError):
            answer.set_result(result)
