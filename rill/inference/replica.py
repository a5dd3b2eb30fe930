"""The driver's side of a replica: a worker of the runtime with an engine in it (see replica_worker.py).

    any thread ──▶ submit ──▶ sender thread ──▶ worker             what comes meanwhile travels together
    any thread ──▶ abort, call ──▶ worker                          nobody waits for a worker that has stopped reading
    router     ◀── on_news, on_death ◀── reader thread ◀── news    asked again as soon as it was answered

Everything that the worker does not answer any more ends in PeerDiedError. The router turns that into a retry elsewhere.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rill.config import PartConfig
from rill.errors import EngineError, PeerDiedError, RillError, StuckError, WorkerError
from rill.inference.base import Delta, Request
from rill.inference.commands import CONTROL_TIMEOUT_S
from rill.inference.replica_worker import End, EngineFacts, Replica
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import Placement
from rill.types import PolicyVersion

_NEWS_WAIT_S = 10.0


class ReplicaProcess:
    """Launches the worker at construction and returns when its engine is loaded.

    On the reader's thread, `on_news` hears of tokens and ends, and `on_death`, once and last, why there is no more.
    """

    def __init__(
        self,
        config: PartConfig,
        *,
        cluster: Cluster,
        name: str,
        placement: Placement,
        start_timeout_s: float,
        on_news: Callable[[list[Delta], list[End]], None],
        on_death: Callable[[ReplicaProcess, PeerDiedError], None],
    ) -> None:
        self.name = name
        self._on_news, self._on_death = on_news, on_death
        try:
            self._group = Replica.launch(
                cluster,
                name=name,
                placement=placement,
                launch_timeout_s=start_timeout_s,
                config=config.model_dump(mode="json"),
            )
            self.facts: EngineFacts = self._group.facts().wait(CONTROL_TIMEOUT_S)[0]
        except WorkerError as error:
            raise EngineError(f"{name}: the engine could not be loaded: {error}") from error
        self.pid = self._group.addresses()[0].pid
        self.version = self.facts.version
        self.num_in_flight = 0
        """Kept by the router."""
        self.is_dead = False
        self._outgoing: deque[Request] = deque()
        self._has_outgoing = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._send, name=f"{name}-sender", daemon=True).start()
        threading.Thread(target=self._read, name=f"{name}-reader", daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Returns at once. A message for each request would cost an event loop as much as the request's JSON."""
        self._check_alive()
        self._outgoing.extend(requests)
        self._has_outgoing.set()

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Returns at once. Not as a `call`: it must not overtake what was submitted before it."""
        self._check_alive()
        with self._sending:
            self._send_outgoing()
            self._group.abort(None if request_ids is None else list(request_ids))

    def call(self, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S, **kwargs: Any) -> Any:
        """A method of the engine there, beside whatever else it does."""
        self._check_alive()
        handle = self._group.act(method, args, kwargs)
        if not handle.ended(timeout_s):
            raise StuckError(f"{self.name}: {method} was not answered within {timeout_s} s")
        error, value, version = handle.wait(0.0)[0]
        self.version = PolicyVersion(version)
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """End the process now. Nobody calls it any more; `on_death` follows."""
        self.is_dead = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._group.close(timeout_s=10.0)

    def _send(self) -> None:
        while not self.is_dead:
            self._has_outgoing.wait(_NEWS_WAIT_S)
            self._has_outgoing.clear()
            with self._sending, suppress(RillError):  # it died: the reader tells of it
                self._send_outgoing()

    def _send_outgoing(self) -> None:
        requests = []
        while self._outgoing:
            requests.append(self._outgoing.popleft())
        if requests:
            self._group.submit(requests)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise PeerDiedError(f"{self.name} (process {self.pid}) is gone")

    def _read(self) -> None:
        try:
            while True:
                handle = self._group.news(_NEWS_WAIT_S)
                while not handle.ended(CONTROL_TIMEOUT_S):
                    pass  # a worker that hangs is the health check's affair
                packed, ends = handle.wait(0.0)[0]
                self._on_news([] if packed is None else packed.unpack(), ends)
        except RillError as error:  # it died, or was closed
            self.is_dead = True
            self._has_outgoing.set()  # the sender ends
            self._on_death(self, PeerDiedError(f"{self.name} (process {self.pid}) died: {error}"))
        with suppress(RillError):
            self._group.close(timeout_s=0.0)
