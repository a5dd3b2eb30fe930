"""The main of a worker's process: sets the process up, then serves calls until it is told to stop.

    main thread:   hello ─▶ loop: work inbox ─▶ run the call ─▶ reply          (one at a time, in order)
                                      └─ several ranks here: ─▶ each rank's thread ─▶ one reply for all
    inbox thread:  @concurrent calls ─▶ a thread each ─▶ reply;  replies to this worker's own calls;  transfers

The first call is `__init__`; it imports the worker's class, so that an error there is an error of that call.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rill.runtime import context as runtime_context
from rill.runtime.context import RuntimeContext, WorkerAddress
from rill.runtime.process.agent import read_all
from rill.runtime.process.call import CALL, STOP, CallBook, HostProcess
from rill.runtime.process.called import Answers, Call
from rill.runtime.process.line import Line
from rill.runtime.process.mailbox import Frames, Mailbox
from rill.runtime.process.main_module import MainModule, install_main
from rill.runtime.process.rank import Rank, RankCall
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.threads import limit_threads
from rill.runtime.process.work_inbox import WorkInbox
from rill.runtime.worker import Seating
from rill.telemetry import trace

HELLO = b"hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """All that a worker's process is told at its start."""

    session_id: str
    session_dir: str
    shm_dir: str
    node_id: str
    host: str
    num_nodes: int
    hub_endpoint: str
    key: SessionKey | None
    driver: WorkerAddress
    seatings: tuple[Seating, ...]
    """Of the ranks that live in this process, the lead first. Most processes have one."""
    gpus: tuple[int, ...]
    """The GPUs that this process sees, by their numbers on the node, its own first."""
    own_gpus: frozenset[int]
    incarnation: int
    num_threads: int
    main: MainModule
    sys_path: list[str]
    trace_dir: str | None
    report_dir: str | None
    socket_name: str
    """Short, because the path of a Unix socket may have 107 characters."""


def main(start: int | bytes) -> None:
    """Entry of the process; `start` is a pickled HostSpec or the descriptor of a file that holds one."""
    spec = pickle.loads(read_all(start) if isinstance(start, int) else start)
    assert isinstance(spec, HostSpec)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed worker's last line must be in its log
    sys.path[:] = spec.sys_path
    install_main(spec.main)
    limit_threads(spec.num_threads)
    host = WorkerHost(spec)
    if spec.trace_dir is not None:
        trace.configure(spec.trace_dir, host.process.identity)
    host.serve()
    trace.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # user threads that never end must not hold the process


