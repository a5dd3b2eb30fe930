"""The producing end of a channel in one process: objects become items, items go to the broker.

put ──▶ encode ──▶ small: inside the descriptor; large: into this node's shared memory
          │
          ├── inside a lease: joins it, and goes when it is done (lease.py)
          ├── unbounded channel: on its way when `put` returns; a window bounds what the hub has not confirmed
          └── bounded channel: `put` returns when the broker has let it in
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rill.errors import ConfigError, RillError, RunError, StuckError
from rill.runtime.channels.lease import joined
from rill.runtime.hub.client import ANSWER_S, Asked
from rill.runtime.hub.messages import Commit, Ids, Item, Puts, as_error
from rill.runtime.process.report import stuck
from rill.runtime.process.waits import waiting
from rill.runtime.transfer.wire import RAW_MIN_BYTES, encode

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext
    from rill.runtime.hub.history import Recorder

INLINE_BYTES = RAW_MIN_BYTES
"""Payloads up to this size ride in the descriptor: nothing of them has left the header."""


class Producer:
    """Thread-safe."""

    def __init__(self, context: RuntimeContext, name: str, is_bounded: bool, timeout_s: float) -> None:
        self.name = name
        self.is_bounded = is_bounded
        self.timeout_s = timeout_s
        self._context = context
        self._hub = context.hub
        self.recorder: Recorder = context.recorder
        self._error: RillError | None = None
        self._hub.on("commit_failed", self._fail)

    def describe(self, obj: Any, weight: float, key: Any) -> Item:
        """What the broker is told of an object, whose payload stays in this node's store unless it is small."""
        key, encoded = checked_key(self.name, key), encode(obj)
        num_bytes = encoded.num_bytes
        self.recorder.put(self.name, num_bytes, weight)
        if num_bytes > INLINE_BYTES:
            ref = self._context.store.write(encoded, self.timeout_s)
            return Item(float(weight), key, num_bytes, None, ref)
        return Item(float(weight), key, num_bytes, encoded.header, None)

    def put(self, items: list[Item]) -> None:
        """Into the lease that is worked on here, or to the broker."""
        if not self._has_joined(items):
            self.commit([], [Puts(self.name, items)])

    async def put_async(self, items: list[Item]) -> None:
        """As `put`, without blocking the event loop while the channel is full."""
        if not self._has_joined(items):
            await self.commit_async([], [Puts(self.name, items)])

    def _has_joined(self, items: list[Item]) -> bool:
        self.check()
        lease = joined()
        if lease is None:
            return False
        for item in items:
            lease.add(self.name, item)
        return True

    def commit(self, done: list[Ids], puts: list[Puts]) -> None:
        """All of it or nothing; returns when it is on its way, or, where a channel is bounded, in."""
        if self._needs_room(puts):
            with self._asking(done, puts) as asked:
                came_while_lending(self._context, asked, self.timeout_s)
        elif not self._hub.commit(done, puts, time.monotonic() + self.timeout_s):
            for part in puts:
                self.forget(part.items)
            raise stuck(self._context, f"put to channel {_names(puts)}", self.timeout_s)

    async def commit_async(self, done: list[Ids], puts: list[Puts]) -> None:
        """As `commit`, on an event loop."""
        if self._needs_room(puts):
            with self._asking(done, puts) as asked:
                await asyncio.wait([asyncio.wrap_future(asked)], timeout=self.timeout_s)
        else:
            self.commit(done, puts)

    @contextmanager
    def _asking(self, done: list[Ids], puts: list[Puts]) -> Iterator[Asked[int]]:
        """Around the wait for room. Whatever ends it early takes back what has none yet; but what came of something
        that was taken stays with the hub, which will let it in."""
        what = f"room in channel {_names(puts)}"
        asked = self._hub.ask("broker.commit", Commit(done, puts, True), int)
        try:
            with waiting(what, f"channel:{puts[0].channel}"):
                yield asked
                late = None if asked.done() else stuck(self._context, what, self.timeout_s)
        finally:
            if not done and not asked.done():
                self._hub.submit("broker.cancel", asked.seq)
        if late is not None and (done or self._is_left_out(asked, puts, late)):
            raise late
        asked.result()

    def _is_left_out(self, asked: Asked[int], puts: list[Puts], error: StuckError) -> bool:
        """What became of a put that was taken back past its deadline; it may have got in at the last moment."""
        if not asked.came(ANSWER_S):
            raise RunError(f"{self.name}: the hub does not answer: it is not known whether the put got in")
        num_left_out = asked.result()
        if num_left_out:
            num_items = sum(len(part.items) for part in puts)
            error.add_note(f"{num_items - num_left_out} of {num_items} items got in")
        return num_left_out > 0

    def send(self, done: list[Ids], puts: list[Puts]) -> None:
        """All of it or nothing, without waiting for room: the hub lets the rest in when there is some."""
        if self._needs_room(puts):
            self._hub.ask("broker.commit", Commit(done, puts, True), int)
        else:
            self._hub.commit(done, puts, float("inf"))

    def _needs_room(self, puts: Sequence[Puts]) -> bool:
        channels = self._context.channels
        return bool(puts) and any(channels[part.channel].producer.is_bounded for part in puts)

    def forget(self, items: Sequence[Item]) -> None:
        """They will not be put: their memory is free again."""
        self._context.store.free([item.ref.slot for item in items if item.ref is not None])

    def check(self) -> None:
        """Raise what the broker said against something that was put."""
        if self._error is not None:
            raise self._error

    def _fail(self, note: Any) -> None:
        channels, kind, message = note
        if self.name in channels:
            self._error = as_error(kind, message)


def came_while_lending(context: RuntimeContext, asked: Asked[Any], limit_s: float) -> bool:
    """Wait; a device lock held by this thread may be lent meanwhile, and is held again afterwards."""
    lock = context.device_lock
    if lock is None or not lock.is_held_here or asked.done():
        return asked.came(limit_s)
    with lock.lending():
        return asked.came(limit_s)


def checked_key(channel: str, key: Any) -> Any:
    """`key` as a plain value that the wire has a form for, if it can be one."""
    if key is None:
        return None
    if isinstance(key, tuple):
        return tuple(checked_key(channel, part) for part in key)
    for kind in (bool, int, float, str):  # bool before int, which it is too
        if isinstance(key, kind):
            with suppress(OverflowError, UnicodeEncodeError):  # a larger number; half of a surrogate pair
                msgspec.msgpack.encode(plain := kind(key))
                return plain
    raise ConfigError(
        f"{channel}: a key is text, a number of 64 bits or a tuple of them; got {type(key).__name__}: {key!r}"
    )


def _names(puts: Sequence[Puts]) -> str:
    return " and ".join(repr(name) for name in dict.fromkeys(part.channel for part in puts))
