"""The main of a worker's process: sets the process up, then serves calls until it is told to stop.

    main thread:   hello ─▶ loop: work inbox ─▶ run the call ─▶ reply          (one at a time, in order)
    inbox thread:  @concurrent calls ─▶ a thread each ─▶ reply;  replies to this worker's own calls;  transfers

The first call is `__init__`; it imports the worker's class, so that an error there is an error of that call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from rill.errors import UserError
from rill.runtime import context as runtime_context
from rill.runtime.call import CALL, Call, CallBook, reply_error, reply_value
from rill.runtime.channel import finish_call
from rill.runtime.context import RuntimeContext, WorkerAddress
from rill.runtime.device import CUDA
from rill.runtime.mailbox import Frames, Mailbox, bind_tcp, receive
from rill.runtime.main_module import MainModule, install_main
from rill.runtime.process import read_all
from rill.runtime.session_key import SessionKey
from rill.runtime.worker import Seating, Worker, begin_call, build
from rill.telemetry import trace

HELLO, STOP = b"hello", b"stop"
INIT = "__init__"


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
    seating: Seating
    incarnation: int
    num_threads: int
    main: MainModule
    sys_path: list[str]
    trace_dir: str | None
    socket_name: str
    """Short, because the path of a Unix socket may have 107 characters."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's first message to the driver: where it is."""

    address: WorkerAddress
    work_endpoint: str
    work_tcp_endpoint: str


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
    _limit_threads(spec.num_threads)
    name = f"{spec.seating.group_name}[{spec.seating.rank}]"
    if spec.trace_dir is not None:
        trace.configure(spec.trace_dir, f"{name}#{spec.incarnation}")
    host = WorkerHost(spec)
    host.serve()
    trace.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # user threads that never end must not hold the process


SPIN_COUNT = 10_000
"""How often an OpenMP thread looks for its next piece of work before it sleeps. A compromise, from few runs on a busy
2-core machine, a small decoding step with 2 threads: two processes at once took 243 to 286 ms a step with the library's
own 300,000, 16 to 54 with this, 18 to 20 with OMP_WAIT_POLICY=PASSIVE; undisturbed, 1.2 to 2.1, 1.4 to 1.6 (one run of
four: 20) and 3.9 to 9.9. Not measured on a quiet machine."""


def thread_env(num_threads: int, user_env: Mapping[str, str]) -> Mapping[str, str]:
    """What the usual libraries read when they are loaded, with what the user asked for on top."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    env = {name: str(num_threads) for name in names}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ, *user_env}:
        env["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return {**env, **user_env}


def _limit_threads(num_threads: int) -> None:
    """For libraries that were loaded before the environment was set, in a worker forked after `preload`."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(num_threads)


class WorkerHost:
    """One worker and its inboxes. Runs in a process of its own, or in a thread of the driver's (inline)."""

    def __init__(self, spec: HostSpec, mailbox: Mailbox | None = None) -> None:
        self.spec = spec
        self.worker: Worker | None = None
        self._ready = threading.Event()
        tcp_host = spec.host if spec.num_nodes > 1 else None
        base = f"ipc://{spec.session_dir}/{spec.socket_name}"
        self.mailbox = mailbox or Mailbox(base, tcp_host=tcp_host, key=spec.key)
        self._work = self.mailbox.context.socket(zmq.PULL)
        self._work.setsockopt(zmq.RCVHWM, 0)
        self._work.bind(f"{base}-work")
        self._work_tcp = bind_tcp(self._work, tcp_host, spec.key) if tcp_host else ""
        self._work_endpoint = f"{base}-work"
        address = WorkerAddress(
            group=spec.seating.group_name,
            rank=spec.seating.rank,
            node_id=spec.node_id,
            pid=os.getpid(),
            endpoint=self.mailbox.endpoint,
            tcp_endpoint=self.mailbox.tcp_endpoint,
            raw_endpoint=self.mailbox.raw_endpoint,
            incarnation=spec.incarnation,
            gpus=tuple(device.index for device in spec.seating.devices if device.kind == CUDA),
        )
        self.context = RuntimeContext(
            session_id=spec.session_id,
            session_dir=Path(spec.session_dir),
            shm_dir=Path(spec.shm_dir),
            node_id=spec.node_id,
            address=address,
            hub_endpoint=spec.hub_endpoint,
            host=spec.host,
            num_nodes=spec.num_nodes,
            key=spec.key,
            mailbox=self.mailbox,
            calls=CallBook(self.mailbox, address),
            torch_device=spec.seating.device,
        )
        self.lane = address.name

    def serve(self) -> None:
        """Say hello, then run calls until a stop message."""
        runtime_context.install(self.context)
        self.mailbox.on(CALL, self._on_concurrent_call)
        self.context.open()
        self._register()
        self.mailbox.start()
        hello = Hello(self.context.address, self._work_endpoint, self._work_tcp)
        self.mailbox.post(self.spec.driver.endpoint_from(self.spec.node_id), [HELLO, pickle.dumps(hello)])
        while True:
            frames = receive(self._work)
            if frames[0] == STOP:
                break
            self._run(Call.read(frames[1:]))
        self._close()

    def _register(self) -> None:
        """Tell the hub who this is. Does not wait for it: the hub may still be starting."""
        seating = self.spec.seating
        known = {
            "group": seating.group_name,
            "rank": seating.rank,
            "world_size": seating.world_size,
            "node_id": self.spec.node_id,
            "devices": [device.id for device in seating.devices],
        }
        self.context.hub.submit("registry.register", known)
        self.context.directory.publish(self.context.address, seating.world_size)

    def _close(self) -> None:
        try:
            if self.worker is not None:
                self.worker.close()
        finally:
            runtime_context.uninstall(self.context)
            self.context.close()
            self._work.close(linger=0)
            self.mailbox.close()

    def _on_concurrent_call(self, frames: Frames) -> None:
        call = Call.read(frames)
        threading.Thread(target=self._run_when_ready, args=(call,), name=call.method, daemon=True).start()

    def _run_when_ready(self, call: Call) -> None:
        self._ready.wait()  # ended by `__init__`, or with the process
        self._run(call)

    def _run(self, call: Call) -> None:
        timers = begin_call()
        started_s = time.perf_counter()
        try:
            with trace.span(f"{self.spec.seating.group_name}.{call.method}", lane=self.lane):
                value = self._invoke(call)
            reply_value(self.mailbox, call, value, time.perf_counter() - started_s, timers)
        except BaseException as error:  # noqa: BLE001  the boundary of user code: every exception goes to the caller
            reply_error(self.mailbox, call, error, time.perf_counter() - started_s, timers)
        finally:
            finish_call(self.context)

    def _invoke(self, call: Call) -> Any:
        if call.method == INIT:
            (target,), init_kwargs = call.arguments()
            self.worker = build(target.load(), self.spec.seating, init_kwargs)
            self._ready.set()
            return None
        if self.worker is None:
            raise UserError(
                f"{self.lane} was not initialised: its __init__ failed, relaunch it or close the group"
            )
        args, kwargs = call.arguments()
        value = getattr(self.worker, call.method)(*args, **kwargs)
        return asyncio.run(value) if inspect.iscoroutine(value) else value
