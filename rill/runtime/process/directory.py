"""Where the other processes of the run are, as this one knows it: asked once from the hub, dropped at their death.

A process tells the hub its address when it starts; it goes away with the process. Which ranks a group has, and where
those are that can be called, is the driver's word (the supervisor's), kept by the hub. The hub pushes every death and
every change of a group to everybody; whoever waits for a peer registers with `on_death`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rill.errors import StuckError, UserError
from rill.runtime.address import DRIVER_GROUP, WorkerAddress, name_of
from rill.runtime.hub.messages import Roster

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext


class Directory:
    """Addresses and deaths. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._known: dict[str, WorkerAddress] = {}
        self.dead: dict[str, str] = {}
        """identity -> why, of those of whose death this process has heard."""
        self._rosters: dict[str, Roster] = {}
        self._newest: dict[str, int] = {}
        """group -> the version of the driver's last word on it, as the hub has pushed it."""
        self._listeners: list[Callable[[str, str], None]] = []
        if context.address.group != DRIVER_GROUP:  # which hears of deaths from the agents, with the cause
            context.hub.on("peer_died", lambda note: self.report_death(note["identity"], note["reason"]))
            context.hub.on("group_changed", lambda told: self._newest.update([told]))

    def newest_roster(self, group: str, given: Roster) -> Roster:
        """The later of `given` and what the hub has; the hub is asked only where it has told of something newer, or
        somebody in the roster has died."""
        roster = self._rosters.get(group, given)
        if roster.version < given.version:
            roster = given
        is_old = self._newest.get(group, 0) > roster.version
        if is_old or (self.dead and any(address.identity in self.dead for address in roster.addresses)):
            found = self._ask(group)
            # Without addresses it is about to start elsewhere.
            if found and found.version > roster.version and found.addresses:
                roster = found
        self._rosters[group] = roster
        return roster

    def everybody(self) -> list[WorkerAddress]:
        """Who is in the run now, the driver too, as the hub knows it."""
        members = self._context.hub.call("registry.members", None)
        # A store server's address is a text.
        return [msgspec.convert(told, WorkerAddress) for told in members.values() if isinstance(told, list)]

    def find(self, group: str, rank: int, timeout_s: float) -> WorkerAddress:
        """The address of a rank. Waits for one that is not there yet; PeerDiedError for a dead one."""
        name = f"{group}[{rank}]"
        if known := self._known.get(name):
            return known
        try:
            found: WorkerAddress = self._context.hub.call("registry.find", name, timeout_s, WorkerAddress)
        except StuckError as error:
            roster = self._ask(group)
            if roster and rank not in roster.launches:
                ranks = ", ".join(map(str, roster.launches))
                raise UserError(f"{group} has ranks {ranks}: there is no {name}") from error
            raise StuckError(f"{self._context.address.name}: no worker {name} came up") from error
        with self._lock:
            if found.identity not in self.dead:
                self._known[name] = found
        return found

    def _ask(self, group: str) -> Roster | None:
        """The driver's last word on a group, if there was one."""
        told: Roster | bool = self._context.hub.call("registry.roster", group, answer=Roster | bool)
        return told if isinstance(told, Roster) else None

    def on_death(self, listener: Callable[[str, str], None]) -> None:
        self._listeners.append(listener)

    def report_death(self, identity: str, reason: str) -> None:
        """Said by the hub, or by the driver, which knows first."""
        name = name_of(identity)
        with self._lock:
            if identity in self.dead:
                return
            self.dead[identity] = reason
            known = self._known.get(name)
            if known is not None and known.identity == identity:
                del self._known[name]
        if known is not None and known.identity == identity:
            self._context.mailbox.forget(known.endpoint_from(self._context.site.node_id))
        for listener in self._listeners:
            listener(identity, reason)

    def close(self) -> None:
        self._listeners.clear()
