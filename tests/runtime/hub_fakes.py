"""The hub without processes: clients that drive a Machine directly, and a hub process that tests may kill."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from rill.runtime.address import Site, group_of
from rill.runtime.hub.messages import Commit, Grant, Ids, Item, OutKind, Puts, Roster, Take
from rill.runtime.hub.state import Machine
from rill.runtime.process.agent import bootstrap


class FakeHub:
    """A Machine, its clients' numbering, and everything it ever said to them."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.journal: list[tuple[Any, ...]] = []
        self._next_seq: dict[str, int] = {}
        self._seen_out: dict[str, int] = {}
        self.replies: dict[tuple[str, int], Any] = {}
        self.failures: dict[tuple[str, int], list[str]] = {}
        self.pushes: dict[str, list[tuple[str, Any]]] = {}
        self.said: dict[str, deque[tuple[OutKind, Any, Any]]] = {}
        """Everything to each client, in order, for tests that deliver it one by one."""
        self.now_s = 100.0

    def join(self, client: str, *, world_size: int | None = None, address: Any = None) -> None:
        self.send(client, "registry.join", address)
        group = group_of(client)
        if world_size is not None and not self.machine.membership.on_roster("", 0, group):
            self.send("driver[0]#0", "registry.group", word(group, 1, dict.fromkeys(range(world_size), 0)))

    def send(self, client: str, method: str, payload: Any) -> int:
        """Apply one request; gives its number. Answers are in `replies` when there are any."""
        seq = self._next_seq.get(client, 1)
        self._next_seq[client] = seq + 1
        self.now_s += 0.001
        request = (method, msgspec.Raw(msgspec.msgpack.encode(payload)))
        self.journal.append(("apply", client, seq, [request], self.now_s))
        self.machine.apply(client, seq, [request], self.now_s)
        self._collect()
        return seq

    def call(self, client: str, method: str, payload: Any) -> Any:
        """Apply one request and give its reply, which must be there at once."""
        return self.replies[(client, self.send(client, method, payload))]

    def stats(self, channel: str) -> dict[str, Any]:
        found: dict[str, Any] = self.machine.broker.on_stats("", 0, channel)
        return found

    def kill(self, client: str) -> None:
        self.journal.append(("end", client))
        self.machine.end_client(client, "killed")
        self._collect()

    def tick(self, by_s: float) -> None:
        self.now_s += by_s
        self.machine.tick(self.now_s)
        self._collect()

    def restart_from_snapshot(self) -> None:
        self.machine = pickle.loads(pickle.dumps(self.machine))

    def restart_from_journal(self) -> None:
        """What a new hub process does."""
        self.machine = Machine()
        for kind, client, *rest in self.journal:
            if kind == "apply":
                self.machine.apply(client, *rest)
            else:
                self.machine.end_client(client, "killed")
        self._collect()

    def _collect(self) -> None:
        for client, stream in self.machine.streams.items():
            for out, kind, ref, body in stream.outbox:
                if out <= self._seen_out.get(client, 0):
                    continue
                assert out == self._seen_out.get(client, 0) + 1
                self._seen_out[client] = out
                self.said.setdefault(client, deque()).append((kind, ref, body))
                if kind is OutKind.REPLY:
                    assert (client, ref) not in self.replies, "a request was answered twice"
                    self.replies[(client, ref)] = body
                elif kind is OutKind.FAILURE:
                    self.failures[(client, ref)] = body
                elif kind is OutKind.PUSH:
                    self.pushes.setdefault(client, []).append((ref, body))
            stream.confirm(self._seen_out.get(client, 0))


def word(
    group: str, version: int, launches: dict[int, int], devices: dict[int, list[int]] | None = None
) -> Roster:
    """What the driver says of a group."""
    return Roster(group, version, launches, devices or {rank: [] for rank in launches}, [])


def an_item(value: int, weight: float = 1.0, key: Any = None) -> Item:
    """An inline item that carries a number."""
    return Item(weight, key, 8, str(value).encode(), None)


def puts(*values: int, channel: str = "c", **kwargs: Any) -> Puts:
    return Puts(channel, [an_item(value, **kwargs) for value in values])


def put(*values: int, channel: str = "c", wants_reply: bool = False, **kwargs: Any) -> Commit:
    """A plain put."""
    return Commit([], [puts(*values, channel=channel, **kwargs)], wants_reply)


def done(ids: list[int], *outputs: Puts, channel: str = "c", wants_reply: bool = False) -> Commit:
    """Finish items, and put what came of them."""
    return Commit([Ids(channel, ids)], list(outputs), wants_reply)


def take(count: int = 1, *, channel: str = "c", in_loop: bool = True, **kwargs: Any) -> Take:
    return Take(channel, max_items=count, in_loop=in_loop, **kwargs)


def values_of(grant: Grant) -> list[int]:
    """The numbers in a take's answer."""
    return [int(item.inline) for item in grant.items if isinstance(item.inline, bytes)]


def ids_of(grant: Grant) -> list[int]:
    return [item.id for item in grant.items]


class HubProcess:
    """A real hub that can be killed and started again."""

    tcp = ""

    def __init__(self, folder: Path) -> None:
        session_dir, shm_dir = folder / "s", folder / "shm"
        session_dir.mkdir()
        shm_dir.mkdir()
        self.endpoint = f"ipc://{session_dir}/hub.sock"
        self.site = Site(
            session_dir=session_dir, shm_dir=shm_dir, node_id="node0", hub_endpoint=self.endpoint
        )
        self.start()

    def start(self) -> None:
        payload = pickle.dumps((self.site, self.tcp))
        self.process = subprocess.Popen(bootstrap("rill.runtime.hub.server:main", repr(payload), sys.path))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)


@contextmanager
def hub_process(folder: Path) -> Iterator[HubProcess]:
    hub = HubProcess(folder)
    try:
        yield hub
    finally:
        hub.close()


class Stranger:
    """Another program at a TCP port: it answers, but not as a mailbox or a hub does."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_visits = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._listener.accept()
                self.num_visits += 1
                with visitor, contextlib.suppress(OSError):
                    visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
                    visitor.settimeout(1.0)
                    while visitor.recv(4096):
                        pass
