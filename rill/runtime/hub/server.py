"""The hub: the one control-plane process of a cluster. Registry, channel broker and device locks live in it.

    clients ──▶ ROUTER ──▶ drain all that has arrived ──▶ apply to the Machine ──▶ one journal write ──▶ send outboxes

Started by the cluster; it may be killed at any moment and started again with the same arguments. Guarantees:
- A request is applied exactly once and in its client's order; every reply and push arrives exactly once and in order,
  across any number of hub restarts (state.py has the numbering, client.py the other end).
- Nothing leaves before the events that caused it are in the journal. A killed process loses nothing that was written.
- A client is buried when the cluster reports its death (`registry.died`). Silence is no death.
"""

from __future__ import annotations

import pickle
import time
from itertools import islice

import msgspec
import zmq

from rill.runtime.address import Site
from rill.runtime.hub.journal import HubJournal
from rill.runtime.hub.messages import FromHub, Gap, Output, Requests
from rill.runtime.transfer.segments import unlink

_MAX_MESSAGES_PER_ROUND = 256
_POLL_MS = 500


class Hub:
    def __init__(self, site: Site, tcp: str) -> None:
        self._shm_dir = site.shm_dir
        self._journal = HubJournal(site.session_dir)
        self._machine = self._journal.recover()
        self._sent: dict[str, int] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(site.hub_endpoint)
        if tcp:
            assert site.key is not None, "a hub for other nodes in a session without a key"
            site.key.guard(self._socket)
            self._socket.bind(tcp)
        self._decoder = msgspec.msgpack.Decoder(Requests)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        while True:
            due_s = self._machine.locks.next_due_s()
            wait_ms = _POLL_MS if due_s is None else 1 + int(1000 * (due_s - time.monotonic()))
            if self._socket.poll(max(0, min(_POLL_MS, wait_ms))):
                self._drain()
            self._tick()
            self._journal.commit()
            self._send_all()
            self._unlink()
            if self._journal.is_grown:
                self._journal.compact(self._machine)

    def _tick(self) -> None:
        due_s, now_s = self._machine.locks.next_due_s(), time.monotonic()
        if due_s is not None and due_s <= now_s:
            self._journal.append("", b"", now_s)
            self._machine.tick(now_s)

    def _drain(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_ROUND):
            try:
                identity, raw = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(identity.decode(), raw, self._decoder.decode(raw))

    def _take(self, client: str, raw: bytes, message: Requests) -> None:
        machine, first_seq, requests = self._machine, message.first_seq, message.requests
        if client in machine.streams:
            machine.streams[client].confirm(message.received_out)
            machine.touched.add(client)
            if not requests:
                self._sent[client] = message.received_out  # whatever it lacks goes out again
        if machine.is_news(client, first_seq, len(requests)):
            now_s = time.monotonic()
            self._journal.append(client, raw, now_s)
            machine.apply(client, first_seq, requests, now_s)
        if client in machine.ended:
            self._send(client, Gap(0))
        elif first_seq > machine.expected(client):
            # Messages keep their order: the rest was lost with an earlier hub.
            self._send(client, Gap(machine.expected(client)))

    def _send_all(self) -> None:
        machine = self._machine
        for client in machine.touched:
            stream = machine.streams.get(client)
            if stream is None:
                continue
            # What the outbox holds is numbered without gaps, from the first that is not confirmed.
            first = stream.next_out - len(stream.outbox)
            num_sent = max(0, self._sent.get(client, 0) + 1 - first)
            self._sent[client] = stream.next_out - 1
            self._send(client, Output(stream.expected, list(islice(stream.outbox, num_sent, None))))
        machine.touched.clear()

    def _send(self, client: str, message: FromHub) -> None:
        self._socket.send_multipart([client.encode(), self._encoder.encode(message)])

    def _unlink(self) -> None:
        orders, self._machine.unlinks = self._machine.unlinks, []
        for owner, kept in orders:
            unlink(self._shm_dir, owner, kept)


def main(start: bytes) -> None:
    """Entry of the process; `start` is a pickled pair: the Site of its node, and "tcp://HOST:PORT" for clients on other
    nodes, or nothing."""
    site, tcp = pickle.loads(start)
    assert isinstance(site, Site)
    Hub(site, tcp).run()
