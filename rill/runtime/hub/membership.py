"""Who is in the run: the hub's registry of processes, what they told about themselves, and their deaths.

A client joins with its first request; a worker then tells its group, rank and devices (`register`). Which ranks a group
has is the driver's word (`group`); whether a process lives is the agent's, by way of the driver (`died`). Ends are
pushed to everybody as "peer_died". An address that a process has told can be asked for by its name, and waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rill.runtime.address import STORE_GROUP
from rill.runtime.hub.service import ServiceError, group_of, name_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

LEFT = "it was closed or removed"
"""The reason of an end in order."""


class Membership:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.members: dict[str, dict[str, Any]] = {}
        """identity -> what it told: its address, and for a worker its devices."""
        self.first_seen: dict[str, int] = {}
        """group -> number of the event at which its first process joined; and so for a rank that was added later."""
        self._seats: dict[str, dict[int, tuple[int, frozenset[int]]]] = {}
        """group -> rank -> launch and devices, as its ranks told; a rank's seat outlives its process, for the next."""
        self._deaths: dict[str, dict[str, Any]] = {}
        """name -> the note of its death, until the name joins again."""
        self._groups: dict[str, dict[str, Any]] = {}
        """group -> the driver's word on it: its ranks, the word's version and the roster that callers read."""
        self._claim = ("", 0.0)
        self._finding: list[tuple[str, int, str]] = []
        """(client, seq, name) of those who wait for an address, some of them no longer."""

    def ranks(self, group: str) -> frozenset[int]:
        """The ids of a group's ranks now, dead ones included; rank 0 when nobody said."""
        return frozenset(self._groups[group]["ranks"]) if group in self._groups else frozenset((0,))

    def seen_at(self, name: str) -> int:
        """The event from which on a rank counts: when its group was there, or when it was added to it."""
        return self.first_seen.get(name, self.first_seen.get(group_of(name), 0))

    def is_seated(self, group: str) -> bool:
        """Whether every rank of a group has told its devices: only then is it known what the group needs."""
        seats = self._seats.get(group)
        return seats is None or self.ranks(group) <= seats.keys()

    def devices_of(self, group: str) -> frozenset[int]:
        seats, ranks = self._seats.get(group, {}), self.ranks(group)
        return frozenset[int]().union(*(devices for rank, (_, devices) in seats.items() if rank in ranks))

    def is_alive(self, client: str) -> bool:
        return client in self.members

    def on_sync(self, client: str, seq: int, payload: None) -> bool:
        return True

    def on_members(self, client: str, seq: int, payload: None) -> dict[str, dict[str, Any]]:
        return self.members

    def on_group_word(self, client: str, seq: int, group: str) -> dict[str, Any]:
        """The driver's last word on a group; empty: there was none."""
        return self._groups.get(group, {})

    def on_join(self, client: str, seq: int, payload: None) -> None:
        machine, name, group = self._machine, name_of(client), group_of(client)
        for earlier in [c for c in self.members if name_of(c) == name and c != client]:
            machine.end_client(earlier, f"replaced by {client}", machine.now_s)
        self._deaths.pop(name, None)
        for note in self._deaths.values():
            machine.push(client, "peer_died", note)
        self.members[client] = {}
        self.first_seen.setdefault(group, machine.num_events)
        if group in self._groups and name not in {f"{group}[{rank}]" for rank in self.ranks(group)}:
            self.first_seen.setdefault(name, machine.num_events)

    def on_register(self, client: str, seq: int, info: dict[str, Any]) -> bool:
        self.members.setdefault(client, {}).update(info)
        if "devices" in info:
            rank, _, launch = client.rpartition("[")[2].partition("]#")
            seat = (int(launch), frozenset(info["devices"]))
            self._seats.setdefault(group_of(client), {})[int(rank)] = seat
            self._machine.locks.advance()
        if "address" in info:
            found = [wait for wait in self._finding if wait[2] == name_of(client)]
            for waiter, waiter_seq, _ in found:
                self._machine.reply(waiter, waiter_seq, info["address"])
            self._finding = [wait for wait in self._finding if wait not in found]
        return True

    def on_find(self, client: str, seq: int, name: str) -> Any:
        """The address of the process of this name; answered when there is one, refused where the last one has ended."""
        for member, info in self.members.items():
            if "address" in info and name_of(member) == name:
                return info["address"]
        if name in self._deaths:
            raise ServiceError("PeerDiedError", f"{name} is gone: {self._deaths[name]['reason']}")
        self._finding.append((client, seq, name))
        return None

    def on_group(self, client: str, seq: int, word: dict[str, Any]) -> bool:
        """The driver's word: {group, version, ranks, launches, roster}. The devices of launches before these do not
        count any more. The roster is kept for callers. A group without ranks is closed."""
        group = word["group"]
        self._groups[group] = word
        if not word["ranks"]:
            del self._groups[group]
        first = dict(zip(word["ranks"], word["launches"], strict=True))
        seats = self._seats.get(group, {})
        self._seats[group] = {r: seat for r, seat in seats.items() if seat[0] >= first.get(r, 0)}
        change = {"group": group, "version": word["version"], "ranks": word["ranks"]}
        for other in list(self._machine.streams):
            if other != client:
                self._machine.push(other, "group_changed", change)
        self._machine.locks.advance()
        self._machine.broker.members_changed()
        return True

    def on_leave(self, client: str, seq: int, payload: None) -> None:
        self._machine.end_client(client, LEFT, self._machine.now_s)

    def on_died(self, client: str, seq: int, payload: tuple[str, str]) -> None:
        """A supervisor's word: [identity or name, reason]. It may have died before it joined."""
        who, reason = payload
        dead = [c for c in self.members if who in (c, name_of(c))]
        if not dead and name_of(who) != who:
            dead = [who]
        for member in dead:
            self._machine.end_client(member, reason, self._machine.now_s)

    def on_claim_report(self, client: str, seq: int, payload: tuple[str, float]) -> str:
        """[path, seconds]: empty for the first who asks; for so long, others get the first one's path."""
        held, until_s = self._claim
        if self._machine.now_s < until_s:
            return held
        self._claim = (payload[0], self._machine.now_s + payload[1])
        return ""

    def end_client(self, client: str, reason: str) -> None:
        self.members.pop(client, None)
        self._finding = [wait for wait in self._finding if wait[0] != client]
        note = {"identity": client, "reason": reason}
        if not client.startswith(STORE_GROUP):  # its agent starts it again
            self._deaths[name_of(client)] = note
        for other in list(self._machine.streams):
            self._machine.push(other, "peer_died", note)
