"""Messages between processes arrive once and in order, also when the connection below breaks."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from rill.errors import PeerDiedError
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle
from rill.runtime.process.call import CALL, Call, Calls
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.peer import Letter, Peer, tcp_line
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer import wire
from rill.runtime.transfer.parcel import pack_inline
from tests.runtime.leftovers import becomes_true

pytestmark = pytest.mark.timeout(60)

KEY = SessionKey.new()


class CuttingProxy:
    """Passes TCP on to a port; when told to, it swallows what comes for a moment, then cuts all connections."""

    def __init__(self, endpoint: str) -> None:
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._is_swallowing = False
        self.num_swallowed = self.num_cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def begin_to_swallow(self) -> None:
        assert becomes_true(lambda: bool(self._ends))
        self._is_swallowing = True

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        self.num_cut += bool(ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._is_swallowing = False

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._is_swallowing:
                    self.num_swallowed += len(data)
                else:
                    sink.sendall(data)
        source.close()


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    pair = [Mailbox(f"ipc://{tmp_path}/{n}", key=KEY) for n in "ab"]
    yield pair[0], pair[1]
    for box in pair:
        box.close()


def test_messages_arrive_once_and_in_order_over_a_connection_that_is_cut_again_and_again(
    boxes: tuple[Mailbox, Mailbox],
) -> None:
    here, there = boxes
    arrived: list[int] = []
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    for box in boxes:
        box.start()
    proxy = CuttingProxy(there.tcp_endpoint)
    rng = random.Random(0)
    for n in range(600):
        here.post(proxy.endpoint, [b"n", str(n).encode(), bytes(rng.randrange(2000))])
        if n % 200 == 100:
            assert becomes_true(lambda most=n - 50: len(arrived) > most), "it has recovered"
            num_before = proxy.num_swallowed
            proxy.begin_to_swallow()
        if n % 200 == 120:
            assert becomes_true(lambda least=num_before + 1000: proxy.num_swallowed > least)
            proxy.cut()
    assert becomes_true(lambda: len(arrived) >= 600, 30), len(arrived)
    assert proxy.num_cut == 3
    time.sleep(0.1)
    assert arrived == list(range(600))
    proxy.close()


def test_what_was_posted_may_be_changed_at_once_also_when_it_is_sent_again(
    boxes: tuple[Mailbox, Mailbox],
) -> None:
    here, there = boxes
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    there.on(b"n", lambda _, frames: arrived.put(bytes(frames[0])))
    for box in boxes:
        box.start()
    proxy = CuttingProxy(there.tcp_endpoint)
    memory = bytearray(200_000)
    here.post(proxy.endpoint, [b"n", memory])
    assert arrived.get(timeout=20) == memory
    proxy.begin_to_swallow()
    for n in range(5):
        memory[:] = bytes([n]) * len(memory)
        here.post(proxy.endpoint, [b"n", memory])
    assert becomes_true(lambda: proxy.num_swallowed > 100_000)
    proxy.cut()
    for n in range(5):
        assert arrived.get(timeout=20) == bytes([n]) * len(memory)
    proxy.close()


def test_a_sender_keeps_nothing_that_was_confirmed(boxes: tuple[Mailbox, Mailbox]) -> None:
    here, there = boxes
    there.on(b"n", lambda *_: None)
    for box in boxes:
        box.start()
    for _ in range(100):
        here.post(there.endpoint, [b"n"])
    peer = here._peers[there.endpoint]
    assert becomes_true(lambda: not peer.unconfirmed)


def calls_of(mailbox: Mailbox, address: WorkerAddress, dead: dict[str, str]) -> Calls:
    """With as much of a process's surroundings as they need."""
    parcels = SimpleNamespace(unpack=lambda frames, _: wire.decode(frames[1], frames[2:]))
    directory = SimpleNamespace(dead=dead, on_death=lambda _: None)
    context = SimpleNamespace(mailbox=mailbox, address=address, parcels=parcels, directory=directory)
    return Calls(context)  # type: ignore[arg-type]


def test_calls_and_answers_survive_cut_connections_and_run_once(boxes: tuple[Mailbox, Mailbox]) -> None:
    here, there = boxes
    out, back = CuttingProxy(there.tcp_endpoint), CuttingProxy(here.tcp_endpoint)
    here.tcp_endpoint = back.endpoint  # where answers go
    driver = WorkerAddress("driver", 0, "n0", 1, here.endpoint, back.endpoint)
    worker = WorkerAddress("w", 0, "n1", 1, there.endpoint, out.endpoint)
    calls = calls_of(here, driver, {})
    ran: list[int] = []

    class There:
        """As much of the called process's surroundings as an answer needs."""

        mailbox = there

        class parcels:
            @staticmethod
            def pack(encoded: wire.Encoded, _: Any) -> list[Any]:
                return pack_inline(encoded)

    def serve(sender: str, frames: list[Any]) -> None:
        call = Call.read(sender, frames)
        ((n,), _) = wire.decode(call.payload[1], call.payload[2:])
        ran.append(n)
        call.answer(There, n + 1, 0.0, {})  # type: ignore[arg-type]

    there.on(CALL, serve)
    for box in boxes:
        box.start()
    handles = []
    for n in range(300):
        handle = Handle("w.plus", [worker])
        calls.call(handle, "plus", pack_inline(wire.encode(((n,), {}))))
        handles.append(handle)
        if n % 100 == 50:
            assert handle.wait(30) == [n + 1]
            for proxy in (out, back):
                proxy.begin_to_swallow()
        if n % 100 == 70:
            for proxy in (out, back):
                proxy.cut()
    assert [handle.wait(30) for handle in handles] == [[n + 1] for n in range(300)]
    assert ran == list(range(300))
    out.close()
    back.close()


def test_a_call_to_the_dead_fails_and_so_does_one_that_waits_for_them(boxes: tuple[Mailbox, Mailbox]) -> None:
    here, there = boxes
    for box in boxes:
        box.start()
    dead: dict[str, str] = {}
    calls = calls_of(here, WorkerAddress("driver", 0, "n0", 1, here.endpoint), dead)
    targets = [WorkerAddress("w", n, "n0", 1, there.endpoint) for n in range(2)]
    there.on(CALL, lambda *_: None)
    waiting = Handle("w.m", targets)
    calls.call(waiting, "m", [b"", b""])
    dead["w[1]#0"] = "lightning"
    calls.peer_died("w[1]#0", "lightning")
    with pytest.raises(PeerDiedError, match=r"w\[1\] died during a call: lightning"):
        waiting.wait(5)
    later = Handle("w.m", targets[1:])
    calls.call(later, "m", [b"", b""])
    with pytest.raises(PeerDiedError, match=r"w\[1\] is gone: lightning"):
        later.wait(5)


def test_another_process_at_the_same_address_is_another_stream() -> None:
    peer = Peer(tcp_line(zmq.Context.instance(), "tcp://127.0.0.1:1", None), "")
    for token in (b"the first", b"another"):
        for seq in range(1, 4):
            letter = Letter(token, bytes(8), 0, seq, "", [], 0)
            assert peer.is_next(letter)
            assert not peer.is_next(letter), "twice"
    peer.close(linger_ms=0)
