"""Who is in the run: the hub's registry of processes, what they told about themselves, and their deaths.

A client joins with its first request and tells its address, which can be asked for by its name, and waited for. Which
ranks a group has, and on which devices, is the driver's word (`group`); whether a process lives is the agent's, by way
of the driver (`died`). Ends are pushed to everybody as "peer_died".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rill.errors import PeerDiedError
from rill.runtime.address import STORE_GROUP, group_of, name_of
from rill.runtime.hub.messages import Roster

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

LEFT = "it was closed or removed"
"""The reason of an end in order."""


class Membership:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.members: dict[str, Any] = {}
        """identity -> the address it told, if it has one."""
        self.first_seen: dict[str, int] = {}
        """group -> number of the event at which its first process joined; and so for a rank that was added later."""
        self._deaths: dict[str, dict[str, Any]] = {}
        """name -> the note of its death, until the name joins again."""
        self._groups: dict[str, Roster] = {}
        self._claim = ("", 0.0)
        self._finding: list[tuple[str, int, str]] = []
        """(client, seq, name) of those who wait for an address, some of them no longer."""

    def ranks(self, group: str) -> frozenset[int]:
        """The ids of a group's ranks now, dead ones included; rank 0 when nobody said."""
        return frozenset(self._groups[group].launches) if group in self._groups else frozenset((0,))

    def seen_at(self, name: str) -> int:
        """The event from which on a rank counts: when its group was there, or when it was added to it."""
        return self.first_seen.get(name, self.first_seen.get(group_of(name), 0))

    def devices_of(self, group: str) -> frozenset[int] | None:
        """Of all its ranks; None where the driver's word on it has not come yet."""
        if group not in self._groups:
            return None
        return frozenset[int]().union(*self._groups[group].devices.values())

    def on_sync(self, client: str, seq: int, payload: None) -> bool:
        return True

    def on_members(self, client: str, seq: int, payload: None) -> dict[str, Any]:
        return self.members

    def on_roster(self, client: str, seq: int, group: str) -> Roster | bool:
        """The driver's last word on a group; false: there was none."""
        return self._groups.get(group, False)

    def on_join(self, client: str, seq: int, address: Any) -> bool:
        machine, name, group = self._machine, name_of(client), group_of(client)
        for earlier in [c for c in self.members if name_of(c) == name and c != client]:
            machine.end_client(earlier, f"replaced by {client}")
        self._deaths.pop(name, None)
        for note in self._deaths.values():
            machine.push(client, "peer_died", note)
        self.members[client] = address
        self.first_seen.setdefault(group, machine.num_events)
        if group in self._groups and name not in {f"{group}[{rank}]" for rank in self.ranks(group)}:
            self.first_seen.setdefault(name, machine.num_events)
        if address is not None:
            for waiter, waiter_seq, _ in [wait for wait in self._finding if wait[2] == name]:
                machine.reply(waiter, waiter_seq, address)
            self._finding = [wait for wait in self._finding if wait[2] != name]
        return True

    def on_find(self, client: str, seq: int, name: str) -> Any:
        """The address of the process of this name; answered when there is one, refused where the last one has ended and
        the driver has not said that there will be another (a group that moves)."""
        for member, address in self.members.items():
            if address is not None and name_of(member) == name:
                return address
        if name in self._deaths and not self._will_start_again(self._deaths[name]["identity"]):
            raise PeerDiedError(f"{name} is gone: {self._deaths[name]['reason']}")
        self._finding.append((client, seq, name))
        return None

    def _will_start_again(self, ended: str) -> bool:
        rank, _, launch = ended.rpartition("[")[2].partition("]#")
        word = self._groups.get(group_of(ended))
        return word is not None and word.launches.get(int(rank), 0) > int(launch)

    def on_group(self, client: str, seq: int, word: Roster) -> bool:
        before = self._groups.get(word.group)
        self._groups[word.group] = word
        if before is not None:
            present = {name_of(one) for one in self.members}
            grown = {f"{word.group}[{rank}]" for rank in word.launches if rank not in before.launches}
            # It moved to more devices: a rank of that name may have been there before, and gone.
            self.first_seen |= dict.fromkeys(grown - present, self._machine.num_events)
        if not word.launches:
            del self._groups[word.group]
            for name in [one for one in self.first_seen if group_of(one) == word.group]:
                del self.first_seen[name]
        for other in list(self._machine.streams):
            if other != client:
                self._machine.push(other, "group_changed", [word.group, word.version])
        self._machine.locks.advance()
        self._machine.broker.members_changed()
        return True

    def on_leave(self, client: str, seq: int, payload: None) -> None:
        self._machine.end_client(client, LEFT)

    def on_died(self, client: str, seq: int, payload: tuple[str, str]) -> None:
        """A supervisor's word: [identity, reason]. It may have died before it joined."""
        self._machine.end_client(*payload)

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