class WorkerHost:
    """The ranks of one process and its inboxes."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        tcp_host = spec.host if spec.num_nodes > 1 else None
        base = f"{spec.session_dir}/{spec.socket_name}"
        self._mailbox = Mailbox(f"ipc://{base}", tcp_host=tcp_host, key=spec.key)
        lead = self._lead_context(spec.seatings[0])
        contexts = [lead, *(self._shared_context(lead, seating) for seating in spec.seatings[1:])]
        self._ranks = [
            Rank(seating, context, self._on_built)
            for seating, context in zip(spec.seatings, contexts, strict=True)
        ]
        self._work = WorkInbox(
            f"{base}-work",
            lead.calls.pump,
            context=self._mailbox.context,
            tcp_host=tcp_host,
            key=spec.key,
        )
        self._num_unbuilt = len(self._ranks)
        self._building = threading.Lock()
        self._callers: dict[str, Line] = {}
        """Processes of this node that have called, by identity: answers take their line, also to @concurrent calls."""
        addresses = tuple(context.address for context in contexts)
        self.process = HostProcess(addresses, self._work.path, self._work.tcp_endpoint)

    def serve(self) -> None:
        """Say hello, then serve calls until a stop message."""
        ranks, lead = self._ranks, self._ranks[0]
        if len(ranks) == 1:
            runtime_context.install(lead.context)
        self._mailbox.on(CALL, self._on_concurrent_call)
        for rank in ranks:
            rank.context.open()
            lead.context.directory.publish(rank.context.address, self.spec.seatings[0].world_size)
        self._mailbox.start()
        for rank in ranks if len(ranks) > 1 else ():
            rank.start()
        driver = self.spec.driver.endpoint_from(self.spec.node_id)
        self._mailbox.post(driver, [HELLO, pickle.dumps(self.process)])
        serve = Rank.run if len(ranks) == 1 else Rank.put
        while (arrived := self._work.next())[0][0] != STOP:
            frames, line = arrived
            call = Call.read(frames[1:])
            if line is not None:
                self._callers[call.process_identity] = line
            self._deal_out(call, serve, line)
        self._close()

    def _deal_out(self, call: Call, serve: Callable[[Rank, RankCall], None], line: Line | None) -> None:
        """Give each called rank its part. They answer on the line it came by, else to the caller's mailbox."""
        ranks = self._ranks if call.positions is None else [self._ranks[n] for n in call.positions]
        send = line.send if line is not None else functools.partial(self._mailbox.post, call.reply_to)
        answers = Answers(call, len(ranks), send)
        arguments = call.arguments(len(ranks), ranks[0].context.parcels)
        for index, rank in enumerate(ranks):
            serve(rank, RankCall(call.method, arguments, index, answers))

    def _on_built(self) -> None:
        """On a rank's thread. Only now may others find a process that was started again: their calls come after
        `__init__`."""
        with self._building:
            self._num_unbuilt -= 1
            is_whole = self._num_unbuilt == 0
        if is_whole and self.spec.incarnation > 0:
            self._ranks[0].context.directory.publish_process(self.process)

    def _on_concurrent_call(self, frames: Frames) -> None:
        call = Call.read(frames)
        self._deal_out(call, Rank.run_at_once, self._callers.get(call.process_identity))

    def _close(self) -> None:
        try:
            for rank in self._ranks:
                rank.close()
        finally:
            lead = self._ranks[0].context
            runtime_context.uninstall(lead)
            for rank in reversed(self._ranks):
                rank.context.close()
            lead.calls.close()
            self._work.close()
            self._mailbox.close()

    def _lead_context(self, seating: Seating) -> RuntimeContext:
        """The doors of the process, held by its first rank."""
        spec, mailbox = self.spec, self._mailbox
        address = WorkerAddress(
            group=seating.group_name,
            rank=seating.rank,
            node_id=spec.node_id,
            pid=os.getpid(),
            endpoint=mailbox.endpoint,
            tcp_endpoint=mailbox.tcp_endpoint,
            raw_endpoint=mailbox.raw_endpoint,
            incarnation=spec.incarnation,
            gpus=spec.gpus,
        )
        others = [(other.rank, [device.id for device in other.devices]) for other in spec.seatings[1:]]
        return RuntimeContext(
            session_id=spec.session_id,
            session_dir=Path(spec.session_dir),
            shm_dir=Path(spec.shm_dir),
            node_id=spec.node_id,
            address=address,
            hub_endpoint=spec.hub_endpoint,
            host=spec.host,
            num_nodes=spec.num_nodes,
            key=spec.key,
            mailbox=mailbox,
            calls=CallBook(mailbox, address),
            torch_device=seating.device,
            own_gpus=spec.own_gpus,
            report_dir=Path(spec.report_dir) if spec.report_dir is not None else None,
            registration={**self._registration(seating), "others": others},
        )

    def _shared_context(self, lead: RuntimeContext, seating: Seating) -> RuntimeContext:
        """A further rank of the process: its own inbox and, once it needs one, its own line to the hub."""
        door = self._mailbox.door(seating.rank)
        address = replace(
            lead.address,
            rank=seating.rank,
            endpoint=door.endpoint,
            tcp_endpoint=door.tcp_endpoint,
            lead=lead.address.rank,
        )
        return replace(
            lead,
            address=address,
            mailbox=door,
            torch_device=seating.device,
            lead=lead,
            registration=self._registration(seating),
            services={},
            lock=threading.RLock(),
        )

    def _registration(self, seating: Seating) -> dict[str, Any]:
        return {
            "group": seating.group_name,
            "rank": seating.rank,
            "world_size": seating.world_size,
            "node_id": self.spec.node_id,
            "devices": [device.id for device in seating.devices],
        }
