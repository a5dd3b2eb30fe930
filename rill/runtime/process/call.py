"""One remote call, at both ends: what travels to a rank and back, and what the caller keeps meanwhile.

    caller                                            called process
    Calls.call ──[call, meta, header, buffers…]──▶ inbox thread ──▶ main thread, in order (@concurrent: a thread each)
    Handle ◀── inbox thread ◀──[reply, meta, …]── Call.answer

A caller is any process: the driver, or a worker that was given a group.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rill.errors import WorkerError, in_words
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle, Outcome
from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer import wire
from rill.runtime.transfer.parcel import pack_inline

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

CALL, REPLY = b"call", b"reply"
MAX_CAUSES = 20
"""Of an exception, that travel with it."""


class Call(msgspec.Struct, array_like=True, gc=False):
    """A call on its way to one rank."""

    call_id: int
    index: int
    """Which of the call's ranks this one is."""
    method: str
    is_concurrent: bool
    identity: str
    """The caller's."""
    sender: str = ""
    """Its mailbox, as the message has it."""
    payload: list[Any] = []
    """The arguments, which travel beside this record."""
    seconds: float = 0.0
    timers: dict[str, float] = {}
    """Measured where it ran, and told with the answer."""

    @staticmethod
    def read(sender: str, frames: Frames) -> Call:
        call = _decode_call(frames[0])
        call.sender, call.payload = sender, frames[1:]
        return call

    def answer(self, context: RuntimeContext, value: object) -> None:
        encoded = _NOTHING if value is None else wire.encode(value)
        self._reply(context, context.parcels.pack(encoded, [self.identity]))

    def answer_at_once(self, context: RuntimeContext, value: object = None) -> None:
        """As `answer`, for the runtime's own: waits for nothing, not even for shared memory."""
        self._reply(context, pack_inline(wire.encode(value)))

    def fail(self, context: RuntimeContext, error: BaseException) -> None:
        """Send an exception: its text and traceback always, the object itself and its causes where they can travel."""
        encoded = wire.encode((in_words(error), _trace_of(error), _chain_of(error)))
        self._reply(context, pack_inline(encoded), is_error=True)

    def _reply(self, context: RuntimeContext, payload: Frames, *, is_error: bool = False) -> None:
        answer = _encode(_Answer(self.call_id, self.index, is_error, self.seconds, self.timers))
        context.mailbox.post(self.sender, [REPLY, answer, *payload])


class _Answer(msgspec.Struct, array_like=True, gc=False):
    call_id: int
    index: int
    is_error: bool
    seconds: float
    timers: dict[str, float]


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class Calls:
    """The calls that this process waits for. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._mailbox = context.mailbox
        self._node_id, self._identity = context.address.node_id, context.address.identity
        self._parcels = context.parcels
        self._dead = context.directory.dead
        self._ids = itertools.count(1)
        self._pending: dict[int, Handle] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        context.mailbox.on(REPLY, self._on_reply)
        context.directory.on_death(self.peer_died)

    def call(
        self, handle: Handle, method: str, payload: Frames, *, concurrent: bool = False, kind: bytes = CALL
    ) -> None:
        """Call `method` on the targets of `handle`, which gets the outcomes."""
        call_id, identity = next(self._ids), self._identity
        with self._lock:  # who dies from now on finds the handle
            self._pending[call_id] = handle
        if self._is_closed:
            self._give_up()
            return
        dead = self._dead
        for index, target in enumerate(handle.targets):
            if dead and target.identity in dead:
                handle.lose(index, f"is gone: {dead[target.identity]}")
                continue
            call = _encode(Call(call_id, index, method, concurrent, identity))
            self._mailbox.post(target.endpoint_from(self._node_id), [kind, call, *payload])
        self._drop_if_done(call_id, handle)

    def peer_died(self, identity: str, reason: str) -> None:
        """Fail every call that waits for `identity`."""
        with self._lock:
            pending = list(self._pending.items())
        for call_id, handle in pending:
            for index, target in enumerate(handle.targets):
                if target.identity == identity:
                    handle.lose(index, f"died during a call: {reason}")
            self._drop_if_done(call_id, handle)

    def close(self) -> None:
        """Fail every call that still waits, and every later one: nobody hears answers any more."""
        with self._lock:
            self._is_closed = True
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for handle in pending.values():
            for index in range(len(handle.targets)):
                handle.lose(index, "is gone: the cluster was closed")

    def _on_reply(self, sender: str, frames: Frames) -> None:
        answer = _decode_answer(frames[0])
        handle = self._pending.get(answer.call_id)
        if handle is None:
            return  # the peer was declared dead meanwhile
        read = functools.partial(self._parcels.unpack, frames[1:], sender)
        if answer.is_error:
            read = functools.partial(self._read_error, frames[1:], sender, handle.targets[answer.index])
        handle.fill(answer.index, Outcome(answer.is_error, answer.seconds, answer.timers, read))
        self._drop_if_done(answer.call_id, handle)

    def _read_error(self, payload: Frames, sender: str, target: WorkerAddress) -> WorkerError:
        message, remote_traceback, chain = self._parcels.unpack(payload, sender)
        error = WorkerError(message, group=target.group, rank=target.rank, remote_traceback=remote_traceback)
        caused: BaseException = error
        with contextlib.suppress(Exception):  # boundary: a class that is not known here, or cannot be rebuilt
            for header, buffers in chain:
                caused.__cause__ = cause = wire.decode(header, buffers)
                caused = cause
        return error

    def _drop_if_done(self, call_id: int, handle: Handle) -> None:
        if handle.done():
            self._pending.pop(call_id, None)


def _trace_of(error: BaseException) -> str:
    """As Python prints it, but for the causes that a WorkerError came with: its own text has them."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    at: BaseException | None = error
    while part is not None and at is not None:
        if isinstance(at, WorkerError):
            part.__cause__ = None
        is_caused = part.__cause__ is not None
        part, at = (part.__cause__, at.__cause__) if is_caused else (part.__context__, at.__context__)
    return "".join(shown.format()).encode("utf-8", "replace").decode()


def _chain_of(error: BaseException) -> list[tuple[bytes, list[bytes]]]:
    """The exception and its causes, each by itself, up to the first that cannot travel."""
    chain: list[tuple[bytes, list[bytes]]] = []
    at: BaseException | None = error
    with contextlib.suppress(Exception):  # boundary: exceptions of users may fail in any way
        while at is not None and len(chain) < MAX_CAUSES:
            encoded = wire.encode(at)
            chain.append((encoded.header, [bytes(buffer) for buffer in encoded.buffers]))
            at = at.__cause__
    return chain


_NOTHING = wire.encode(None)
_NO_ARGUMENTS = wire.encode(((), {}))
NO_ARGUMENTS = pack_inline(_NO_ARGUMENTS)


class Sealed:
    """An argument that is encoded once for many calls; where it arrives it is the value itself."""

    def __init__(self, value: Any) -> None:
        self._encoded = pickle.dumps(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._encoded,)


_PLAIN = frozenset({bool, int, float, str, Sealed})


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> wire.Encoded:
    """A call's arguments, ready to be packed for those who are called."""
    if not args and not kwargs:
        return _NO_ARGUMENTS
    if not kwargs and _PLAIN.issuperset(map(type, args)):  # without tensors: most calls of a running workflow
        return wire.Encoded(pickle.dumps((args, {}), 5), [])
    return wire.encode((args, dict(kwargs)))
