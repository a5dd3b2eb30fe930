"""verifiers' environment server: its process in the user's Python, and the client side of its protocol.

    DEALER ── [id, "run" │ "cancel", payload] ──▶ EnvServer        messages in msgpack
           ◀── [id, "delta", changes of a trace]… [id, "reply", result]        0.4
           ◀── [id, result with the whole episode]                             0.3.1

One process serves all episodes of a worker, from any number of event loops. If it dies, the episodes under way fail,
and the next one starts it again. It ends when its standard input does, so it does not outlive the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import zmq
import zmq.asyncio
from pydantic import Field

from rill.config import Config
from rill.envs.per_loop import PerLoop
from rill.envs.threads import in_thread
from rill.errors import ConfigError

GUEST = Path(__file__).with_name("guest.py")
POLL_MS = 500
"""How often a client that hears nothing looks whether the server lives."""
CLOSE_S = 12.0
START_AGAIN_S = 30.0
"""A package that does not start is not tried again for every episode."""


class EpisodeFailed(Exception):
    """A run that the server could not bring to its end: data, as any failed episode."""


class SourceConfig(Config):
    """Which environment, and the Python that has it."""

    python: str
    """The interpreter of the environment where verifiers and the package are installed, e.g. "~/vf/bin/python"."""
    id: str = Field(min_length=1)
    """The package: a taskset of verifiers.v1 (0.3.1, 0.4), or one with load_environment (0.3.1)."""
    arguments: dict[str, Any] = {}
    """Tasksets: verifiers' `[env]` table (taskset, seats, timeouts). Others: the arguments of load_environment."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Until the package has said what it is."""


class EnvServer:
    """Of one environment, started when first needed."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._process: _Serving | None = None
        self._failed: tuple[float, ConfigError] | None = None
        """When it was last found not to start, and why."""

    async def agents(self) -> tuple[str, ...]:
        """The seats that it has."""
        return (await in_thread(self._running)).agents

    async def run(self, task: Mapping[str, Any], base_url: str, model: str) -> dict[str, Any]:
        """One episode, as verifiers records it: {"errors", "traces": [{"id", "agent", "rewards", "metrics", …}]}."""
        process = await in_thread(self._running)
        request = {
            **task,
            "client": {"type": "eval", "base_url": base_url, "api_key_var": "RILL_API_KEY"},
            "model": model,
            "sampling": {},
        }
        return await process.link().run(request)

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> _Serving:
        with self._lock:
            if self._process is not None and not self._process.is_alive:
                self._process.close()
                self._process = None
            if self._process is None:
                if self._failed is not None and time.monotonic() < self._failed[0] + START_AGAIN_S:
                    raise self._failed[1]
                try:
                    self._process = _Serving(self._config)
                except ConfigError as error:
                    self._failed = (time.monotonic(), error)
                    raise
            return self._process


class _Link:
    """The connection of one event loop."""

    def __init__(self, address: str, guest: Guest) -> None:
        self._guest = guest
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._runs: dict[bytes, _Run] = {}
        self._reader: asyncio.Task[None] | None = None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, run = uuid.uuid4().hex.encode(), _Run()
        self._runs[name] = run
        if self._reader is None or self._reader.done():
            self._reader = asyncio.ensure_future(self._read())
        try:
            await self._send(name, "run", request)
            return await run.ended
        except asyncio.CancelledError:
            with contextlib.suppress(zmq.ZMQError):  # the server may be gone
                await self._send(uuid.uuid4().hex.encode(), "cancel", {"request_id": name.decode()})
            raise
        finally:
            del self._runs[name]

    async def _send(self, name: bytes, method: str, payload: Mapping[str, Any]) -> None:
        await self._socket.send_multipart([name, method.encode(), msgspec.msgpack.encode(payload)])

    async def _read(self) -> None:
        """For as long as somebody waits."""
        while self._runs:
            if await self._socket.poll(POLL_MS):
                name, *frames = await self._socket.recv_multipart()
                if (run := self._runs.get(name)) is not None:
                    run.hear(frames)
            elif not self._guest.is_alive:
                for run in self._runs.values():
                    run.fail(f"the environment server died{self._guest.last_words()}")
                self._socket.close()
                return


class _Run:
    """What is known of one episode."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._traces: dict[str, dict[str, Any]] = {}

    def hear(self, frames: list[bytes]) -> None:
        if self.ended.done():
            return
        said = msgspec.msgpack.decode(frames[-1])
        if len(frames) == 2 and frames[0] == b"delta":
            self._change(said)
        elif not said.get("success", True):
            self.fail(str(said.get("error")))
        elif said.get("episode") is not None:  # 0.3.1
            self.ended.set_result(said["episode"])
        else:
            head = said.get("head") or {}
            traces = [self._traces.get(summary["id"], {}) for summary in said.get("traces", ())]
            self.ended.set_result({**head, "traces": traces})

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(EpisodeFailed(f"verifiers: {reason}"))

    def _change(self, delta: dict[str, Any]) -> None:
        name = delta["trace"]
        if delta.get("discard"):  # a retry: the trace before it counts for nothing
            self._traces.pop(name, None)
            return
        trace = self._traces.setdefault(name, {"id": name, "errors": []})
        trace["errors"] += delta.get("errors") or []
        trace.update(delta.get("set") or {})


class Guest:
    """guest.py in the user's Python: told what to do in one line, read line by line."""

    def __init__(self, config: SourceConfig, job: str, limit: int = 0) -> None:
        python = Path(config.python).expanduser()
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"verifiers: there is no Python at {config.python!r}: name the interpreter that has it"
            )
        self._name = config.id
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
        }
        self._process = subprocess.Popen(
            [str(python), str(GUEST), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        request = {"id": config.id, "arguments": config.arguments, "limit": limit}
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        self._out = self._process.stdout
        self._held = b""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def line(self, timeout_s: float) -> str:
        """The next line; "" at the end. Raises ConfigError where the process fails, or says nothing in time."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._held:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ConfigError(
                        f"verifiers: {self._name} said nothing within {timeout_s:g} s: raise start_timeout_s"
                        f"{self.last_words()}"
                    )
                read = os.read(self._out.fileno(), 1 << 20)
                if not read:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # threads of the package's run on
                        self._process.wait(CLOSE_S)
                    if self._process.returncode:
                        raise ConfigError(f"verifiers: {self._name} does not start{self.last_words()}")
                    break
                self._held += read
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    def last_words(self) -> str:
        """The end of what it wrote to standard error, for a message."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 1600))
        text = self._errors.read().decode("utf-8", "replace").strip()
        return f": …{text[-400:]}" if text else ""

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the tool servers that it has started
            self._process.wait(CLOSE_S)
        self._out.close()
        self._errors.close()


class _Serving(Guest):
    """A server that runs, and the connections to it."""

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config, "serve")
        try:
            hello = json.loads(self.line(config.start_timeout_s))
        except BaseException:
            self.close()
            raise
        self.agents = tuple(hello["agents"])
        self.link: PerLoop[_Link] = PerLoop(lambda: _Link(hello["address"], self))
