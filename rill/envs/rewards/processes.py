"""Worker processes for rewards that may hang while holding the interpreter lock, and can only be stopped by a kill.

Called by RewardRunner from its own threads, one thread to a process (rill.envs.child). A child builds the rewards once
and scores what it is sent; one that is late is killed with all that it started. Another starts when next needed.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rill.envs.child import START_S, Child, ChildRaisedError
from rill.envs.rewards.base import REWARDS, as_score
from rill.errors import RunError

MAX_PROCESSES = 64
"""At work at a time, slow ones included."""


class RewardProcesses:
    """Killable places to run rewards in: an idle process, or a new one. How many work at a time is the caller's choice.

    `parts` are (registry name or "module:class", config) of the rewards, by their index.
    """

    def __init__(self, parts: Mapping[int, tuple[str, Any]], *, memory_bytes: int) -> None:
        self._setup = (parts, memory_bytes)
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        self._places = threading.Semaphore(MAX_PROCESSES)
        self._is_closed = False

    def score(self, index: int, arguments: Any, timeout_s: float) -> float:
        """Blocks for at most the start of a process plus timeout_s, and for a place where MAX_PROCESSES are at work.

        Raises TimeoutError, ChildRaisedError or ChildDiedError, and RunError where there was no place.
        """
        if not self._places.acquire(timeout=START_S + timeout_s):
            raise RunError(f"all {MAX_PROCESSES} reward processes are busy")
        try:
            child = self._child()
            try:
                value: float = child.ask((index, arguments), timeout_s)
            except ChildRaisedError:
                self._put_back(child)
                raise
            self._put_back(child)
            return value
        finally:
            self._places.release()

    def close(self) -> None:
        self._is_closed = True
        while True:
            try:
                self._idle.get_nowait().kill()
            except queue.Empty:
                return

    def _child(self) -> Child:
        with contextlib.suppress(queue.Empty):
            while (idle := self._idle.get_nowait()).is_gone:  # it costs nobody a score
                idle.kill()
            return idle
        child = Child(build, self._setup)
        try:
            child.first()
        except ChildRaisedError as error:
            child.kill()
            raise ChildRaisedError(f"the reward could not be built: {error}", is_users=True) from error
        return child

    def _put_back(self, child: Child) -> None:
        if self._is_closed:
            child.kill()
        else:
            self._idle.put(child)


def build(setup: tuple[Mapping[int, tuple[str, Any]], int]) -> tuple[Callable[[Any], float], None]:
    """In the child: the rewards, and what scores with them."""
    parts, memory_bytes = setup
    rewards = {index: REWARDS.load(name)(config) for index, (name, config) in parts.items()}
    if memory_bytes:
        limit = _address_space() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def score(request: tuple[int, Any]) -> float:
        index, arguments = request
        return as_score(rewards[index].score(*arguments))

    return score, None


def _address_space() -> int:
    """Bytes mapped so far: the libraries that rewards import can map many gigabytes without using them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
