"""One remote call: what travels to a worker and back, and what the caller keeps meanwhile.

    caller                                                worker
    CallBook.call ──[call, meta, header, buffers…]──▶ work inbox (main thread, in order)
                                                      or inbox (@concurrent, a thread each)
    inbox thread ◀──[reply, meta, header, buffers…]── Replier
       └─▶ Handle slot ─▶ Handle.wait

A caller is any process: the driver, or a worker that was given a group.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rill.errors import PeerDiedError, RillError, WorkerError
from rill.runtime import wire
from rill.runtime.context import WorkerAddress, current
from rill.runtime.mailbox import Frames, Mailbox
from rill.runtime.parcel import pack_inline

CALL, REPLY = b"call", b"reply"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's part of a call ended."""

    value: Any
    error: RillError | None
    seconds: float
    """Time inside the method, on the worker."""
    timers: Mapping[str, float]
    """Seconds by the name given to `Worker.timer`, summed over the call."""


class Slot(Protocol):
    """Where an outcome goes."""

    def fill(self, index: int, outcome: Reply | RillError) -> None: ...


@dataclass(slots=True)
class Reply:
    """An answer as it arrived; `open` decodes it in the thread that wants it."""

    is_error: bool
    seconds: float
    timers: Mapping[str, float]
    frames: Frames
    address: WorkerAddress
    unpack: Callable[[Frames], Any]

    def open(self) -> Outcome:
        value = self.unpack(self.frames)
        if not self.is_error:
            return Outcome(value, None, self.seconds, self.timers)
        message, remote_traceback, cause = value
        error = WorkerError(
            message, group=self.address.group, rank=self.address.rank, remote_traceback=remote_traceback
        )
        error.__cause__ = cause
        return Outcome(None, error, self.seconds, self.timers)


@dataclass(slots=True)
class _Pending:
    slot: Slot
    index: int
    address: WorkerAddress


class CallBook:
    """The calls that this process waits for."""

    def __init__(self, mailbox: Mailbox, caller: WorkerAddress) -> None:
        self._mailbox = mailbox
        self._caller = caller
        self.unpack: Callable[[Frames], Any] = _refuse
        """How results are read: set when the process's doors open."""
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._dead: dict[str, str] = {}
        self._lock = threading.Lock()
        mailbox.on(REPLY, self._on_reply)

    def call(
        self, target: WorkerAddress, endpoint: str, method: str, payload: Frames, slot: Slot, index: int
    ) -> None:
        """Send a call whose arguments are encoded already; the outcome goes to `slot`."""
        call_id = next(self._ids)
        with self._lock:
            reason = self._dead.get(target.identity)
            if reason is None:
                self._pending[call_id] = _Pending(slot, index, target)
        if reason is not None:
            slot.fill(index, PeerDiedError(f"{target.name} is gone: {reason}"))
            return
        caller = self._caller
        meta = (call_id, method, caller.endpoint_from(target.node_id), caller.identity, caller.node_id)
        self._mailbox.post(endpoint, [CALL, pickle.dumps(meta), *payload])

    def peer_died(self, identity: str, reason: str) -> None:
        """Fail every call that waits for `identity`, and every later one."""
        with self._lock:
            self._dead[identity] = reason
            lost = {i: p for i, p in self._pending.items() if p.address.identity == identity}
            for call_id in lost:
                del self._pending[call_id]
        for pending in lost.values():
            error = PeerDiedError(f"{pending.address.name} died during a call: {reason}")
            pending.slot.fill(pending.index, error)

    def waiting_for(self) -> list[str]:
        """The names of the workers with unanswered calls."""
        with self._lock:
            return sorted({pending.address.name for pending in self._pending.values()})

    def _on_reply(self, frames: Frames) -> None:
        call_id, is_error, seconds, timers = pickle.loads(frames[0])
        with self._lock:
            pending = self._pending.pop(call_id, None)
        if pending is not None:  # None: the peer was declared dead meanwhile
            pending.slot.fill(
                pending.index, Reply(is_error, seconds, timers, frames[1:], pending.address, self.unpack)
            )


def _refuse(_: Frames) -> Any:
    raise AssertionError("a reply arrived before the process was open")


# --- the worker's side ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrived at the worker. `identity` and `node_id` are the caller's."""

    call_id: int
    method: str
    reply_to: str
    identity: str
    node_id: str
    payload: Frames = field(repr=False)

    @staticmethod
    def read(frames: Frames) -> Call:
        """From the frames after the kind."""
        call_id, method, reply_to, identity, node_id = pickle.loads(frames[0])
        return Call(call_id, method, reply_to, identity, node_id, frames[1:])

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = current().parcels.unpack(self.payload)
        return args, kwargs


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> wire.Encoded:
    """A call's arguments, ready to be packed for those who are called."""
    return wire.encode((args, dict(kwargs)))


def reply_value(
    mailbox: Mailbox, call: Call, value: object, seconds: float, timers: Mapping[str, float]
) -> None:
    """Answer with a result."""
    encoded = wire.encode(value)
    meta = pickle.dumps((call.call_id, False, seconds, dict(timers)))
    mailbox.post(call.reply_to, [REPLY, meta, *current().parcels.pack(encoded, [call])])


def reply_error(
    mailbox: Mailbox, call: Call, error: BaseException, seconds: float, timers: Mapping[str, float]
) -> None:
    """Answer with an exception: its text and traceback always, the object itself where it can travel."""
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    try:
        encoded = wire.encode((text, trace, error))
        wire.copy_through(error)  # some exceptions pickle but do not unpickle
    except Exception:  # noqa: BLE001  the boundary of user exceptions: they may fail in any way
        encoded = wire.encode((text, trace, None))
    meta = pickle.dumps((call.call_id, True, seconds, dict(timers)))
    mailbox.post(call.reply_to, [REPLY, meta, *pack_inline(encoded)])
