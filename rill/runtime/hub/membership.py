"""Who is in the run: the hub's registry of processes, what they told about themselves, and their deaths.

A client joins with its first request; a worker then tells its group, rank, world size and devices with `register`,
and the first rank of a shared process tells the devices of the others, which join when they first need the hub.
The end of a client (reported by the cluster, or seen by the hub) is pushed to every other client as "peer_died"; who
joins later is told of those that are dead and not replaced.
Small values that processes want to agree on (endpoints, rendezvous) are published under a key and can be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rill.runtime.hub.service import DEFERRED, Handler, group_of, name_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

LEFT = "left"
"""The reason of an end in order: told to those who wait, not kept as a death."""


class Membership:
    """Processes by identity; values by key."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.members: dict[str, dict[str, Any]] = {}
        """identity -> what it told: pid, host, and for a worker group, rank, world_size, devices, endpoints …"""
        self.first_seen: dict[str, int] = {}
        """group -> number of the event at which its first process joined."""
        self.seats: dict[str, dict[int, frozenset[int]]] = {}
        """group -> rank -> devices, as its ranks told; a rank's seat outlives its process, for the next one."""
        self._deaths: dict[str, dict[str, Any]] = {}
        """name -> the note of its death, until the name joins again."""
        self._world_size: dict[str, int] = {}
        self._values: dict[str, tuple[Any, str | None]] = {}
        self._waiting: dict[str, list[tuple[str, int]]] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "join": Handler(dict[str, Any], self._join),
            "register": Handler(dict[str, Any], self._register),
            "leave": Handler(None, self._leave),
            "died": Handler(tuple[str, str], self._died),
            "publish": Handler(tuple[str, Any, bool], self._publish),
            "fetch": Handler(str, self._fetch),
            "cancel_fetch": Handler(tuple[str, int], self._cancel_fetch),
            "sync": Handler(None, lambda client, seq, payload: None),
        }

    def queries(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "members": lambda _: self.members,
            "values": lambda prefix: {k: v for k, (v, _) in self._values.items() if k.startswith(prefix)},
        }

    def world_size(self, group: str) -> int:
        """How many ranks a group has; 1 when nobody said."""
        return self._world_size.get(group, 1)

    def is_seated(self, group: str) -> bool:
        """Whether every rank of a group has told its devices: only then is it known what the group needs."""
        seats = self.seats.get(group)
        return not seats or len(seats) >= self.world_size(group)

    def devices_of(self, group: str) -> frozenset[int]:
        """The devices of all ranks of a group."""
        return frozenset[int]().union(*self.seats.get(group, {}).values())

    def devices_of_client(self, client: str) -> frozenset[int]:
        """The devices of one process."""
        return frozenset(self.members.get(client, {}).get("devices", ()))

    def is_alive(self, client: str) -> bool:
        return client in self.members

    # --- requests -----------------------------------------------------------------------------------------

    def _join(self, client: str, seq: int, info: dict[str, Any]) -> Any:
        machine = self._machine
        older = [c for c in self.members if name_of(c) == name_of(client) and c != client]
        for earlier in older:
            machine.end_client(earlier, f"replaced by {client}", machine.now_s)
        self._deaths.pop(name_of(client), None)
        for note in self._deaths.values():
            machine.push(client, "peer_died", note)
        self.members[client] = dict(info)
        self.first_seen.setdefault(group_of(client), machine.num_events)
        return None

    def _register(self, client: str, seq: int, info: dict[str, Any]) -> Any:
        others = info.pop("others", ())
        self.members.setdefault(client, {}).update(info)
        group = group_of(client)
        if "world_size" in info and self._world_size.get(group) != info["world_size"]:
            self.seats[group] = {}
            self._world_size[group] = info["world_size"]
        if "devices" in info:
            for rank, devices in ((info["rank"], info["devices"]), *others):
                self.seats[group][rank] = frozenset(devices)
            self._machine.locks.members_changed()
        return None

    def _leave(self, client: str, seq: int, payload: Any) -> Any:
        self._machine.end_client(client, LEFT, self._machine.now_s)
        return DEFERRED

    def _died(self, client: str, seq: int, payload: Any) -> Any:
        """A supervisor's word: [identity or name, reason]. It may have died before it joined."""
        who, reason = payload
        dead = [c for c in self.members if who in (c, name_of(c))]
        if not dead and name_of(who) != who:
            dead = [who]
        for member in dead:
            self._machine.end_client(member, reason, self._machine.now_s)
        return dead

    def _publish(self, client: str, seq: int, payload: Any) -> Any:
        """[key, value, whether it goes away with the publisher]."""
        key, value, is_owned = payload
        self._values[key] = (value, client if is_owned else None)
        for waiter, waiter_seq in self._waiting.pop(key, []):
            self._machine.reply(waiter, waiter_seq, value)
        return None

    def _fetch(self, client: str, seq: int, key: str) -> Any:
        """Answered when the key is published."""
        if key in self._values:
            return self._values[key][0]
        self._waiting.setdefault(key, []).append((client, seq))
        return DEFERRED

    def _cancel_fetch(self, client: str, seq: int, payload: Any) -> Any:
        """[key, seq of the fetch]: answered with nothing, unless it was answered already."""
        key, fetch_seq = payload
        waiting = self._waiting.get(key, [])
        if (client, fetch_seq) in waiting:
            waiting.remove((client, fetch_seq))
            self._machine.reply(client, fetch_seq, None)
            if not waiting:
                del self._waiting[key]
        return DEFERRED

    # --- deaths -------------------------------------------------------------------------------------------

    def end_client(self, client: str, reason: str) -> None:
        info = self.members.pop(client, {})
        self._values = {k: v for k, v in self._values.items() if v[1] != client}
        for key in list(self._waiting):
            self._waiting[key] = [w for w in self._waiting[key] if w[0] != client]
            if not self._waiting[key]:
                del self._waiting[key]
        note = {"identity": client, "name": name_of(client), "reason": reason, "info": info}
        if reason != LEFT:
            self._deaths[name_of(client)] = note
        for other in list(self._machine.streams):
            self._machine.push(other, "peer_died", note)
