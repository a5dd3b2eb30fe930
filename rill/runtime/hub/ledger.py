"""Whose memory is free: tells owners when a payload is no longer needed, and ends the files of dead owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rill.runtime.transfer.segments import Ref

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine


class Ledger:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[str, list[tuple[str, int]]] = {}
        self._orphans: dict[str, int] = {}
        """Store segments of dead processes -> how many items still lie in them."""

    def free(self, ref: Ref | None) -> None:
        """Tell the owner of the memory, or count down to the file's end when the owner is dead."""
        if ref is None:
            return
        if self._machine.membership.is_alive(ref.owner):
            self._free.setdefault(ref.owner, []).append(ref.slot)
        elif ref.segment in self._orphans:
            self._orphans[ref.segment] -= 1
            if self._orphans[ref.segment] == 0:
                del self._orphans[ref.segment]
                self._unlink(ref.segment)

    def tell(self) -> None:
        """At the end of an event: one message per owner of freed memory."""
        if self._free:
            free, self._free = self._free, {}
            for owner, slots in free.items():
                self._machine.push(owner, "store_free", slots)

    def end_owner(self, client: str, refs: Iterable[Ref | None]) -> None:
        """Memory that outlives its process: count what still lies there, delete the rest."""
        self._free.pop(client, None)
        kept: dict[str, int] = {}
        for ref in refs:
            if ref is not None and ref.owner == client:
                kept[ref.segment] = kept.get(ref.segment, 0) + 1
        self._orphans.update(kept)
        self._unlink([client, sorted(kept)])

    def _unlink(self, order: Any) -> None:
        """A file's name, or [dead owner, files to keep]: for the hub's own node and every node's store server."""
        self._machine.unlinks.append(order)
        for member, info in self._machine.membership.members.items():
            if info.get("serves_store"):
                self._machine.push(member, "store_unlink", order)
