"""One remote call, at the caller: what travels to a process and back, and what is kept meanwhile (called.py: the rest).

    caller                                                    process of the called ranks
    CallBook.call ──[call, meta, header, buffers…]──▶ work inbox (each rank's calls in order), or mailbox
                                                      (@concurrent, a thread each)
    LinePump, or  ◀──[reply, meta, …]── Answers ◀── ranks
    mailbox ─▶ Handle slots ─▶ Handle.wait

Ordered calls inside a node go over lines (line.py); between nodes, and for @concurrent methods, over the mailbox.
Answers take the caller's line where it has one.

A caller is any process: the driver, or a worker that was given a group. A call to several ranks of one process is one
message, and so is its answer: small results wait for each other; a failure, or a result with large buffers, goes at
once.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from rill.errors import PeerDiedError, RillError, WorkerError
from rill.runtime.context import WorkerAddress
from rill.runtime.process.line import Line
from rill.runtime.process.line_pump import LinePump
from rill.runtime.process.mailbox import Frames, Mailbox
from rill.runtime.process.work_inbox import connect
from rill.runtime.transfer import wire

CALL, REPLY, STOP = b"call", b"reply", b"stop"


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process and the ranks of one group in it, as callers see it."""

    addresses: tuple[WorkerAddress, ...]
    """Of its ranks, in order. Most processes have one."""
    work_path: str
    """Where processes of its node open a line for ordered calls."""
    work_tcp_endpoint: str
    """Where processes of other nodes send ordered calls."""

    @property
    def identity(self) -> str:
        return self.addresses[0].identity

    @property
    def process_identity(self) -> str:
        return self.identity

    @property
    def node_id(self) -> str:
        return self.addresses[0].node_id


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's part of a call ended."""

    value: Any
    error: RillError | None
    seconds: float
    """Time inside the method, on the worker."""
    timers: Mapping[str, float]
    """Seconds by the name given to `Worker.timer`, summed over the call."""


class Slots(Protocol):
    """Where outcomes go."""

    def fill(self, outcomes: Sequence[tuple[int, Reply | Lost]]) -> None: ...


_NO_RESULT = wire.encode(None).header


class Reply:
    """One rank's answer as it arrived; decoded once, in the thread that first wants it."""

    __slots__ = ("_address", "_frames", "_unpack", "_value", "is_error", "seconds", "timers")

    def __init__(
        self,
        is_error: bool,
        seconds: float,
        timers: Mapping[str, float],
        frames: Frames,
        address: WorkerAddress,
        unpack: Callable[[Frames], Any],
    ) -> None:
        self.is_error = is_error
        self.seconds = seconds
        self.timers = timers
        self._frames: Frames | None = frames
        self._address = address
        self._unpack = unpack
        self._value: Any = None

    def value(self) -> Any:
        """The result; for a failure, the error to raise."""
        frames, self._frames = self._frames, None
        if frames is not None and frames[-1] != _NO_RESULT:  # most methods return nothing
            value = self._unpack(frames)
            self._value = self._error(*value) if self.is_error else value
        return self._value

    def outcome(self) -> Outcome:
        value = self.value()
        if self.is_error:
            return Outcome(None, value, self.seconds, self.timers)
        return Outcome(value, None, self.seconds, self.timers)

    def _error(self, message: str, remote_traceback: str, cause: BaseException | None) -> WorkerError:
        address = self._address
        error = WorkerError(
            message, group=address.group, rank=address.rank, remote_traceback=remote_traceback
        )
        error.__cause__ = cause
        return error


class Lost:
    """In the place of an answer that will not come."""

    __slots__ = ("_error",)
    is_error = True
    seconds = 0.0
    timers: Mapping[str, float] = MappingProxyType({})

    def __init__(self, error: RillError) -> None:
        self._error = error

    def value(self) -> RillError:
        return self._error

    def outcome(self) -> Outcome:
        return Outcome(None, self._error, self.seconds, self.timers)


