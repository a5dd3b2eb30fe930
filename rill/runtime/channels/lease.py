"""A lease: what a consumer has taken and not finished, and what it has put meanwhile.

    take ──▶ OPEN ──done──▶ one record: the items are finished and everything put under the lease is in
               └── give_back, an exception, the process's death ──▶ somebody else's, and nothing was put

Puts made inside a loop's body, or `async with lease`, by the thread or task that works on it (and by tasks that it
starts) join the innermost lease. Before a wait of any other kind they are sent by themselves: whoever is waited for
may need them. A loop that is left (`break`, an exception) cannot say why; that is settled by what its thread does next:
another operation on a channel, or the end of its call, finishes the item, an exception on its way out gives it back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from rill.errors import RunError, in_words
from rill.runtime.hub.messages import Ids, Item, Puts
from rill.runtime.process import waits

if TYPE_CHECKING:
    from rill.runtime.channels.consumer import Consumer


_joined: ContextVar[tuple[Lease, ...]] = ContextVar("rill-leases", default=())
"""The leases that puts made here may join, the innermost last. Tasks and asyncio.to_thread inherit it."""


class Lease:
    """Items taken together. From `Channel.leases` it is one item: `lease.value`."""

    __slots__ = ("_consumer", "_error_before", "_ids", "_puts", "_thread", "end", "is_left", "value")

    def __init__(self, consumer: Consumer, items: Sequence[Item], *, is_of_thread: bool) -> None:
        """`is_of_thread`: the calling thread has it; it is settled at the latest when that one's call ends."""
        self._consumer = consumer
        self._ids = [item.id for item in items]
        self._puts: list[Puts] = []
        self._error_before = sys.exc_info()[1]
        self._thread = threading.get_ident() if is_of_thread else 0
        self.end = ""
        """What became of it; empty while it is open."""
        self.is_left = False
        """Its loop was left without saying how it went."""
        self.value: Any = None
        if is_of_thread:
            _held.setdefault(self._thread, []).append(self)

    # --- for whoever works on it ----------------------------------------------------------------------------

    def done(self) -> None:
        """These items are dealt with: finish them and put what was put under them. Waits for room in bounded
        channels. A second call does nothing."""
        if not self.end:
            self._consumer.producer.commit(*self._take_commit("done"))

    def give_back(self, error: str = "") -> None:
        """Somebody else may try. Without an error it does not count as a failure."""
        if not self.end:
            _, puts = self._take_commit("given back")
            self._consumer.give_back(self._ids, puts, error)

    def __del__(self) -> None:
        if not self.end:  # nobody can finish it any more
            self._consumer.dropped(self._ids, self._puts)

    async def __aenter__(self) -> Self:
        join(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        unjoin(self)
        if error is not None:
            self.give_back(describe(error))
        elif not self.end:
            await self._consumer.producer.commit_async(*self._take_commit("done"))

    # --- for the ends of channels -----------------------------------------------------------------------------

    def add(self, channel: str, item: Item) -> None:
        """A put joins."""
        if self.end:
            raise RunError(f"put into {channel!r} under a lease that is {self.end}: put it before")
        if self._puts and self._puts[-1].channel == channel:
            self._puts[-1].items.append(item)
        else:
            self._puts.append(Puts(channel, [item]))

    def finish(self) -> None:
        """As `done`, but without waiting for room: the hub keeps what has none."""
        if not self.end:
            self._consumer.producer.send(*self._take_commit("done"))

    def settle(self) -> None:
        """Its loop was left: with an exception on its way it is given back, else it is done."""
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_before:
            self.give_back(describe(error))
        else:
            self.finish()

    def _take_commit(self, end: str) -> tuple[list[Ids], list[Puts]]:
        self.end = end
        held = _held.get(self._thread)
        if held is not None and self in held:
            held.remove(self)
        puts, self._puts = self._puts, []
        return [Ids(self._consumer.name, self._ids)], puts


# --- which lease a put joins ------------------------------------------------------------------------------


def join(lease: Lease) -> None:
    _joined.set((*_joined.get(), lease))


def unjoin(lease: Lease) -> None:
    _joined.set(tuple(other for other in _joined.get() if other is not lease))


def joined() -> Lease | None:
    """The innermost lease that is still open here. Loops that were left are settled first."""
    leases = _joined.get()
    for lease in leases:
        if lease.is_left or lease.end:
            _joined.set(tuple(one for one in leases if not one.is_left and not one.end))
            for left in reversed(leases):
                if left.is_left:
                    left.settle()
            return joined()
    return leases[-1] if leases else None


def before_wait() -> None:
    """This thread or task is about to wait for somebody, who may need what it has put: that goes now, and is no longer
    undone if its lease fails."""
    if joined() is not None:
        for lease in _joined.get():
            if lease._puts:
                puts, lease._puts = lease._puts, []
                lease._consumer.producer.send([], puts)


waits.before.append(before_wait)


# --- who holds what ---------------------------------------------------------------------------------------

_held: dict[int, list[Lease]] = {}
"""Open leases by the thread that took them."""


def finish_taken(consumer: Consumer) -> None:
    """This thread takes again: what `take` gave it before of this channel is done, though not what its loops have."""
    looped = _joined.get()
    for lease in list(_held.get(threading.get_ident(), ())):
        if lease._consumer is consumer and lease not in looped:
            lease.finish()


def end_call(error: BaseException | None) -> None:
    """This thread's call has ended: what its loops and takes had is done, or, after an exception, somebody else's."""
    for lease in reversed(_held.pop(threading.get_ident(), ())):
        if error is not None:
            lease.give_back(describe(error))
        else:
            lease.finish()


def describe(error: BaseException) -> str:
    """For the count of failures; what only ends a wait (Ctrl-C, a cancelled task) is none."""
    return in_words(error) if isinstance(error, Exception) else ""
