"""Bytes over TCP: whole, from holders of the key only, and through a server's death."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer import tcp
from rill.runtime.transfer.tcp import ByteClient, ByteServer, Request

pytestmark = pytest.mark.timeout(60)

KEY = SessionKey.new()
DATA = {"large": bytes(range(256)) * 50_000, "small": b"abc", "empty": b""}


def read(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
    if name not in DATA:
        raise PeerDiedError(f"{name} is gone")
    return memoryview(DATA[name])[offset : offset + num_bytes], len(DATA[name])


@pytest.fixture
def server() -> Iterator[ByteServer]:
    made = ByteServer("127.0.0.1", KEY, read)
    yield made
    made.close()


def client_of(find: str | Callable[[float], str], timeout_s: float = 20.0) -> ByteClient:
    return ByteClient(
        KEY, (lambda _: find) if isinstance(find, str) else find, "the server", timeout_s=timeout_s
    )


def test_all_of_something_comes_in_chunks_and_parts_come_by_their_place(server: ByteServer) -> None:
    client = client_of(server.endpoint)
    assert len(DATA["large"]) > tcp.CHUNK_BYTES
    for name, data in DATA.items():
        assert client.fetch(name) == data
    assert client.fetch("large", 1000, 9_000_000, 100) == DATA["large"][1000:9_001_000]
    with pytest.raises(PeerDiedError, match="the server: other is gone"):
        client.fetch("other")
    assert client.fetch("small") == b"abc", "a refusal costs nothing else"
    client.close()


def test_what_cannot_be_read_is_an_answer_and_the_server_serves_on() -> None:
    """A file that is removed while it is being opened, too many open files."""

    def removed(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
        if name == "removed":
            raise FileNotFoundError(2, "No such file or directory", name)
        return read(name, offset, num_bytes)

    server = ByteServer("127.0.0.1", KEY, removed)
    client = client_of(server.endpoint)
    with pytest.raises(PeerDiedError, match="the server: .*No such file or directory: 'removed'"):
        client.fetch("removed")
    assert client.fetch("small") == b"abc"
    client.close()
    server.close()


def test_strangers_get_no_answer(server: ByteServer) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(server.endpoint)
    request = msgspec.msgpack.encode(Request("small", 0, 3, 0, b"n" * 16))
    for frames in ([request], [request, SessionKey.new().mac(request)], [request, b""]):
        stranger.send_multipart(frames)
    assert not stranger.poll(300)
    stranger.send_multipart([request, KEY.mac(request)])
    assert stranger.poll(5000), "the same request with the key is answered"
    stranger.close(linger=0)


def test_what_never_changes_is_hashed_once_for_all_who_fetch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = tcp.digest
    monkeypatch.setattr(tcp, "digest", lambda data: hashed.append(memoryview(data).nbytes) or real(data))
    for is_fixed, num_times in ((True, 1), (False, 3)):
        hashed.clear()
        server = ByteServer("127.0.0.1", KEY, read, is_fixed=is_fixed)
        for _ in range(3):
            assert client_of(server.endpoint).fetch("small") == b"abc"
        assert len(hashed) == num_times + 3, "the server's, and each client's own"
        server.close()


def changed_bytes(frames: list[bytes]) -> list[bytes]:
    return [*frames[:-1], b"x" + frames[-1][1:]]


def another_size(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[1], (99).to_bytes(8, "little"), frames[3]]


def a_refusal(frames: list[bytes]) -> list[bytes]:
    return [b"0", *frames[1:]]


def too_few(frames: list[bytes]) -> list[bytes]:
    return frames[:3]


@pytest.mark.parametrize("change", [changed_bytes, another_size, a_refusal, too_few])
def test_an_answer_that_was_changed_on_its_way_is_not_taken(
    server: ByteServer, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    """Somebody between the two: he sees everything, and has no key."""
    front: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    back.connect(server.endpoint)
    fetching = ThreadPoolExecutor(1).submit(lambda: client_of(f"tcp://127.0.0.1:{port}").fetch("small"))
    identity, *request = front.recv_multipart()
    back.send_multipart(request)
    front.send_multipart([identity, *change(back.recv_multipart())])
    with pytest.raises(RunError, match="not sent by the server as it is"):
        fetching.result(20)
    front.close(linger=0)
    back.close(linger=0)


def test_an_answer_of_another_request_is_not_taken(server: ByteServer) -> None:
    front: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    back.connect(server.endpoint)
    earlier: list[list[bytes]] = []
    for _ in range(2):
        fetching = ThreadPoolExecutor(1).submit(lambda: client_of(f"tcp://127.0.0.1:{port}").fetch("small"))
        identity, *request = front.recv_multipart()
        back.send_multipart(request)
        earlier.append(back.recv_multipart())
        front.send_multipart([identity, *earlier[0]])
        if len(earlier) == 1:
            assert fetching.result(20) == b"abc"
    with pytest.raises(RunError, match="not sent by the server as it is"):
        fetching.result(20)
    front.close(linger=0)
    back.close(linger=0)


def test_a_fetch_goes_on_at_a_servers_new_address_where_it_was() -> None:
    """The first server answers one request of several and is gone."""
    asked: list[int] = []

    def noting(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
        asked.append(offset)
        return read(name, offset, num_bytes)

    first: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    endpoints = [f"tcp://127.0.0.1:{first.bind_to_random_port('tcp://127.0.0.1')}"]
    size = len(DATA["large"])
    fetching = ThreadPoolExecutor(1).submit(
        lambda: client_of(lambda _: endpoints[-1]).fetch("large", 0, size)
    )
    identity, raw, _code = first.recv_multipart()
    answered = msgspec.msgpack.decode(raw, type=Request).offset
    chunk = DATA["large"][answered : answered + tcp.CHUNK_BYTES]
    packed = size.to_bytes(8, "little")
    first.send_multipart([identity, b"1", KEY.mac(raw, b"1", packed, tcp.digest(chunk)), packed, chunk])
    first.recv_multipart()
    first.recv_multipart()
    time.sleep(0.5)
    first.close(linger=0)
    second = ByteServer("127.0.0.1", KEY, noting)
    endpoints.append(second.endpoint)
    assert fetching.result(30) == DATA["large"]
    assert {answered, *asked} == set(range(0, size, tcp.CHUNK_BYTES)) and answered not in asked
    second.close()


def test_a_connection_that_zeromq_has_given_up_holds_nobody_up(server: ByteServer) -> None:
    """It does where something else answered at the address; such a socket has nowhere to send to."""
    client = client_of(server.endpoint)
    client._local.connection = (zmq.Context.instance().socket(zmq.DEALER), "tcp://127.0.0.1:1")
    assert client.fetch("small") == b"abc"


def test_a_server_that_never_answers_ends_the_fetch_at_its_deadline() -> None:
    silent: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    started_s = time.monotonic()
    with pytest.raises(StuckError, match=r"the server sent no part of small within 0.5 s"):
        client_of(f"tcp://127.0.0.1:{port}", timeout_s=0.5).fetch("small")
    assert time.monotonic() - started_s >= 0.5
    silent.close(linger=0)


def test_a_taken_port_is_an_error_at_once(server: ByteServer) -> None:
    with pytest.raises(OSError, match="in use"):
        ByteServer("127.0.0.1", KEY, read, port=int(server.endpoint.rpartition(":")[2]))