class _Pending:
    """A call that a process has not answered whole."""

    __slots__ = ("addresses", "host", "indices", "num_left", "slots")

    def __init__(
        self, host: str, addresses: Sequence[WorkerAddress], slots: Slots, indices: Sequence[int]
    ) -> None:
        self.host = host
        self.addresses = addresses
        self.slots = slots
        self.indices: list[int | None] = list(indices)
        """The slot of each called rank; None once it has answered."""
        self.num_left = len(self.indices)

    def take(self, position: int) -> int | None:
        index, self.indices[position] = self.indices[position], None
        self.num_left -= index is not None
        return index

    def left(self) -> list[tuple[int, WorkerAddress]]:
        return [
            (index, address)
            for index, address in zip(self.indices, self.addresses, strict=True)
            if index is not None
        ]


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
        self._lines: dict[str, Line] = {}
        """To processes of this node, by identity; made at the first call, closed at their death."""
        self._lock = threading.Lock()
        self.pump = LinePump(lambda frames: self._on_reply(frames[1:]), lambda: bool(self._pending))
        mailbox.on(REPLY, self._on_reply)

    def call(
        self,
        host: HostProcess,
        method: str,
        payload: Frames,
        slots: Slots,
        indices: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        concurrent: bool = False,
    ) -> None:
        """Call ranks of one process, all of them or those at `positions`; outcomes go to `indices` of `slots`."""
        addresses = host.addresses if positions is None else [host.addresses[n] for n in positions]
        pending = _Pending(host.identity, addresses, slots, indices)
        call_id = next(self._ids)
        with self._lock:
            reason = self._dead.get(host.identity)
            if reason is None:
                self._pending[call_id] = pending
        if reason is not None:
            slots.fill([(i, Lost(PeerDiedError(f"{a.name} is gone: {reason}"))) for i, a in pending.left()])
            return
        caller = self._caller
        reply_to = caller.endpoint_from(host.node_id)
        meta = (call_id, method, reply_to, caller.process_identity, caller.node_id, positions)
        frames = [CALL, pickle.dumps(meta), *payload]
        if concurrent:
            self._mailbox.post(host.addresses[0].endpoint_from(caller.node_id), frames)
            self.pump.called()  # it is answered on the line, where there is one
        else:
            self._send(host, frames)

    def stop(self, host: HostProcess) -> None:
        """Ask a process to end, after the calls before."""
        self._send(host, [STOP])

    def peer_died(self, identity: str, reason: str) -> None:
        """Fail every call that waits for `identity`, the first rank of a process, and every later one."""
        with self._lock:
            self._dead[identity] = reason
            lost = {i: p for i, p in self._pending.items() if p.host == identity}
            for call_id in lost:
                del self._pending[call_id]
            line = self._lines.pop(identity, None)
        if line is not None:
            self.pump.drop(line)
        for pending in lost.values():
            pending.slots.fill(
                [
                    (i, Lost(PeerDiedError(f"{a.name} died during a call: {reason}")))
                    for i, a in pending.left()
                ]
            )

    def close(self) -> None:
        """Drop the lines; what has not been answered will not be."""
        self.pump.close()

    def _send(self, host: HostProcess, frames: Frames) -> None:
        if host.node_id != self._caller.node_id:
            self._mailbox.post(host.work_tcp_endpoint, frames)
            return
        line = self._lines.get(host.identity) or self._connect(host)
        if line is not None:
            line.send(frames)
        self.pump.called()

    def _connect(self, host: HostProcess) -> Line | None:
        """None: the process is gone, and its death is on its way."""
        with self._lock:
            line = self._lines.get(host.identity)
            if line is None and host.identity not in self._dead:
                line = connect(host.work_path, self.pump.flush_later)
                if line is not None:
                    self._lines[host.identity] = line
                    self.pump.add(line)
            return line

    def _on_reply(self, frames: Frames) -> None:
        call_id, entries, headers = pickle.loads(frames[0])
        with self._lock:
            pending = self._pending.get(call_id)
            if pending is None:
                return  # the peer was declared dead meanwhile
            indices = [pending.take(entry[0]) for entry in entries]
            if pending.num_left == 0:
                del self._pending[call_id]
        addresses, unpack = pending.addresses, self.unpack
        outcomes: list[tuple[int, Reply | Lost]] = []
        for n, (position, is_error, seconds, timers) in enumerate(entries):
            parcel = [b"", headers[n]] if headers else frames[1:]
            index = indices[n]
            assert index is not None, "a rank answers once"
            outcomes.append((index, Reply(is_error, seconds, timers, parcel, addresses[position], unpack)))
        pending.slots.fill(outcomes)


def _refuse(_: Frames) -> Any:
    raise AssertionError("a reply arrived before the process was open")


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> wire.Encoded:
    """A call's arguments, ready to be packed for those who are called."""
    return wire.encode((args, dict(kwargs)))
