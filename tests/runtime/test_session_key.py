"""Who may talk to the processes of a session that spans nodes: only those that have its key."""

from __future__ import annotations

import queue
import socket as sockets
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rill.errors import StuckError
from rill.runtime.hub.client import HubClient
from rill.runtime.process.mailbox import Mailbox, free_port
from rill.runtime.process.session import open_session
from rill.runtime.process.session_key import SessionKey
from tests.runtime.hub_fakes import HubProcess, Stranger

pytestmark = pytest.mark.timeout(60)

KEY = SessionKey.new()


class Inbox:
    """A mailbox on TCP, and what arrived in it."""

    def __init__(self, folder: Path) -> None:
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.mailbox = Mailbox(f"ipc://{folder}/inbox", key=KEY)
        self.mailbox.on(b"kind", lambda _, frames: self.arrived.put(frames))
        self.mailbox.start()


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    made = Inbox(tmp_path)
    yield made
    made.mailbox.close()


def post_from(folder: Path, name: str, key: SessionKey | None, endpoint: str) -> None:
    sender = Mailbox(f"ipc://{folder}/{name}", key=key)
    sender.post(endpoint, [b"kind", name.encode()])
    sender.close()


def test_a_mailbox_hears_its_session_and_nobody_else_on_tcp(inbox: Inbox, tmp_path: Path) -> None:
    endpoint = inbox.mailbox.tcp_endpoint
    post_from(tmp_path, "no-key", None, endpoint)
    post_from(tmp_path, "other-key", SessionKey.new(), endpoint)
    with sockets.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as plain:
        plain.sendall(b"\xff" + bytes(8) + b"\x7f\x03" + b"NULL" + bytes(500))
    post_from(tmp_path, "member", KEY, endpoint)
    assert inbox.arrived.get(timeout=10) == [b"member"]
    with pytest.raises(queue.Empty):
        inbox.arrived.get(timeout=0.5)


def test_a_mailbox_on_the_same_node_needs_no_key(inbox: Inbox, tmp_path: Path) -> None:
    post_from(tmp_path, "neighbour", None, inbox.mailbox.endpoint)
    assert inbox.arrived.get(timeout=10) == [b"neighbour"]


def test_a_port_for_other_nodes_is_not_opened_without_a_key(tmp_path: Path) -> None:
    mailbox = Mailbox(f"ipc://{tmp_path}/inbox", host="127.0.0.1")
    assert mailbox.tcp_endpoint == ""
    mailbox.close()


class TcpHub(HubProcess):
    """A hub that other nodes can reach."""

    def __init__(self, folder: Path, tcp: str = "") -> None:
        self.tcp = tcp or f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        super().__init__(folder)

    def start(self) -> None:
        self.site = replace(self.site, key=KEY)
        super().start()


def test_a_client_finds_the_hub_though_a_stranger_had_its_port_meanwhile(tmp_path: Path) -> None:
    with Stranger() as stranger:
        client = HubClient(stranger.endpoint, "member[0]#0", KEY).start()
        with pytest.raises(StuckError):
            client.call("registry.sync", None, 1.0)
        assert stranger.num_visits
    hub = TcpHub(tmp_path, stranger.endpoint)
    client.call("registry.sync", None, 20)
    client.close()
    hub.close()


def test_the_hub_answers_its_session_and_nobody_else_on_tcp(tmp_path: Path) -> None:
    hub = TcpHub(tmp_path)
    clients = [
        HubClient(hub.tcp, "member[0]#0", KEY).start(),
        HubClient(hub.tcp, "stranger[0]#0").start(),
        HubClient(hub.tcp, "stranger[1]#0", SessionKey.new()).start(),
        HubClient(hub.endpoint, "neighbour[0]#0").start(),
    ]
    member, *strangers, neighbour = clients
    member.call("registry.sync", None, 20)
    neighbour.call("registry.sync", None, 20)
    for stranger in strangers:
        with pytest.raises(StuckError):
            stranger.call("registry.sync", None, 0.5)
    known = member.call("registry.members", None, 10)
    assert set(known) == {"member[0]#0", "neighbour[0]#0"}
    for client in clients:
        client.close()
    hub.close()


def test_the_key_does_not_show_itself_when_it_is_printed() -> None:
    for told in (repr(KEY), str(KEY), f"{KEY}"):
        assert KEY.secret.decode() not in told and KEY.public.decode() not in told


def test_only_their_user_can_enter_the_session_s_folders() -> None:
    session = open_session()
    try:
        for folder in (session.session_dir, session.shm_dir):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        session.close()


def test_a_mac_covers_every_part_and_their_borders() -> None:
    code = KEY.mac(b"ab", b"c")
    assert KEY.is_mac(code, b"ab", b"c")
    assert not KEY.is_mac(code, b"a", b"bc")
    assert not KEY.is_mac(code, b"ab", b"d")
    assert not SessionKey.new().is_mac(code, b"ab", b"c")
