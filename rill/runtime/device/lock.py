"""DeviceLock: a worker's exclusive turn on devices that it shares with other groups; its memory comes in and goes out.

    with self.device_lock(prompts, rollouts):       # the channels this block works on: they give the order
        for batch in prompts: ...

Whose turn it is is decided in the hub (lock_service.py). Here the worker's `onload` runs before the block if its memory
is not on the device, and `offload` runs only when another group needs the devices:

    user thread:  acquire ──▶ onload ──▶ block ──▶ release                    (memory stays: resident)
    lock thread:                       "evict" from the hub ──▶ offload ──▶ "offloaded"

`offload` therefore runs on a thread of its own, at a moment when no block of this worker runs, or when its thread waits
inside `take` or `put` for a group that needs these devices (the turn is lent, and regained, with an `onload`, before
the `take` or `put` returns). Code outside the block must not use device memory.

Where no other group shares the devices there is no switch: the first block calls `onload`, nothing calls `offload`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rill.errors import RunError
from rill.runtime.context import RuntimeContext, current
from rill.runtime.hub.answer import Pending
from rill.runtime.process.report import stuck, waiting
from rill.telemetry import trace

if TYPE_CHECKING:
    from rill.runtime.channel import Channel
    from rill.runtime.device.device import Device

_log = logging.getLogger(__name__)
_SERVICE = "device_lock"
DEFAULT_TIMEOUT_S = 3600.0
"""As a call's: the wait for a turn lasts as long as the work of the groups before."""
ASK_S = 30.0


class Loadable(Protocol):
    """What a lock needs of its worker."""

    devices: tuple[Device, ...]

    def onload(self) -> None: ...

    def offload(self) -> None: ...


def device_lock_of(worker: Loadable) -> DeviceLock:
    """The lock of this worker; one per process (or per worker thread)."""
    context = current()
    with context.lock:
        if _SERVICE not in context.services:
            hub = context.hub  # opened first, so that it is closed last
            context.services[_SERVICE] = DeviceLock(worker, context)
            assert hub is context.hub
        lock: DeviceLock = context.services[_SERVICE]
        return lock


def lock_of(context: RuntimeContext) -> DeviceLock | None:
    """The lock of this process if it has one."""
    return context.services.get(_SERVICE)


def groups_in_line(context: RuntimeContext) -> set[str]:
    """Groups with a rank that waits for its turn now."""
    turns = context.hub.query("locks", "turns", None, ASK_S)
    return {turn["group"] for turn in turns if turn["waiting"]}


