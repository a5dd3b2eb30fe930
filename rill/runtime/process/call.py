"""One remote call, at both ends: what travels to a rank and back, and what the caller keeps meanwhile.

    caller                                            called process
    Calls.call ──[call, meta, header, buffers…]──▶ inbox thread ──▶ main thread, in order (@concurrent: a thread each)
    Handle ◀── inbox thread ◀──[reply, meta, …]── Call.answer

A caller is any process: the driver, or a worker that was given a group. Neighbours and processes of other nodes are
called the same way (mailbox.py).
"""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rill.errors import PeerDiedError
from rill.runtime.address import WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.handle import Handle, Lost, Reply
from rill.runtime.process.mailbox import Frames, Mailbox
from rill.runtime.transfer import wire
from rill.runtime.transfer.parcel import pack_inline

CALL, REPLY = b"call", b"reply"

_NO_RESULT = wire.encode(None).header


class Calls:
    """The calls that this process waits for. Thread-safe."""

    def __init__(self, mailbox: Mailbox, caller: WorkerAddress) -> None:
        self._mailbox = mailbox
        self._caller = caller
        self.unpack: Callable[[Frames], Any] = _refuse
        """How results are read: set when the process's doors open."""
        self._ids = itertools.count(1)
        self._pending: dict[int, Handle] = {}
        self._dead: dict[str, str] = {}
        self._lock = threading.Lock()
        mailbox.on(REPLY, self._on_reply)

    def call(self, handle: Handle, method: str, payload: Frames, *, concurrent: bool = False) -> None:
        """Call `method` on the targets of `handle`, which gets the outcomes."""
        call_id = next(self._ids)
        with self._lock:
            self._pending[call_id] = handle
            gone = {t.identity: self._dead[t.identity] for t in handle.targets if t.identity in self._dead}
        caller = self._caller
        meta_of: dict[str, bytes] = {}
        for index, target in enumerate(handle.targets):
            if target.identity in gone:
                reason = gone[target.identity]
                handle.fill(index, Lost(PeerDiedError(f"{target.name} is gone: {reason}")))
                continue
            reply_to = caller.endpoint_from(target.node_id)
            if reply_to not in meta_of:
                meta_of[reply_to] = pickle.dumps(
                    (call_id, method, concurrent, reply_to, caller.identity, caller.node_id)
                )
            self._mailbox.post(
                target.endpoint_from(caller.node_id),
                [CALL, meta_of[reply_to], index.to_bytes(4, "little"), *payload],
            )
        self._drop_if_done(call_id, handle)

    def peer_died(self, identity: str, reason: str) -> None:
        """Fail every call that waits for `identity`, and every later one."""
        with self._lock:
            self._dead[identity] = reason
            pending = list(self._pending.items())
        for call_id, handle in pending:
            for index, target in enumerate(handle.targets):
                if target.identity == identity:
                    handle.fill(index, Lost(PeerDiedError(f"{target.name} died during a call: {reason}")))
            self._drop_if_done(call_id, handle)

    def _on_reply(self, frames: Frames) -> None:
        call_id, index, is_error, seconds, timers = pickle.loads(frames[0])
        handle = self._pending.get(call_id)
        if handle is None:
            return  # the peer was declared dead meanwhile
        payload = frames[1:]
        decode = _nothing if payload[-1] == _NO_RESULT else functools.partial(self.unpack, payload)
        handle.fill(index, Reply(is_error, seconds, timers, decode, handle.targets[index]))
        self._drop_if_done(call_id, handle)

    def _drop_if_done(self, call_id: int, handle: Handle) -> None:
        if handle.done():
            self._pending.pop(call_id, None)


def _refuse(_: Frames) -> Any:
    raise AssertionError("a reply arrived before the process was open")


def _nothing() -> None:
    """What most methods return."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrived. `identity` and `node_id` are the caller's; `reply_to` is its mailbox."""

    call_id: int
    method: str
    is_concurrent: bool
    reply_to: str
    identity: str
    node_id: str
    index: int
    """Which of the call's ranks this one is."""
    payload: Frames = field(repr=False)

    @staticmethod
    def read(frames: Frames) -> Call:
        """From the frames after the kind."""
        meta: list[Any] = [*pickle.loads(frames[0]), int.from_bytes(frames[1], "little"), frames[2:]]
        return Call(*meta)

    def answer(
        self, context: RuntimeContext, value: object, seconds: float, timers: Mapping[str, float]
    ) -> None:
        """Send a result."""
        self._reply(context, False, seconds, timers, context.parcels.pack(wire.encode(value), [self]))

    def fail(
        self, context: RuntimeContext, error: BaseException, seconds: float, timers: Mapping[str, float]
    ) -> None:
        """Send an exception: its text and traceback always, the object itself where it can travel."""
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        try:
            encoded = wire.encode((text, trace, error))
            wire.copy_through(error)  # some exceptions pickle but do not unpickle
        except Exception:  # noqa: BLE001  boundary: user exceptions may fail in any way
            encoded = wire.encode((text, trace, None))
        self._reply(context, True, seconds, timers, pack_inline(encoded))

    def _reply(
        self,
        context: RuntimeContext,
        is_error: bool,
        seconds: float,
        timers: Mapping[str, float],
        frames: Sequence[Any],
    ) -> None:
        meta = pickle.dumps((self.call_id, self.index, is_error, seconds, dict(timers)))
        context.mailbox.post(self.reply_to, [REPLY, meta, *frames])


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> wire.Encoded:
    """A call's arguments, ready to be packed for those who are called."""
    return wire.encode((args, dict(kwargs)))
