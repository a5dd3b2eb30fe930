"""DeviceLock: a worker's exclusive turn on devices that it shares with other groups; its memory comes in and goes out.

    with self.device_lock(prompts, rollouts):       # the channels this block works on: they give the order
        for prompt in prompts: ...

    user thread:  acquire ──▶ onload, if need be ──▶ block ──▶ release        (memory stays: resident)
    lock thread:                       "evict" from the hub ──▶ offload ──▶ "evicted"

Whose turn it is is decided in the hub (hub/locks.py). `offload` runs only when another group needs the devices, at a
moment when no block of this worker runs, or when every thread in one waits inside `take` or `put` for a group that
needs these devices: the turn is lent, and regained, with an `onload`, before the `take` or `put` returns. Code outside
the block must not use device memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rill.errors import RunError
from rill.runtime.context import RuntimeContext
from rill.runtime.device.accelerator import accelerator
from rill.runtime.hub.messages import Acquire, Evict, Evicted
from rill.runtime.process.report import stuck
from rill.runtime.process.waits import waiting
from rill.telemetry import trace

if TYPE_CHECKING:
    from rill.runtime.channel import Channel
    from rill.runtime.worker import Worker

_log = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 3600.0
"""As a call's: the wait for a turn lasts as long as the work of the groups before."""


def groups_in_line(context: RuntimeContext) -> set[str]:
    """Groups with a rank that waits for its turn now."""
    turns = context.hub.call("locks.turns", None)
    return {turn["group"] for turn in turns if turn["waiting"]}


class DeviceLock:
    """Blocks of several threads of one worker share one turn."""

    def __init__(self, worker: Worker, context: RuntimeContext) -> None:
        self._worker = worker
        self._context = context
        self._hub = context.hub
        self._device_ids = [device.id for device in worker.devices]
        self._channels: tuple[str, ...] = ()
        self._is_loaded = False
        self._turn = 0
        self._users: dict[int, int] = {}
        """Threads that are in a block -> how deep."""
        self._waiting: set[int] = set()
        """Of those, the ones that wait on a channel and could lend the turn."""
        self._entered_s = 0.0
        self._error: Exception | None = None
        self._gate = threading.RLock()
        """Held while the memory moves, so that a block never runs half loaded."""
        self._turn_lock = threading.Lock()
        self._asking = threading.Lock()
        """Guards the next two, and the order of what the hub is told of them."""
        self._is_asking = False
        self._num_urgent = 0
        """Threads that wait for the turn with work of no channel."""
        self._spans = ExitStack()
        self._evictions: queue.SimpleQueue[Evict | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_evictions, name="rill-lock", daemon=True)
        self._thread.start()
        self._hub.on("evict", lambda body: self._evictions.put(Evict(*body)))

    @contextmanager
    def turn(self, channels: Sequence[Channel], timeout_s: float | None) -> Iterator[None]:
        if timeout_s is None:
            timeout_s = max((DEFAULT_TIMEOUT_S, *(channel.timeout_s for channel in channels)))
        self.acquire(tuple(channel.name for channel in channels), timeout_s)
        try:
            yield
        finally:
            self.release()

    def acquire(self, channels: tuple[str, ...], timeout_s: float) -> None:
        """Wait for the turn and bring the memory in. Inside another block of this worker it costs nothing.

        Work of no channel is not kept waiting by a thread of this worker that waits for data: new weights come before
        the jobs that are made with them.
        """
        if not channels:
            with self._asking:
                self._num_urgent += 1
                if self._is_asking:
                    self._hub.submit("locks.hurry", None)
        me = threading.get_ident()
        with self._turn_lock:
            with self._asking:
                self._num_urgent -= not channels
            if not self._users:
                self._channels = channels
                self._take_turn(timeout_s, is_resumed=False)
            self._users[me] = self._users.get(me, 0) + 1

    def release(self) -> None:
        """End the turn. The memory stays until another group needs the devices."""
        me = threading.get_ident()
        with self._turn_lock:
            self._users[me] -= 1
            if not self._users[me]:
                del self._users[me]
            if not self._users:
                self._give_turn_back()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Around a wait on a channel, by a thread in a block: while all such threads wait, the devices may be lent."""
        me = threading.get_ident()
        with self._gate:
            self._waiting.add(me)
        try:
            yield
        finally:
            with self._gate:
                self._waiting.discard(me)
            if self._turn == 0:
                with self._turn_lock:  # of several threads that wake up, the first regains it for all
                    if self._turn == 0:
                        self._take_turn(DEFAULT_TIMEOUT_S, is_resumed=True)

    @property
    def is_held_here(self) -> bool:
        return threading.get_ident() in self._users

    def close(self) -> None:
        self._evictions.put(None)

    def _take_turn(self, timeout_s: float, *, is_resumed: bool) -> None:
        if self._error is not None:
            raise RunError(f"{self._context.address.name}: offload failed: {self._error!r}") from self._error
        with self._asking:
            is_ready = is_resumed or self._num_urgent > 0
            wish = Acquire(self._device_ids, list(self._channels), is_ready)
            asked = self._hub.ask("locks.acquire", wish, int, self._release)
            self._is_asking = True
        what = f"devices {self._device_ids}"
        try:
            with (
                trace.span("wait for devices", lane=self._context.address.name),
                waiting(what, "locks:devices"),
            ):
                if not asked.came(timeout_s):
                    raise stuck(self._context, what, timeout_s)
            self._turn = asked.result()
        except BaseException:  # an interrupt, too, must not leave a turn that nobody knows of
            if asked.withdraw():
                self._hub.submit("locks.cancel", None)
            raise
        finally:
            self._is_asking = False
        self._entered_s = time.monotonic()
        name = self._context.address.name
        for device in self._device_ids:
            self._spans.enter_context(trace.span(name, lane=f"device {device}"))
        try:
            with self._gate:
                if not self._is_loaded:
                    with trace.span("onload", lane=name):
                        self._worker.onload()
                    self._is_loaded = True
                    self._context.recorder.loaded(time.monotonic() - self._entered_s)
        except BaseException:  # user code failed: the devices are for others, and the caller learns of it
            self._give_turn_back()
            raise

    def _give_turn_back(self) -> None:
        turn, self._turn = self._turn, 0
        self._end_spans()
        self._release(turn)

    def _release(self, turn: int) -> None:
        self._hub.submit("locks.release", turn)

    def _end_spans(self) -> None:
        seconds = time.monotonic() - self._entered_s
        memory = accelerator(self._worker.devices[0].kind).held_bytes(self._worker.device)
        self._context.recorder.had_turn(self._device_ids, seconds, *memory)
        self._spans.close()

    def _serve_evictions(self) -> None:
        while (order := self._evictions.get()) is not None:
            with self._gate:
                is_lending = order.turn != 0
                is_idle = self._users.keys() <= self._waiting if is_lending else True
                if self._turn != order.turn or not is_idle:  # it works again, or has let go by itself
                    self._hub.submit("locks.evicted", Evicted(order.number, True))
                    continue
                if is_lending:
                    self._turn = 0
                    self._end_spans()
                self._offload()
                self._hub.submit("locks.evicted", Evicted(order.number, False))

    def _offload(self) -> None:
        if not self._is_loaded:
            return
        started_s = time.monotonic()
        self._is_loaded = False
        try:
            with trace.span("offload", lane=self._context.address.name):
                self._worker.offload()
        except Exception as error:  # noqa: BLE001  user code: its failure is raised at this worker's next turn
            _log.exception("%s: offload failed", self._context.address.name)
            self._error = error
        self._context.recorder.offloaded(time.monotonic() - started_s)
