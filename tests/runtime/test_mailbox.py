"""Messages between processes arrive once and in order, also when the connection below breaks."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rill.errors import PeerDiedError
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle
from rill.runtime.process.call import CALL, Call, Calls
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.peer import Letter, Peer
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer import wire
from rill.runtime.transfer.parcel import pack_inline
from tests.runtime.hub_fakes import Stranger
from tests.runtime.leftovers import becomes_true

pytestmark = pytest.mark.timeout(60)

KEY = SessionKey.new()


class CuttingProxy:
    """Stands before a mailbox; when told to, it swallows what comes for a moment, then cuts all connections. Or it cuts
    them once, after so many bytes."""

    def __init__(self, endpoint: str) -> None:
        if endpoint.startswith("ipc:"):
            self._family, target = socket.AF_UNIX, endpoint.removeprefix("ipc://")
            self._target: Any = target
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(target + "-proxy")
            self._listener.listen()
            self.endpoint = endpoint + "-proxy"
        else:
            self._family = socket.AF_INET
            self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._is_swallowing = False
        self.num_swallowed = self.num_passed = self.num_cut = 0
        self.cut_after = math.inf
        threading.Thread(target=self._accept, daemon=True).start()

    def go_to(self, endpoint: str) -> None:
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))

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
                far = socket.socket(self._family)
                far.connect(self._target)
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
                    self.num_passed += len(data)
                if self.num_passed >= self.cut_after:
                    self.cut_after = math.inf
                    self.cut()
        source.close()


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    pair = [Mailbox(f"ipc://{tmp_path}/{n}", key=KEY) for n in "ab"]
    yield pair[0], pair[1]
    for box in pair:
        box.close()


@pytest.fixture(params=["tcp", "ipc"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def endpoint_of(box: Mailbox, way: str) -> str:
    return box.tcp_endpoint if way == "tcp" else box.endpoint


def test_messages_arrive_once_and_in_order_over_a_connection_that_is_cut_again_and_again(
    boxes: tuple[Mailbox, Mailbox], way: str
) -> None:
    here, there = boxes
    arrived: list[int] = []
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    for box in boxes:
        box.start()
    proxy = CuttingProxy(endpoint_of(there, way))
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
    boxes: tuple[Mailbox, Mailbox], way: str
) -> None:
    here, there = boxes
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    there.on(b"n", lambda _, frames: arrived.put(bytes(frames[0])))
    for box in boxes:
        box.start()
    proxy = CuttingProxy(endpoint_of(there, way))
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


def test_a_connection_cut_in_the_middle_of_a_large_message_loses_and_doubles_nothing(
    boxes: tuple[Mailbox, Mailbox],
) -> None:
    here, there = boxes
    arrived: list[bytes] = []
    there.on(b"n", lambda _, frames: arrived.append(frames[0]))
    for box in boxes:
        box.start()
    proxy = CuttingProxy(there.endpoint)
    proxy.cut_after = 8_000_000
    large = [bytes([n]) * 16_000_000 for n in range(3)]
    for one in large:
        here.post(proxy.endpoint, [b"n", one])
    assert becomes_true(lambda: len(arrived) >= 3)
    time.sleep(0.1)
    assert arrived == large
    assert proxy.num_cut == 1 and proxy.num_passed > sum(map(len, large)) + 7_000_000, "half of it went twice"
    proxy.close()


def test_a_process_that_does_not_read_holds_up_nobody_and_gets_everything_later(
    boxes: tuple[Mailbox, Mailbox], tmp_path: Path
) -> None:
    here, there = boxes
    other = Mailbox(f"ipc://{tmp_path}/c")
    arrived: list[int] = []
    heard = threading.Event()
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    other.on(b"n", lambda *_: heard.set())
    here.start()
    other.start()
    started_s = time.monotonic()
    for n in range(3000):
        here.post(there.endpoint, [b"n", str(n).encode(), bytes(10_000)])
    here.post(other.endpoint, [b"n"])
    assert heard.wait(10)
    assert time.monotonic() - started_s < 5
    assert not arrived
    there.start()
    assert becomes_true(lambda: len(arrived) >= 3000)
    assert arrived == list(range(3000))
    other.close()


def test_a_stranger_at_the_address_of_a_peer_holds_nobody_up(boxes: tuple[Mailbox, Mailbox]) -> None:
    """A port that was a process's may become another program's; ZeroMQ gives such a connection up."""
    here, there = boxes
    arrived: list[int] = []
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    for box in boxes:
        box.start()
    with Stranger() as stranger:
        proxy = CuttingProxy(stranger.endpoint)
        for n in range(5):
            posting = threading.Thread(
                target=here.post, args=(proxy.endpoint, [b"n", b"%d" % n]), daemon=True
            )
            posting.start()
            posting.join(5)
            assert not posting.is_alive(), "post does not wait"
            time.sleep(0.1)
        assert stranger.num_visits
        proxy.go_to(there.tcp_endpoint)
        assert becomes_true(lambda: len(arrived) == 5, 20), arrived
    assert arrived == list(range(5))
    proxy.close()


def test_what_strangers_write_to_a_mailbox_harms_nobody(
    boxes: tuple[Mailbox, Mailbox], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = boxes
    arrived: list[int] = []
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    for box in boxes:
        box.start()

    def stranger(data: bytes) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(there.endpoint.removeprefix("ipc://"))
        made.sendall(data)
        made.settimeout(10)
        return made

    def framed(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    here.post(there.endpoint, [b"n", b"0"])
    strangers = [
        stranger(b"GET / HTTP/1.1"),
        stranger(framed(b"no letter")),
        stranger(framed(msgspec.msgpack.encode(Letter(b"t", b"", 0, 1, "ipc://nowhere", [], 0)))),
        stranger(framed(msgspec.msgpack.encode(Letter(b"t", b"", 0, 1, "no address", [b"n", b"7"], 0)))),
        stranger(framed(bytes(1000))[:500]),
    ]
    assert strangers[0].recv(1) == b"", "it was closed"
    here.post(there.endpoint, [b"n", b"1"])
    for one in strangers:
        one.close()
    here.post(there.endpoint, [b"n", b"2"])
    assert becomes_true(lambda: arrived == [0, 1, 2])
    assert becomes_true(lambda: len(caplog.records) >= 4)


def test_a_closed_mailbox_has_written_what_was_posted_and_leaves_nothing_open(
    boxes: tuple[Mailbox, Mailbox], tmp_path: Path
) -> None:
    _, there = boxes
    arrived: list[int] = []
    there.on(b"n", lambda _, frames: arrived.append(int(frames[0])))
    there.start()
    num_open, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for round_ in range(3):
        sender = Mailbox(f"ipc://{tmp_path}/c")
        if round_:
            sender.start()
        for n in range(100):
            sender.post(there.endpoint, [b"n", str(n).encode(), bytes(20_000)])
        sender.post(f"ipc://{tmp_path}/nobody", [b"n"])
        sender.close()
        assert becomes_true(lambda least=100 * (round_ + 1): len(arrived) >= least)
        there.forget(sender.endpoint)
        there._gone.clear()
    assert arrived == [*range(100)] * 3
    assert not (tmp_path / "c").exists()
    assert becomes_true(lambda: len(os.listdir("/proc/self/fd")) <= num_open)
    assert threading.active_count() == num_threads


def open_files() -> set[tuple[str, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_what_waits_for_a_process_that_is_gone_is_dropped_at_once(
    boxes: tuple[Mailbox, Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rill.runtime.process.mailbox.CLOSE_LINGER_MS", 20_000)
    here, there = boxes
    here.start()
    before = open_files()
    for _ in range(300):
        here.post(there.endpoint, [b"n", bytes(10_000)])
    here.forget(there.endpoint)
    assert open_files() <= before, "others that were open may have been closed meanwhile"
    started_s = time.monotonic()
    here.close()
    assert time.monotonic() - started_s < 10


def test_a_sender_keeps_nothing_that_was_confirmed(boxes: tuple[Mailbox, Mailbox]) -> None:
    here, there = boxes
    there.on(b"n", lambda *_: None)
    for box in boxes:
        box.start()
    for _ in range(100):
        here.post(there.endpoint, [b"n"])
    peer = here._peers[there.endpoint]
    assert becomes_true(lambda: not peer.unconfirmed)


def test_messages_of_neighbours_do_not_look_for_those_of_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look into ZeroMQ that finds nothing costs more than the message."""
    num_looks = 0
    look: Any = Mailbox._read_tcp

    def counted(*args: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(*args)

    monkeypatch.setattr(Mailbox, "_read_tcp", counted)
    here, there = (Mailbox(f"ipc://{tmp_path}/{n}", key=KEY) for n in "ab")
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    there.on(b"n", lambda sender, _: there.post(sender, [b"answer"]))
    here.on(b"answer", lambda sender, _: answers.put(sender))
    for box in (here, there):
        box.start()
    for _ in range(50):
        here.post(there.endpoint, [b"n"])
        answers.get(timeout=10)
    assert num_looks < 10
    here.post(there.tcp_endpoint, [b"n"])
    assert answers.get(timeout=10) == there.tcp_endpoint
    for box in (here, there):
        box.close()


def calls_of(mailbox: Mailbox, address: WorkerAddress, dead: dict[str, str]) -> Calls:
    """With as much of a process's surroundings as they need."""
    parcels = SimpleNamespace(unpack=lambda frames, _: wire.decode(frames[1], frames[2:]))
    directory = SimpleNamespace(dead=dead, on_death=lambda _: None)
    context = SimpleNamespace(mailbox=mailbox, address=address, parcels=parcels, directory=directory)
    return Calls(context)  # type: ignore[arg-type]


def test_calls_and_answers_survive_cut_connections_and_run_once(
    boxes: tuple[Mailbox, Mailbox], way: str
) -> None:
    here, there = boxes
    out, back = CuttingProxy(endpoint_of(there, way)), CuttingProxy(endpoint_of(here, way))
    here.tcp_endpoint = here.endpoint = back.endpoint  # where answers go
    driver = WorkerAddress("driver", 0, "n0", 1, back.endpoint, back.endpoint)
    worker = WorkerAddress("w", 0, "n1", 1, out.endpoint, out.endpoint)
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
        call.answer(There, n + 1)  # type: ignore[arg-type]

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
    peer = Peer(SimpleNamespace(), "")  # type: ignore[arg-type]
    for token in (b"the first", b"another"):
        for seq in range(1, 4):
            letter = Letter(token, bytes(8), 0, seq, "", [], 0)
            assert peer.is_next(letter)
            assert not peer.is_next(letter), "twice"
