"""The main of a worker's process: sets the process up, then serves calls until it is told to stop.

    inbox thread:  calls ─▶ queue;  @concurrent calls ─▶ a thread each ─▶ reply;  replies to own calls;  transfers
    main thread:   hello ─▶ loop: queue ─▶ run the call ─▶ reply                          (one at a time, in order)

The first call is `__init__`; it imports the worker's class, so that an error there is an error of that call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import io
import os
import pickle
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import UserError, in_words
from rill.runtime import context as runtime_context
from rill.runtime.address import Site, WorkerAddress
from rill.runtime.channel import settle_call
from rill.runtime.channels.lease import end_call
from rill.runtime.context import RuntimeContext
from rill.runtime.process.call import CALL, Call
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.main_module import MainModule, install_main
from rill.runtime.process.threads import limit_threads
from rill.runtime.worker import Worker, build, timers_of_call
from rill.telemetry import trace

if TYPE_CHECKING:
    from rill.runtime.device.device import Device

HELLO, NO_HUB = b"hello", b"no-hub"
INIT, MEMBERS, STOP = "__init__", "__members__", "__stop__"
"""Calls that the runtime makes: build the worker; take note of the group's ranks; end, and answer last of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker's process is told at its start."""

    site: Site
    driver: WorkerAddress
    address: WorkerAddress
    ranks: tuple[int, ...]
    devices: tuple[Device, ...]
    device: str
    num_threads: int
    main: MainModule
    sys_path: list[str]
    trace_dir: str | None


def main(start: bytes) -> None:
    spec = pickle.loads(start)
    assert isinstance(spec, WorkerSpec)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed worker's last line must be in its log
    sys.path[:] = spec.sys_path
    install_main(spec.main)
    limit_threads(spec.num_threads)
    process = WorkerProcess(spec)
    if spec.trace_dir is not None:
        trace.configure(spec.trace_dir, process.context.address.identity)
    process.serve()
    trace.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # user threads that never end must not hold the process


class WorkerProcess:
    """One rank: its worker, its surroundings, and how calls run on it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.context = RuntimeContext(spec.site, spec.address, torch_device=spec.device)
        self._spec = spec
        self._name = self.context.address.name
        self._worker: Worker | None = None
        self._init_error = ""
        self._has_tried = threading.Event()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def serve(self) -> None:
        """Say hello, then serve calls until a stop message."""
        context, mailbox = self.context, self.context.mailbox
        runtime_context.install(context)
        mailbox.on(CALL, self._on_call)
        mailbox.on(NO_HUB, lambda _, frames: context.hub.abandon(frames[0].decode()))
        mailbox.start()
        driver = self._spec.driver.endpoint_from(context.site.node_id)
        mailbox.post(driver, [HELLO, pickle.dumps(context.address)])
        while (call := self._calls.get()).method != STOP:
            self._run(call)
        try:
            if self._worker is not None:
                self._worker.close()
        finally:
            call.answer_at_once(context)
            runtime_context.uninstall(context)
            context.close()

    def _on_call(self, sender: str, frames: Frames) -> None:
        call = Call.read(sender, frames)
        if call.is_concurrent:
            threading.Thread(target=self._run, args=(call,), name=call.method, daemon=True).start()
        else:
            self._calls.put(call)

    def _run(self, call: Call) -> None:
        if call.is_concurrent:
            self._has_tried.wait()  # ended by `__init__`, whatever became of it, or with the process
        timers_of_call.set(call.timers)
        started_s = time.perf_counter()
        recorder = self.context.recorder
        recorder.begin(call.method)
        try:
            with trace.span(f"{self._spec.address.group}.{call.method}", lane=self._name):
                value = self._invoke(call)
            settle_call(self.context)
            call.seconds = time.perf_counter() - started_s
            call.answer(self.context, value)
        except BaseException as error:  # noqa: BLE001  boundary: every exception of user code goes to the caller
            end_call(error)
            call.seconds = time.perf_counter() - started_s
            call.fail(self.context, error)
        finally:
            recorder.end()

    def _invoke(self, call: Call) -> Any:
        if call.method == INIT:
            self._build(call)
            return None
        args, kwargs = self.context.parcels.unpack(call.payload, call.sender)
        if self._worker is None:
            raise UserError(
                f"{self._name} was not initialised: its __init__ failed ({self._init_error}), relaunch it or close "
                "the group"
            )
        if call.method == MEMBERS:
            self._worker.ranks = args[0]
            return None
        value = getattr(self._worker, call.method)(*args, **kwargs)
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    def _build(self, call: Call) -> None:
        """Reading it imports the worker's class."""
        try:
            (cls,), kwargs = self.context.parcels.unpack(call.payload, call.sender)
            self._worker = build(cls, self._spec, kwargs)
        except BaseException as error:
            self._init_error = in_words(error)
            raise
        finally:
            self._has_tried.set()  # @concurrent calls wait for it
