"""A process's line to the hub: calls that are applied exactly once and in order, whatever happens to the hub.

    any thread ──submit──▶ queue ──▶ io thread ──▶ DEALER ──▶ hub
    any thread ◀─Pending.wait── io thread ◀────────────────── hub      handlers of pushes and notes run on the io thread

What was submitted while the io thread was busy goes out as one message, so many small calls cost few messages. A
request is kept until the hub has confirmed it in its journal; when the hub says it expects an earlier number than was
sent (it died and came back), everything from there on is sent again. Silence is broken by a ping while anything is
outstanding, so a restarted hub hears from its clients at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.hub.answer import Pending, as_error, set_if_open
from rill.runtime.hub.state import FAILURE, PUSH
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.waits import answer_dumps

_log = logging.getLogger(__name__)
_MAX_REQUESTS_PER_MESSAGE = 512
_PING_S = 0.2
_HEARTBEAT_S = 1.0


class _Sent:
    """A request that the hub has not confirmed."""

    __slots__ = ("on_confirm", "request")

    def __init__(self, request: tuple[str, Any], on_confirm: Callable[[], None] | None) -> None:
        self.request = request
        self.on_confirm = on_confirm


class HubClient:
    """Thread-safe; one per process (or per worker thread). `identity` is "group[rank]#launch"."""

    def __init__(self, endpoint: str, identity: str, key: SessionKey | None = None) -> None:
        self.identity = identity
        self.endpoint = endpoint
        self._key = key
        self._queue: deque[tuple[str, Any, Pending | None, Callable[[], None] | None]] = deque()
        self._sent: deque[_Sent] = deque()
        self._first_sent = 1
        self._next_seq = 1
        self._received_out = 0
        self._resent = (0, 0.0)
        self._pending: dict[int, Pending] = {}
        self._queries: dict[int, tuple[Pending, bytes]] = {}
        self._query_ids = itertools.count(1)
        self._handlers: dict[str, list[Callable[[Any], None]]] = {}
        self._note_handlers: dict[str, Callable[[str, Any], None]] = {}
        self._tickers: list[Callable[[float], float]] = []
        self._direct: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder()
        self._is_awake = False
        self._is_closing = False
        self._ended_reason = self._abandoned = ""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name=f"rill-hub-{identity}", daemon=True)
        self.submit("registry.join", {"pid": os.getpid()})
        answer_dumps(self)
        self._thread.start()
        atexit.register(self.close)

    # --- calls --------------------------------------------------------------------------------------------

    def call(self, service: str, method: str, payload: Any, timeout_s: float) -> Any:
        """Ask for a change and wait for its answer. Applied once even when the hub dies in between."""
        pending = Pending()
        self.submit(f"{service}.{method}", payload, pending)
        return self._await(pending, f"{service}.{method}", timeout_s)

    def fetch(self, key: str, timeout_s: float) -> Any:
        """A published value; waits until somebody publishes it."""
        pending = Pending()
        self.submit("registry.fetch", key, pending)
        if not pending.wait(timeout_s):
            self.submit("registry.cancel_fetch", [key, pending.seq])
            raise self._stuck(f"registry.fetch({key!r})", timeout_s)
        return pending.result()

    def query(self, service: str, method: str, payload: Any, timeout_s: float) -> Any:
        """A read-only question: cheaper than a call, and unordered with respect to calls."""
        pending = Pending()
        query_id = next(self._query_ids)
        raw = self._encoder.encode(["q", query_id, f"{service}.{method}", payload])
        self._queries[query_id] = (pending, raw)
        self._direct.append(raw)
        self._wake()
        try:
            return self._await(pending, f"{service}.{method}", timeout_s)
        finally:
            self._queries.pop(query_id, None)

    def submit(
        self,
        method: str,
        payload: Any,
        pending: Pending | None = None,
        on_confirm: Callable[[], None] | None = None,
    ) -> None:
        """Send without waiting. A callable payload is asked for its value when the message is made (None: skip)."""
        if self._ended_reason:
            raise RunError(f"{self.identity} has no hub any more: {self._ended_reason}")
        self._queue.append((method, payload, pending, on_confirm))
        self._wake()

    def future(self) -> tuple[Pending, asyncio.Future[None]]:
        """A Pending whose arrival also ends a future of the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def arrived(_: Pending) -> None:
            # The loop may have ended with its caller; its answer then finds nobody, and this thread must live on.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_if_open, future)

        return Pending(arrived), future

    # --- pushes and notes ---------------------------------------------------------------------------------

    def on(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Run `handler(body)` on the io thread for every push of the hub on `topic`. It must not block."""
        self._handlers.setdefault(topic, []).append(handler)

    def notify(self, to: str, topic: str, payload: Any) -> None:
        """A note to another client ("*": all others). Best effort: lost when either end or the hub is down."""
        self._direct.append(self._encoder.encode(["n", to, topic, payload]))
        self._wake()

    def on_note(self, topic: str, handler: Callable[[str, Any], None]) -> None:
        """Run `handler(sender, payload)` on the io thread for every note on `topic`."""
        self._note_handlers[topic] = handler

    def add_ticker(self, ticker: Callable[[float], float]) -> None:
        """Have `ticker(now_s)` called on the io thread; it returns in how many seconds it wants to be called again."""
        self._tickers.append(ticker)
        self._wake()

    def remove_ticker(self, ticker: Callable[[float], float]) -> None:
        """Undo `add_ticker`."""
        self._tickers = [other for other in self._tickers if other != ticker]

    def wake(self) -> None:
        """Have the io thread look at its tickers now."""
        self._wake()

    def abandon(self, reason: str) -> None:
        """There will be no hub any more: every wait for it fails with `reason`, now and from now on."""
        self._abandoned = reason
        self._wake()

    def close(self) -> None:
        """Send what is queued, leave the run, end the thread. Bounded: a dead hub costs a second."""
        if self._is_closing:
            return
        atexit.unregister(self.close)
        if not self._ended_reason:
            self.submit("registry.leave", None)
        self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _await(self, pending: Pending, what: str, timeout_s: float) -> Any:
        if not pending.wait(timeout_s):
            raise self._stuck(what, timeout_s)
        return pending.result()

    def _stuck(self, what: str, timeout_s: float) -> StuckError:
        return StuckError(f"{self.identity}: the hub did not answer {what} within {timeout_s:g} s")

    # --- the io thread ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if (
            not self._is_awake and threading.get_ident() != self._thread.ident
        ):  # that one is awake, and sends last
            self._is_awake = True
            with contextlib.suppress(OSError):  # the pipe is full of wake-ups, or the client is closed
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity.encode())
        socket.setsockopt(zmq.LINGER, 300)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._key is not None and not self.endpoint.startswith("ipc:"):
            self._key.present(socket)
        socket.connect(self.endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        last_heard_s = last_sent_s = time.monotonic()
        wait_s = 0.0
        close_by_s = float("inf")
        while True:
            ready = dict(poller.poll(int(1000 * wait_s + 0.5)))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._is_awake = False
            if socket in ready:
                self._receive(socket)
                last_heard_s = time.monotonic()
            if self._abandoned and not self._ended_reason:
                self._fail_all(self._abandoned)
            now_s = time.monotonic()
            wait_s = min([_HEARTBEAT_S, *(ticker(now_s) for ticker in self._tickers)])
            if self._send(socket):
                last_sent_s = now_s
            is_outstanding = bool(self._sent or self._pending or self._queries)
            ping_s = _PING_S if is_outstanding else _HEARTBEAT_S
            if now_s - max(last_sent_s, last_heard_s if is_outstanding else last_sent_s) >= ping_s:
                self._ping(socket)
                last_sent_s = now_s
            if is_outstanding:
                wait_s = min(wait_s, _PING_S)
            if self._is_closing:
                close_by_s = min(close_by_s, now_s + 1.0)
                if (
                    not (self._queue or self._sent or self._direct)
                    or now_s > close_by_s
                    or self._ended_reason
                ):
                    break
                wait_s = min(wait_s, 0.02)
        self._fail_all("it was closed")
        socket.close()
        context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _send(self, socket: zmq.Socket[bytes]) -> bool:
        has_sent = False
        while self._direct:
            socket.send(self._direct.popleft())
            has_sent = True
        while self._queue:
            first_seq = self._next_seq
            requests = self._next_requests()
            if requests:
                socket.send(self._encode_requests(first_seq, requests))
                has_sent = True
        return has_sent

    def _encode_requests(self, first_seq: int, requests: list[tuple[str, Any]]) -> bytes:
        try:
            return self._encoder.encode(["s", first_seq, self._received_out, requests])
        except (TypeError, OverflowError):
            self._replace_unsendable(first_seq, requests)
            return self._encoder.encode(["s", first_seq, self._received_out, requests])

    def _replace_unsendable(self, first_seq: int, requests: list[tuple[str, Any]]) -> None:
        """One request holds something that the wire has no form for: it fails, and an empty one takes its number."""
        for n, (method, payload) in enumerate(requests):
            try:
                self._encoder.encode(payload)
            except (TypeError, OverflowError) as error:
                _log.error("%s: %s cannot be sent: %s", self.identity, method, error)
                requests[n] = ("registry.sync", None)
                self._sent[first_seq + n - self._first_sent].request = requests[n]
                pending = self._pending.pop(first_seq + n, None)
                if pending is not None:
                    pending.finish(None, RunError(f"{method} cannot be sent to the hub: {error}"))

    def _next_requests(self) -> list[tuple[str, Any]]:
        requests: list[tuple[str, Any]] = []
        queue = self._queue
        while queue and len(requests) < _MAX_REQUESTS_PER_MESSAGE:
            method, payload, pending, on_confirm = queue.popleft()
            if callable(payload):
                payload = payload()
                if payload is None:
                    continue
            request = (method, payload)
            requests.append(request)
            self._sent.append(_Sent(request, on_confirm))
            if pending is not None:
                pending.seq = self._next_seq
                self._pending[self._next_seq] = pending
            self._next_seq += 1
        return requests

    def _ping(self, socket: zmq.Socket[bytes]) -> None:
        socket.send(self._encoder.encode(["p", self._received_out, self._next_seq]))
        for _, raw in list(self._queries.values()):
            socket.send(raw)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = self._decoder.decode(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind = message[0]
            if kind == "o":
                self._take_output(message[1], message[2])
            elif kind == "g":
                self._resend(message[1], socket)
            elif kind == "a":
                self._take_answer(*message[1:])
            elif kind == "n":
                handler = self._note_handlers.get(message[2])
                if handler is not None:
                    self._guard(handler, message[1], message[3])
            elif kind == "x":
                self._fail_all("the hub takes this process for dead: it was silent too long, or replaced")

    def _take_output(self, expected: int, entries: list[Any]) -> None:
        sent = self._sent
        while sent and self._first_sent < expected:
            confirmed = sent.popleft()
            self._first_sent += 1
            if confirmed.on_confirm is not None:
                confirmed.on_confirm()
        for out, kind, ref, body in entries:
            if out != self._received_out + 1:
                continue  # seen already, or one before it was lost: the next ping brings both
            self._received_out = out
            if kind == PUSH:
                for handler in self._handlers.get(ref, ()):
                    self._guard(handler, body)
                continue
            pending = self._pending.pop(ref, None)
            if pending is not None:
                pending.finish(body if kind != FAILURE else None, as_error(body) if kind == FAILURE else None)

    def _resend(self, expected: int, socket: zmq.Socket[bytes]) -> None:
        """The hub lacks something that was sent before what it got: it died with it. Go back to there."""
        if expected < self._first_sent:
            self._fail_all("the hub has forgotten this session: its journal is gone")
            return
        now_s = time.monotonic()
        if expected == self._resent[0] and now_s < self._resent[1] + 0.05:
            return  # several gaps are reported for one loss
        self._resent = (expected, now_s)
        self._take_output(expected, [])
        unconfirmed = list(self._sent)
        for start in range(0, len(unconfirmed), _MAX_REQUESTS_PER_MESSAGE):
            requests = [s.request for s in unconfirmed[start : start + _MAX_REQUESTS_PER_MESSAGE]]
            socket.send(self._encoder.encode(["s", self._first_sent + start, self._received_out, requests]))

    def _take_answer(self, query_id: int, is_ok: bool, body: Any) -> None:
        entry = self._queries.pop(query_id, None)
        if entry is not None:
            entry[0].finish(body if is_ok else None, None if is_ok else RunError(str(body)))

    def _guard(self, handler: Callable[..., None], *args: Any) -> None:
        """A handler's error must not end the io thread: it is logged, with its traceback."""
        try:
            handler(*args)
        except Exception:  # noqa: BLE001
            _log.exception("%s: handler %r failed", self.identity, handler)

    def _fail_all(self, reason: str) -> None:
        self._ended_reason = reason
        pending, self._pending = list(self._pending.values()), {}
        queued = [entry[2] for entry in self._queue if entry[2] is not None]
        queries = [entry[0] for entry in self._queries.values()]
        self._queue.clear()
        self._sent.clear()
        for one in pending + queued + queries:
            one.finish(None, PeerDiedError(f"{self.identity} has no hub any more: {reason}"))
