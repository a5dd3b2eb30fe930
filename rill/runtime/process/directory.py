"""Where the other processes of the run are, as this one knows it: asked once from the hub, dropped at their death.

Workers publish their address at start under "address/<group>/<rank>", and a process that was started again itself
under "process/<group>/<first rank>" once its ranks are initialised; both go away with them. The hub pushes every death
to everybody; whoever waits for a peer registers with `on_death`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from rill.errors import PeerDiedError, StuckError, UserError
from rill.runtime.context import WorkerAddress

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext
    from rill.runtime.process.call import HostProcess

_ASK_WAIT_S = 30.0


class Directory:
    """Addresses and deaths. Thread-safe."""

    def __init__(self, context: RuntimeContext, *, follows_hub: bool = True) -> None:
        """The driver does not follow the hub: it hears of deaths from the agents, with the cause."""
        self._context = context
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], WorkerAddress] = {}
        self._dead: dict[str, str] = {}
        self._last_dead: dict[tuple[str, int], str] = {}
        self._listeners: list[Callable[[str, str], None]] = []
        if follows_hub:
            context.hub.on("peer_died", self._on_peer_died)

    def publish(self, address: WorkerAddress, world_size: int) -> None:
        """Make a rank of this process known. Does not wait: whoever asks waits."""
        key = _key(address.group, address.rank)
        self._context.hub.submit("registry.publish", [key, [*astuple(address), world_size], True])

    def publish_process(self, process: HostProcess) -> None:
        """Make this process known to those who hold its group, and knew the one before it. Returns when it is."""
        lead = process.addresses[0]
        value = [_process_key(lead.group, lead.rank), pickle.dumps(process), True]
        self._context.hub.call("registry", "publish", value, _ASK_WAIT_S)

    def processes(self, group: str) -> list[HostProcess]:
        """Of a group's processes, those that were started again and whose ranks are initialised."""
        found = self._context.hub.query("registry", "values", f"process/{group}/", _ASK_WAIT_S)
        return [pickle.loads(process) for process in found.values()]

    def is_dead(self, identity: str) -> bool:
        """Whether this process has heard of its death."""
        return identity in self._dead

    def find(self, group: str, rank: int, timeout_s: float) -> WorkerAddress:
        """The address of a rank. Waits for one that is not there yet; PeerDiedError for a dead one."""
        with self._lock:
            known = self._known.get((group, rank))
            last_dead = self._last_dead.get((group, rank))
        if known is not None:
            return known
        if last_dead is not None:
            return self._find_relaunched(group, rank, last_dead)
        try:
            found = self._context.hub.fetch(_key(group, rank), timeout_s)
        except StuckError as error:
            self._check_rank(group, rank)
            raise StuckError(f"{self._context.address.name}: no worker {group}[{rank}] came up") from error
        return self._learn(found)

    def on_death(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener(identity, reason)` for every death."""
        self._listeners.append(listener)

    def death_of(self, group: str, rank: int) -> str | None:
        """Why the last process of a rank is gone, unless there is a newer one."""
        with self._lock:
            identity = self._last_dead.get((group, rank))
        if identity is None:
            return None
        try:
            self._find_relaunched(group, rank, identity)
        except PeerDiedError:
            return self._dead[identity]
        return None

    def report_death(self, identity: str, reason: str) -> None:
        """Said by the hub, or by the driver, which knows first."""
        with self._lock:
            if identity in self._dead:
                return
            self._dead[identity] = reason
            name, _, _ = identity.rpartition("#")
            group, _, rank = name.rstrip("]").rpartition("[")
            self._last_dead[group, int(rank)] = identity
            known = self._known.get((group, int(rank)))
            if known is not None and known.identity == identity:
                del self._known[group, int(rank)]
            else:
                known = None
        if known is not None:
            self._context.mailbox.forget(known.endpoint_from(self._context.node_id))
            if known.raw_endpoint:
                self._context.mailbox.forget(known.raw_endpoint)
        for listener in self._listeners:
            listener(identity, reason)

    def close(self) -> None:
        """Nothing to give back."""

    def _on_peer_died(self, note: Any) -> None:
        self.report_death(note["identity"], note["reason"])

    def _find_relaunched(self, group: str, rank: int, last_dead: str) -> WorkerAddress:
        values = self._context.hub.query("registry", "values", _key(group, rank), _ASK_WAIT_S)
        found = values.get(_key(group, rank))
        address = self._learn(found) if found is not None else None
        if address is None or address.identity in self._dead:
            raise PeerDiedError(f"{group}[{rank}] is gone: {self._dead[last_dead]}")
        return address

    def _learn(self, found: list[Any]) -> WorkerAddress:
        fields: list[Any] = found[:-1]  # the last is the world size
        address = WorkerAddress(*fields)
        address = replace(address, gpus=tuple(address.gpus))
        with self._lock:
            if address.identity not in self._dead:
                self._known[address.group, address.rank] = address
                self._last_dead.pop((address.group, address.rank), None)
        return address

    def _check_rank(self, group: str, rank: int) -> None:
        values = self._context.hub.query("registry", "values", f"address/{group}/", _ASK_WAIT_S)
        if values:
            world_size = next(iter(values.values()))[-1]
            if rank >= world_size:
                raise UserError(f"{group} has ranks 0 to {world_size - 1}: there is no {group}[{rank}]")


def _key(group: str, rank: int) -> str:
    return f"address/{group}/{rank}"


def _process_key(group: str, lead_rank: int) -> str:
    return f"process/{group}/{lead_rank}"


def remaining_s(deadline_s: float) -> float:
    """Seconds until a deadline of time.monotonic(), at least 0."""
    return max(0.0, deadline_s - time.monotonic())
