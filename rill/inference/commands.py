"""What callers' threads want done, waiting for the native engine's thread to do it between two steps.

    caller   post(name, work) ──► queue ──► run_waiting()   engine's thread
             wait(command)    ◄── done  ◄────────┘

Anybody may post; one thread runs. What a command raises belongs to the caller who waits for it. Once closed, nothing
is taken any more and whoever still waits is told so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rill.errors import EngineError, StuckError

T = TypeVar("T")

CONTROL_TIMEOUT_S = 120.0
"""Of any engine: for what has no deadline of its own, far above the length of a step."""
MOVE_TIMEOUT_S = 1800.0
"""For those that move a model's weights: from a disk, over a network, into pinned memory."""

IDLE_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class Command:
    name: str
    run: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)
    """Running once the engine's thread has taken it."""


class CommandQueue:
    def __init__(self, describe: Callable[[], str]) -> None:
        """`describe`: the engine's state in words, for the message of a wait that ran out."""
        self._describe = describe
        self._commands: list[Command] = []
        self._wake = threading.Condition()
        self.is_closed = False
        self._failure: EngineError | None = None
        self._runner: threading.Thread | None = None

    # --- callers' threads --------------------------------------------------------------------------------

    def post(self, name: str, run: Callable[[], Any]) -> Command:
        command = Command(name, run)
        with self._wake:
            self.check_open()
            self._commands.append(command)
            self._wake.notify()
        return command

    def wait(self, command: Command, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        try:
            return command.done.result(timeout=timeout_s)
        except TimeoutError:
            # What nobody waits for any more must not be done later: its tensors may be gone by then.
            what = "did not take it" if command.done.cancel() else "took it and was not done"
            raise StuckError(
                f"{command.name}: the engine's thread {what} within {timeout_s} s ({self._describe()})"
            ) from None

    def call(self, name: str, run: Callable[[], T], timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        """post() and wait()."""
        if self.is_runner:
            raise EngineError(
                f"{name}() was called from on_delta, which must not block: call it from another thread"
            )
        result: T = self.wait(self.post(name, run), timeout_s)
        return result

    def close(self, failure: EngineError | None = None) -> None:
        """Take no more, and let run_waiting() return. What still waits is the runner's to fail. `failure`: why, where
        nobody asked for it."""
        with self._wake:
            self.is_closed = True
            self._failure = self._failure or failure
            self._wake.notify()

    def check_open(self) -> None:
        """Raises what ended it, or EngineError where it was closed in order."""
        self.check_alive()
        if self.is_closed:
            raise EngineError("the engine is closed")

    def check_alive(self) -> None:
        """Raises what ended it, unless it was closed in order."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    @property
    def is_runner(self) -> bool:
        """Whether the calling thread is the one that runs the commands: it must not wait for one."""
        return threading.current_thread() is self._runner

    # --- the engine's thread -----------------------------------------------------------------------------

    def enter_thread(self) -> None:
        self._runner = threading.current_thread()

    def run_waiting(self, has_other_work: Callable[[], bool]) -> None:
        """Run every command that waits; sleep until there is one, unless there is other work or an end."""
        with self._wake:
            while not self._commands and not self.is_closed and not has_other_work():
                self._wake.wait(timeout=IDLE_WAIT_S)
            commands, self._commands = self._commands, []
        for command in commands:
            if not command.done.set_running_or_notify_cancel():
                continue
            try:
                command.done.set_result(command.run())
            except Exception as error:  # noqa: BLE001 boundary: what a command raises belongs to its caller
                command.done.set_exception(error)

    def fail_waiting(self) -> None:
        """Close, and tell those whose commands were never run."""
        with self._wake:
            self.is_closed = True
            commands, self._commands = self._commands, []
        for command in commands:
            if command.done.set_running_or_notify_cancel():
                late = EngineError(f"the engine closed before {command.name}() ran")
                command.done.set_exception(self._failure or late)
