"""One rank inside its process: the worker, its surroundings, and how a call runs on it.

A process with one rank runs its calls on the main thread. Where ranks share a process each has a thread of its own, on
which all its calls run in order, so that ranks may wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import UserError
from rill.runtime.channels.ends import fail_call, settle_call
from rill.runtime.context import RuntimeContext, install_for_thread
from rill.runtime.process.called import Answers
from rill.runtime.worker import Seating, Worker, begin_call, build
from rill.telemetry import trace

if TYPE_CHECKING:
    from rill.runtime.group import ClassRef

INIT = "__init__"


@dataclass(frozen=True, slots=True)
class RankCall:
    """One rank's part of a call."""

    method: str
    arguments: Callable[[str | None], Any]
    """Gives the arguments, on a device; called once, where their failure is the call's."""
    index: int
    """Which of the answers is this rank's."""
    answers: Answers


class Rank:
    """A worker and what serves it."""

    def __init__(self, seating: Seating, context: RuntimeContext, on_built: Callable[[], None]) -> None:
        """`on_built` is called once its worker's `__init__` has run."""
        self.context = context
        self._on_built = on_built
        self.name = context.address.name
        self._seating = seating
        self._worker: Worker | None = None
        self._init_error = ""
        self._has_tried = threading.Event()
        self._queue: queue.SimpleQueue[RankCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)

    def start(self) -> None:
        """Serve calls on a thread of this rank's own, from `put`."""
        self._thread.start()

    def put(self, call: RankCall) -> None:
        """Have `call` run after those before it."""
        self._queue.put(call)

    def run_at_once(self, call: RankCall) -> None:
        """Run `call` in a new thread, whatever else runs."""
        threading.Thread(target=self._run_when_built, args=(call,), name=call.method, daemon=True).start()

    def run(self, call: RankCall) -> None:
        """Run `call` here and answer it."""
        timers = begin_call()
        started_s = time.perf_counter()
        recorder = self.context.recorder
        recorder.begin(call.method)
        try:
            with trace.span(f"{self._seating.group_name}.{call.method}", lane=self.name):
                value = self._invoke(call)
            settle_call(self.context)
            call.answers.value(call.index, value, time.perf_counter() - started_s, timers)
        except BaseException as error:  # noqa: BLE001  the boundary of user code: every exception goes to the caller
            fail_call(error)
            call.answers.error(call.index, error, time.perf_counter() - started_s, timers)
        finally:
            recorder.end()

    def close(self) -> None:
        """The worker's own `close`, after the calls before it."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()  # the driver kills a process that takes too long
        else:
            self._close_worker()

    def _serve(self) -> None:
        install_for_thread(self.context)
        while (call := self._queue.get()) is not None:
            self.run(call)
        self._close_worker()

    def _run_when_built(self, call: RankCall) -> None:
        install_for_thread(self.context)
        self._has_tried.wait()  # ended by `__init__`, whatever became of it, or with the process
        self.run(call)

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _invoke(self, call: RankCall) -> Any:
        args, kwargs = call.arguments(self.context.torch_device)
        if call.method == INIT:
            (target,) = args
            self._build(target, kwargs)
            return None
        if self._worker is None:
            raise UserError(
                f"{self.name} was not initialised: its __init__ failed ({self._init_error}), relaunch it or close the "
                "group"
            )
        value = getattr(self._worker, call.method)(*args, **kwargs)
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    def _build(self, target: ClassRef, kwargs: Mapping[str, Any]) -> None:
        try:
            self._worker = build(target.load(), self._seating, kwargs)
        except BaseException as error:
            self._init_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._has_tried.set()  # @concurrent calls wait for it
        self._on_built()
