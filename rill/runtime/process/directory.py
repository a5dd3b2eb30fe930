"""Where the other processes of the run are, as this one knows it: asked once from the hub, dropped at their death.

Workers publish their address at start under "address/<group>/<rank>"; it goes away with them. Which ranks a group has,
and where those are that can be called, is the driver's word (`announce`), kept by the hub. The hub pushes every death
and every change of a group to everybody; whoever waits for a peer registers with `on_death`.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from rill.errors import PeerDiedError, StuckError, UserError
from rill.runtime.address import WorkerAddress

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext
    from rill.runtime.group import Roster

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
        self._rosters: dict[str, Roster] = {}
        self._newest: dict[str, int] = {}
        """group -> the version of the driver's last word on it, as the hub has pushed it."""
        self._listeners: list[Callable[[str, str], None]] = []
        if follows_hub:
            context.hub.on("peer_died", self._on_peer_died)
            context.hub.on("group_changed", self._on_group_changed)

    def publish(self, address: WorkerAddress) -> None:
        """Make this process known. Does not wait: whoever asks waits."""
        key = _key(address.group, address.rank)
        self._context.hub.submit("registry.publish", [key, list(astuple(address)), True])

    def announce(
        self, group: str, roster: Roster, launches: Mapping[int, int], *, is_awaited: bool = False
    ) -> None:
        """The driver's word on a group: the ranks it has, with the number of each one's launch, and whom a call to it
        reaches. `is_awaited`: whoever asks the hub after the return gets this answer."""
        word = {
            "group": group,
            "version": roster.version,
            "ranks": list(launches),
            "launches": list(launches.values()),
            "roster": pickle.dumps(roster),
        }
        if is_awaited:
            self._context.hub.call("registry.group", word, _ASK_WAIT_S)
        else:
            self._context.hub.submit("registry.group", word)

    def newest_roster(self, group: str, given: Roster) -> Roster:
        """The later of `given` and what the hub has; the hub is asked only where it has told of something newer, or
        somebody in the roster has died."""
        roster = self._rosters.get(group, given)
        if roster.version < given.version:
            roster = given
        is_old = self._newest.get(group, 0) > roster.version
        if is_old or any(address.identity in self._dead for address in roster.addresses):
            word = self._context.hub.call("registry.group_word", group, _ASK_WAIT_S)
            if word and word["version"] > roster.version:
                found: Roster = pickle.loads(word["roster"])
                roster = found if found.addresses else roster  # none: it is about to start elsewhere
        self._rosters[group] = roster
        return roster

    def everybody(self) -> list[WorkerAddress]:
        """Who is in the run now, the driver too, as the hub knows it."""
        values = self._context.hub.call("registry.values", "address/", _ASK_WAIT_S)
        return [replace(WorkerAddress(*found), gpus=()) for found in values.values()]

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
            self._context.mailbox.forget(known.endpoint_from(self._context.site.node_id))
        for listener in self._listeners:
            listener(identity, reason)

    def close(self) -> None:
        """Nobody here wants to hear of deaths any more."""
        self._listeners.clear()

    def _on_peer_died(self, note: Any) -> None:
        self.report_death(note["identity"], note["reason"])

    def _on_group_changed(self, change: Any) -> None:
        self._newest[change["group"]] = change["version"]

    def _find_relaunched(self, group: str, rank: int, last_dead: str) -> WorkerAddress:
        values = self._context.hub.call("registry.values", _key(group, rank), _ASK_WAIT_S)
        found = values.get(_key(group, rank))
        address = self._learn(found) if found is not None else None
        if address is None or address.identity in self._dead:
            raise PeerDiedError(f"{group}[{rank}] is gone: {self._dead[last_dead]}")
        return address

    def _learn(self, found: list[Any]) -> WorkerAddress:
        address = WorkerAddress(*found)
        address = replace(address, gpus=tuple(address.gpus))
        with self._lock:
            if address.identity not in self._dead:
                self._known[address.group, address.rank] = address
                self._last_dead.pop((address.group, address.rank), None)
        return address

    def _check_rank(self, group: str, rank: int) -> None:
        word = self._context.hub.call("registry.group_word", group, _ASK_WAIT_S)
        if word and rank not in word["ranks"]:
            ranks = ", ".join(map(str, word["ranks"]))
            raise UserError(f"{group} has ranks {ranks}: there is no {group}[{rank}]")


def _key(group: str, rank: int) -> str:
    return f"address/{group}/{rank}"
