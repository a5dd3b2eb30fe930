"""A process's line to the hub: requests that are applied exactly once and in order, whatever happens to the hub.

    any thread ──submit, ask, commit──▶ queue ──▶ io thread ──▶ DEALER ──▶ hub
    any thread ◀──────── Asked ──────────────── io thread ◀──────────────── hub     handlers of pushes run on
                                                                                    the io thread
What was submitted while the io thread was busy goes out as one message, and commits that follow each other become one.
A request is kept until the hub has it in its journal; a hub that came back and expects an earlier number is sent
everything from there on again. Silence is broken by a ping while anything is outstanding.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq

from rill.errors import PeerDiedError, RillError, RunError, StuckError
from rill.runtime.hub.messages import Commit, FromHub, Ids, OutKind, Output, Puts, Requests, as_error
from rill.runtime.process.peer import send_or_lose
from rill.runtime.process.session_key import SessionKey

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MAX_REQUESTS_PER_MESSAGE = 512
_PING_S = 0.2
_HEARTBEAT_S = 1.0

ANSWER_S = 30.0
"""What the hub is given to answer what needs no waiting."""
WINDOW_ITEMS = 16384
WINDOW_BYTES = 16 * 1024 * 1024
"""What may be on its way to the hub: more waits in `commit`."""
_ITEMS_PER_COMMIT = 512
_BYTES_PER_COMMIT = 1024 * 1024


@dataclass(slots=True)
class _Request:
    """From its submission until the hub has confirmed it."""

    method: str
    payload: Any
    num_items: int = 0
    """Of a commit: what it puts and finishes."""
    num_bytes: int = 0

    def add(self, done: list[Ids], puts: list[Puts]) -> None:
        commit: Commit = self.payload
        for one in done:
            self.num_items += len(one.ids)
            if commit.done and commit.done[-1].channel == one.channel:
                commit.done[-1].ids += one.ids
            else:
                commit.done.append(one)
        for part in puts:
            self.num_items += len(part.items)
            for item in part.items:
                if item.inline is not None:
                    self.num_bytes += item.num_bytes
            if commit.puts and commit.puts[-1].channel == part.channel:
                commit.puts[-1].items += part.items
            else:
                commit.puts.append(part)


class Asked(Future[T], Generic[T]):
    """An answer of the hub that is on its way. `cancel` stops waiting: false when the answer is there after all; a
    later one goes to `on_late`."""

    def __init__(self, answer: Any = Any, on_late: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.seq = 0
        """The number of the request, from the moment it was submitted."""
        self._type = answer
        self._on_late = on_late

    def arrived(self, body: msgspec.Raw) -> None:
        value = msgspec.msgpack.decode(body, type=self._type)
        try:
            self.set_result(value)
        except InvalidStateError:
            if self._on_late is not None:
                self._on_late(value)

    def failed(self, error: RillError) -> None:
        if not self.done():
            self.set_exception(error)

    def withdraw(self) -> bool:
        """Whatever ended the wait, an interrupt too: an answer that came meanwhile is late. Whether none has come."""
        if self.cancel():
            return True
        if self.exception() is None and self._on_late is not None:
            self._on_late(self.result())
        return False

    def came(self, timeout_s: float) -> bool:
        """Whether the answer, or its failure, is there within the time."""
        try:
            self.exception(max(0.0, timeout_s))
        except TimeoutError:
            return False
        return True


class HubClient:
    """Thread-safe; one per process."""

    def __init__(
        self, endpoint: str, identity: str, key: SessionKey | None = None, address: Any = None
    ) -> None:
        """Who this is, "group[rank]#launch", and where others find it."""
        self.identity = identity
        self.endpoint = endpoint
        self._key = key
        self._lock = threading.Lock()
        """Guards the order of what is submitted, and the window."""
        self._confirmed = threading.Condition(self._lock)
        self._requests: deque[_Request] = deque()
        """All that the hub has not confirmed."""
        self._first_seq = 1
        """Of the first of these."""
        self._num_sent = 0
        """Of these, from the first on."""
        self._last: _Request | None = None
        """The last of these, while it is a commit that was not sent: the next may join it."""
        self._unconfirmed_items = 0
        self._unconfirmed_bytes = 0
        self._received_out = 0
        self._resent = (0, 0.0)
        self._asked: dict[int, Asked[Any]] = {}
        self._handlers: dict[str, list[Callable[[Any], None]]] = {}
        self._tickers: list[Callable[[float], float]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)
        self._is_awake = False
        self._is_closing = False
        self._ended_reason = self._abandoned = ""
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"rill-hub-{identity}", daemon=True)
        self.submit("registry.join", address)

    def start(self) -> Self:
        """Begin to send and to hear, once everybody listens: the hub tells a newcomer who has died before it came."""
        self._thread.start()
        return self

    # --- requests -----------------------------------------------------------------------------------------

    def submit(self, method: str, payload: Any) -> None:
        self._submit(method, payload, None)

    def ask(
        self, method: str, payload: Any, answer: Any = Any, on_late: Callable[[Any], None] | None = None
    ) -> Asked[Any]:
        """Send; the answer comes to what is returned. `on_late` gets one that comes after `cancel`."""
        asked: Asked[Any] = Asked(answer, on_late)
        self._submit(method, payload, asked)
        return asked

    def call(self, method: str, payload: Any, timeout_s: float = ANSWER_S, answer: Any = Any) -> Any:
        """Ask and wait. Applied once even when the hub dies in between."""
        asked = self.ask(method, payload, answer)
        if not asked.came(timeout_s) and asked.cancel():
            self._asked.pop(asked.seq, None)
            raise StuckError(f"{self.identity}: the hub did not answer {method} within {timeout_s:g} s")
        return asked.result()

    def commit(self, done: list[Ids], puts: list[Puts], deadline_s: float) -> bool:
        """Finish and put, all or nothing, without an answer. False: too much was on its way until the deadline, and
        nothing was sent."""
        with self._lock:
            while self._unconfirmed_items >= WINDOW_ITEMS or self._unconfirmed_bytes >= WINDOW_BYTES:
                self._check_open()
                self._confirmed.wait(min(1.0, deadline_s - time.monotonic()))
                if time.monotonic() >= deadline_s:
                    return False
            self._check_open()
            last = self._last
            if last is None or last.num_items >= _ITEMS_PER_COMMIT or last.num_bytes >= _BYTES_PER_COMMIT:
                last = _Request("broker.commit", Commit([], []))
                self._add(last)
                self._last = last
            num_items, num_bytes = last.num_items, last.num_bytes
            last.add(done, puts)
            self._unconfirmed_items += last.num_items - num_items
            self._unconfirmed_bytes += last.num_bytes - num_bytes
        self.wake()
        return True

    @property
    def has_unconfirmed(self) -> bool:
        return self._unconfirmed_items > 0

    def sync(self, timeout_s: float = ANSWER_S) -> None:
        """Return when the hub has everything that was submitted so far."""
        self.call("registry.sync", None, timeout_s)

    def _submit(self, method: str, payload: Any, asked: Asked[Any] | None) -> None:
        try:  # what the wire has no form for fails here, in its sender's thread
            request = _Request(method, msgspec.Raw(self._encoder.encode(payload)))
        except (TypeError, OverflowError) as error:
            raise RunError(f"{self.identity}: {method} cannot be sent to the hub: {error}") from error
        with self._lock:
            self._check_open()
            if asked is not None:
                asked.seq = self._first_seq + len(self._requests)
                self._asked[asked.seq] = asked
            self._add(request)
        self.wake()

    def _add(self, request: _Request) -> None:
        self._last = None
        self._requests.append(request)

    def _check_open(self) -> None:
        if self._ended_reason:
            raise RunError(f"{self.identity} has no hub any more: {self._ended_reason}")

    # --- pushes -------------------------------------------------------------------------------------------

    def on(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Run `handler(body)` on the io thread for every push of the hub on `topic`. It must not block."""
        self._handlers.setdefault(topic, []).append(handler)

    def add_ticker(self, ticker: Callable[[float], float]) -> None:
        """Have `ticker(now_s)` called on the io thread; it returns in how many seconds it wants to be called again."""
        self._tickers.append(ticker)
        self.wake()

    def remove_ticker(self, ticker: Callable[[float], float]) -> None:
        self._tickers = [other for other in self._tickers if other != ticker]

    def abandon(self, reason: str) -> None:
        """There will be no hub any more: every wait for it fails with `reason`, now and from now on."""
        self._abandoned = reason
        self.wake()

    def close(self) -> None:
        """Send what is queued, leave the run, end the thread. Bounded: a dead hub costs a second."""
        if self._is_closing:
            return
        if not self._ended_reason:
            self.submit("registry.leave", None)
        self._is_closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    # --- the io thread ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the io thread look at what there is to send, and at its tickers, now."""
        # The io thread itself is awake, and sends last.
        if not self._is_awake and threading.get_ident() != self._thread.ident:
            self._is_awake = True
            with contextlib.suppress(OSError):  # the client is closed
                os.eventfd_write(self._wake_up, 1)

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
        poller.register(self._wake_up, zmq.POLLIN)
        last_sent_s = time.monotonic()
        wait_s = 0.0
        close_by_s = float("inf")
        while True:
            ready = dict(poller.poll(int(1000 * wait_s + 0.5)))
            if self._wake_up in ready:
                os.eventfd_read(self._wake_up)
                self._is_awake = False
            if socket in ready:
                self._receive(socket)
            if self._abandoned and not self._ended_reason:
                self._fail_all(self._abandoned)
            now_s = time.monotonic()
            next_ticks_s = [self._guard(ticker, now_s) or _HEARTBEAT_S for ticker in self._tickers]
            ping_s = _PING_S if self._requests or self._asked else _HEARTBEAT_S
            if self._send(socket, is_due=now_s - last_sent_s >= ping_s):
                last_sent_s = now_s
            wait_s = min([ping_s, *next_ticks_s])
            if self._is_closing:
                close_by_s = min(close_by_s, now_s + 1.0)
                if not self._requests or now_s > close_by_s or self._ended_reason:
                    break
                wait_s = min(wait_s, 0.02)
        self._fail_all("it was closed")
        self._is_awake = True  # finalizers that come later wake nobody
        socket.close()
        context.term()
        os.close(self._wake_up)

    def _send(self, socket: zmq.Socket[bytes], *, is_due: bool) -> bool:
        """Whether there was anything; where a message is due and there is nothing, it is a ping."""
        has_sent = False
        while self._num_sent < len(self._requests) or (is_due and not has_sent):
            with self._lock:
                until = self._num_sent + _MAX_REQUESTS_PER_MESSAGE
                requests = list(islice(self._requests, self._num_sent, until))
                if until >= len(self._requests):
                    self._last = None  # what is on its way is not added to
            pairs: list[Any] = [(request.method, request.payload) for request in requests]
            message = Requests(self._first_seq + self._num_sent, self._received_out, pairs)
            send_or_lose(socket, self.endpoint, self._encoder.encode(message))
            self._num_sent += len(requests)
            has_sent = True
        return has_sent

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = self._decoder.decode(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Output):
                self._take_output(message)
            else:
                self._go_back(message.expected)

    def _take_output(self, output: Output) -> None:
        self._confirm(output.expected)
        for out, kind, ref, body in output.entries:
            if out != self._received_out + 1:
                continue  # seen already, or one before it was lost: the next ping brings both
            self._received_out = out
            if kind is OutKind.PUSH:
                value = msgspec.msgpack.decode(body)
                for handler in self._handlers.get(str(ref), ()):
                    self._guard(handler, value)
                continue
            assert isinstance(ref, int)
            asked = self._asked.pop(ref, None)
            if asked is None:
                continue
            if kind is OutKind.FAILURE:
                asked.failed(as_error(*msgspec.msgpack.decode(body, type=tuple[str, str])))
            else:
                self._guard(asked.arrived, body)

    def _confirm(self, expected: int) -> None:
        if self._first_seq >= expected:
            return
        with self._lock:
            while self._num_sent and self._first_seq < expected:
                confirmed = self._requests.popleft()
                self._first_seq += 1
                self._num_sent -= 1
                self._unconfirmed_items -= confirmed.num_items
                self._unconfirmed_bytes -= confirmed.num_bytes
            self._confirmed.notify_all()

    def _go_back(self, expected: int) -> None:
        """The hub lacks something that was sent before what it got: it died with it. Send again from there on."""
        if expected < self._first_seq:
            self._fail_all("the hub takes this process for dead, or its journal is gone")
            return
        now_s = time.monotonic()
        if expected == self._resent[0] and now_s < self._resent[1] + 0.05:
            return  # several gaps are reported for one loss
        self._resent = (expected, now_s)
        self._confirm(expected)
        self._num_sent = 0

    def _guard(self, handler: Callable[..., Any], *args: Any) -> Any:
        """An error of a handler or a ticker must not end the io thread: it is logged, with its traceback."""
        try:
            return handler(*args)
        except Exception:  # noqa: BLE001  boundary: handlers are others' code
            _log.exception("%s: handler %r failed", self.identity, handler)
            return None

    def _fail_all(self, reason: str) -> None:
        error: RillError = PeerDiedError(f"{self.identity} has no hub any more: {reason}")
        with self._lock:
            self._ended_reason = reason
            asked = list(self._asked.values())
            self._asked.clear()
            self._requests.clear()
            self._num_sent = 0
            self._last = None
            self._confirmed.notify_all()
        for one in asked:
            one.failed(error)
