"""The hub's state: reliable streams to every client, and the services behind them, as one deterministic machine.

    client ──seq 1,2,3…──▶ Stream.expected    every request is applied once and in the client's order
    client ◀─out 1,2,3…── Stream.outbox       every reply and push is kept until the client has confirmed it

`Hub` (server.py) feeds it journaled events and sends what it puts into the outboxes. It never reads a clock, a socket
or a file, so replaying the same events rebuilds the same state. A snapshot is a pickle of the machine.

A service is a class whose methods `on_x(client, seq, payload)` handle the requests "service.x"; the payload is decoded
to the type that the handler declares. What the handler returns is the reply; None: it comes later, through
`machine.reply(client, seq, body)`, or never. A client is an identity such as "rollout[3]#0": group, rank and launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from rill.errors import RillError, RunError
from rill.runtime.hub.broker import Broker
from rill.runtime.hub.history import History
from rill.runtime.hub.locks import LockService
from rill.runtime.hub.membership import Membership
from rill.runtime.hub.messages import OutKind, refusal


@dataclass(slots=True)
class Stream:
    expected: int = 1
    next_out: int = 1
    outbox: deque[tuple[int, OutKind, Any, Any]] = field(default_factory=deque)
    """(out number, OutKind, seq or topic, body), unconfirmed ones only."""

    def confirm(self, out: int) -> None:
        outbox = self.outbox
        while outbox and outbox[0][0] <= out:
            outbox.popleft()


class Machine:
    """Services and streams. Apply events in one order and the state is the same."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Time of the event being applied, by the journal's clock."""
        self.num_events = 0
        self.streams: dict[str, Stream] = {}
        self.ended: set[str] = set()
        """Clients that died or left. They are not let back in under the same identity."""
        self.membership = Membership(self)
        self.broker = Broker(self)
        self.locks = LockService(self)
        self.history = History()
        self.touched: set[str] = set()
        """Clients with new output; the hub empties it when it sends."""
        self.unlinks: list[tuple[str, list[str]]] = []
        """(a dead process, its segments that are still needed): the hub deletes the others (segments.py)."""
        self.has_moved_items = False
        """Whether the event being applied changed a channel; the locks look at it at its end."""

    def is_news(self, client: str, first_seq: int, num_requests: int) -> bool:
        """Whether any request of such a batch would be applied now: only then is it worth a journal record."""
        if client in self.ended:
            return False
        return first_seq <= self.expected(client) < first_seq + num_requests

    def expected(self, client: str) -> int:
        return self.streams[client].expected if client in self.streams else 1

    def apply(
        self, client: str, first_seq: int, requests: Sequence[tuple[str, msgspec.Raw]], now_s: float
    ) -> None:
        """Apply what is new of a batch of consecutive requests. Earlier ones were applied already."""
        self.now_s = now_s
        stream = self.streams.get(client)
        if stream is None:
            stream = self.streams[client] = Stream()
        self.touched.add(client)
        for method, payload in requests[stream.expected - first_seq :]:
            seq = stream.expected
            stream.expected = seq + 1
            self.num_events += 1
            try:
                service, handle, decoder = _HANDLERS[method]
                body = handle(getattr(self, service), client, seq, decoder.decode(payload))
            except RillError as error:
                self.fail(client, seq, error)
                continue
            except (KeyError, TypeError, ValueError, IndexError) as error:
                self.fail(client, seq, RunError(f"{method} refused: {error!r}"))
                continue
            if body is not None:
                self.reply(client, seq, body)
            if client in self.ended:
                break
        self._settle()

    def end_client(self, client: str, reason: str) -> None:
        """The process behind `client` is gone: every service takes back what it held."""
        if client in self.ended:
            return
        self.num_events += 1
        self.ended.add(client)
        self.streams.pop(client, None)
        self.touched.discard(client)
        self.membership.end_client(client, reason)
        self.broker.end_client(client)
        self.locks.end_client(client)
        self._settle()

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.num_events += 1
        self.locks.tick()
        self._settle()

    def _settle(self) -> None:
        """At the end of an event: what its changes mean to the locks and to the owners of memory."""
        if self.has_moved_items:
            self.has_moved_items = False
            self.locks.channels_changed()
        self.broker.ledger.tell()

    def reply(self, client: str, seq: int, body: Any) -> None:
        self._out(client, OutKind.REPLY, seq, body)

    def fail(self, client: str, seq: int, error: RillError) -> None:
        self._out(client, OutKind.FAILURE, seq, refusal(error))

    def push(self, client: str, topic: str, body: Any) -> None:
        self._out(client, OutKind.PUSH, topic, body)

    def _out(self, client: str, kind: OutKind, ref: Any, body: Any) -> None:
        stream = self.streams.get(client)
        if stream is None:
            return  # it died while the answer was on its way
        stream.outbox.append((stream.next_out, kind, ref, body))
        stream.next_out += 1
        self.touched.add(client)


def _handlers(prefix: str, attribute: str, service: type) -> Iterator[tuple[str, Any]]:
    """The name of a request -> the attribute of its service, the method that handles it, what decodes its payload."""
    for name in dir(service):
        if name.startswith("on_"):
            method = getattr(service, name)
            *_, payload, _ = get_type_hints(method).values()  # self has none; the last is what it returns
            yield f"{prefix}.{name[3:]}", (attribute, method, msgspec.msgpack.Decoder(payload))


_HANDLERS = {
    **dict(_handlers("registry", "membership", Membership)),
    **dict(_handlers("broker", "broker", Broker)),
    **dict(_handlers("locks", "locks", LockService)),
    **dict(_handlers("history", "history", History)),
}