class DeviceLock:
    """`with lock:` or `with lock(channels…):`. Blocks of several threads of one worker share one turn."""

    def __init__(self, worker: Loadable, context: RuntimeContext) -> None:
        self._worker = worker
        self._context = context
        self._hub = context.hub
        self._device_ids = [device.id for device in worker.devices]
        self._channels: tuple[str, ...] = ()
        self._is_loaded = False
        self._turn = 0
        self._num_users = 0
        self._num_waiting = 0
        self._error: Exception | None = None
        self._gate = threading.RLock()
        """Held while the memory moves, so that a block never runs half loaded."""
        self._turn_lock = threading.Lock()
        self._asking = threading.Lock()
        """Guards the next two, and the order of what the hub is told of them."""
        self._is_asking = False
        self._num_urgent = 0
        """Threads that wait for the turn with work of no channel."""
        self._spans: list[trace.Span] = []
        self._evictions: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_evictions, name="rill-lock", daemon=True)
        self._thread.start()
        self._hub.on("evict", self._evictions.put)

    def __call__(self, *channels: Channel, timeout_s: float | None = None) -> _Block:
        """A turn for work between `channels`, in whatever order they are named. `timeout_s`: unless given, an hour, or
        longer where a wait on one of the channels may last longer."""
        if timeout_s is None:
            timeout_s = max((DEFAULT_TIMEOUT_S, *(channel.timeout_s for channel in channels)))
        return _Block(self, tuple(channel.name for channel in channels), timeout_s)

    def __enter__(self) -> DeviceLock:
        self.acquire((), DEFAULT_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, channels: tuple[str, ...], timeout_s: float) -> None:
        """Wait for the turn and bring the memory in. Inside another block of this worker it costs nothing.

        Work of no channel is not kept waiting by a thread of this worker that waits for data: new weights come before
        the jobs that are made with them.
        """
        if not channels:
            self._hurry()
        with self._turn_lock:
            with self._asking:
                self._num_urgent -= not channels
            if self._num_users == 0:
                self._channels = channels
                self._take_turn(timeout_s, is_resumed=False)
            self._num_users += 1

    def release(self) -> None:
        """End the turn. The memory stays until another group needs the devices."""
        with self._turn_lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._give_turn_back()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Around a wait on a channel: while all users of the turn wait, the devices may be lent."""
        with self._gate:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._gate:
                self._num_waiting -= 1
            if self._turn == 0:
                with self._turn_lock:  # of several threads that wake up, the first regains it for all
                    if self._turn == 0:
                        self._take_turn(DEFAULT_TIMEOUT_S, is_resumed=True)

    @property
    def is_held(self) -> bool:
        return self._num_users > 0

    def close(self) -> None:
        self._evictions.put(None)

    # --- turns --------------------------------------------------------------------------------------------

    def _take_turn(self, timeout_s: float, *, is_resumed: bool) -> None:
        if self._error is not None:
            raise RunError(f"{self._context.address.name}: offload failed: {self._error!r}") from self._error
        pending = Pending()
        with self._asking:
            payload = [self._device_ids, list(self._channels), is_resumed or self._num_urgent > 0]
            self._hub.submit("locks.acquire", payload, pending)
            self._is_asking = True
        what = f"devices {self._device_ids}"
        with trace.span("wait for devices", lane=self._context.address.name), waiting(what, f"locks:{what}"):
            is_granted = pending.wait(timeout_s)
        self._is_asking = False
        if not is_granted and pending.abandon(self._release_late):
            error = stuck(self._context, what, timeout_s)
            self._hub.submit("locks.cancel", None)
            raise error
        self._turn = pending.result()
        name = self._context.address.name
        for device in self._device_ids:
            span = trace.span(name, lane=f"device {device}")
            span.__enter__()
            self._spans.append(span)
        try:
            self._onload()
        except BaseException:  # user code failed: the devices are for others, and the caller learns of it
            self._give_turn_back()
            raise

    def _hurry(self) -> None:
        with self._asking:
            self._num_urgent += 1
            if self._is_asking:
                self._hub.submit("locks.hurry", None)

    def _onload(self) -> None:
        with self._gate:
            if not self._is_loaded:
                with trace.span("onload", lane=self._context.address.name):
                    self._worker.onload()
                self._is_loaded = True

    def _give_turn_back(self) -> None:
        turn, self._turn = self._turn, 0
        self._end_spans()
        self._hub.submit("locks.release", turn, Pending())

    def _release_late(self, turn: int) -> None:
        self._hub.submit("locks.release", turn, Pending())

    def _end_spans(self) -> None:
        while self._spans:
            self._spans.pop().__exit__(None, None, None)

    # --- the lock thread ----------------------------------------------------------------------------------

    def _serve_evictions(self) -> None:
        while (order := self._evictions.get()) is not None:
            with self._gate:
                is_lending = order["turn"] != 0
                if is_lending and not (self._turn == order["turn"] and self._num_waiting >= self._num_users):
                    self._hub.submit("locks.kept", None)
                    continue
                if is_lending:
                    self._turn = 0
                    self._end_spans()
                self._offload()
                self._hub.submit("locks.offloaded", None)

    def _offload(self) -> None:
        if not self._is_loaded:
            return
        started_s = time.monotonic()
        self._is_loaded = False
        try:
            with trace.span("offload", lane=self._context.address.name):
                self._worker.offload()
        except Exception as error:  # noqa: BLE001  user code: its failure is raised at this worker's next turn
            _log.exception(
                "%s: offload failed after %.1f s", self._context.address.name, time.monotonic() - started_s
            )
            self._error = error


class _Block:
    """One `with lock(channels…)`."""

    def __init__(self, lock: DeviceLock, channels: tuple[str, ...], timeout_s: float) -> None:
        self._lock = lock
        self._channels = channels
        self._timeout_s = timeout_s

    def __enter__(self) -> DeviceLock:
        self._lock.acquire(self._channels, self._timeout_s)
        return self._lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
