"""How a group is moved between two steps: its state is asked for, its processes end, and others start elsewhere.

    state() on every rank ─▶ stop ─▶ start on the new seats ─▶ restore() on every rank
                                        └─ fails: start on the old seats ─▶ restore() ─▶ the error

Name, channels and locks of the group stay, because the hub knows them by the name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rill.errors import RunError
from rill.runtime.device.placement import Seat
from rill.runtime.group import Move
from rill.runtime.process.members import Group
from rill.runtime.process.waits import left_s
from rill.runtime.transfer import wire

if TYPE_CHECKING:
    from rill.runtime.process.supervisor import Supervisor

_log = logging.getLogger(__name__)


def move_group(supervisor: Supervisor, group: Group, seats: Sequence[Seat], timeout_s: float) -> Move:
    """Called with the group's changes held."""
    started_s = time.monotonic()
    deadline_s = started_s + timeout_s
    members = list(group.members.values())
    before = [member.seat for member in members]
    supervisor.wait_started(members, timeout_s)
    states = supervisor.call(members, "state").wait(left_s(deadline_s))
    supervisor.retire(members, left_s(deadline_s))
    try:
        _start(supervisor, group, seats, deadline_s)
        state_bytes = _restore(supervisor, group, states, deadline_s)
    except RunError as error:
        supervisor.retire(list(group.members.values()), 0.0)
        _start(supervisor, group, before, time.monotonic() + timeout_s)
        _restore(supervisor, group, states, time.monotonic() + timeout_s)
        raise RunError(f"{group.name} did not come up where it was moved to, and is back: {error}") from error
    move = Move(
        group=group.name,
        before=_devices(before),
        after=_devices(seats),
        state_bytes=state_bytes,
        seconds=time.monotonic() - started_s,
    )
    _log.info("%s moved from %s to %s in %.2f s", group.name, move.before, move.after, move.seconds)
    return move


def _start(supervisor: Supervisor, group: Group, seats: Sequence[Seat], deadline_s: float) -> None:
    supervisor.begin(group, seats)
    supervisor.wait_started(list(group.members.values()), left_s(deadline_s))


def _restore(supervisor: Supervisor, group: Group, states: Sequence[Any], deadline_s: float) -> int:
    """How many bytes of state the ranks got; where nobody gave any, nobody is asked to take it. Then whoever holds the
    group may find it."""
    num_bytes = 0
    if any(state is not None for state in states):
        members = list(group.members.values())
        if len(members) != len(states):
            states = group.cls.reshard(states, len(members))
        restoring = [supervisor.call([m], "restore", s) for m, s in zip(members, states, strict=True)]
        for handle in restoring:
            handle.wait(left_s(deadline_s))
        num_bytes = sum(wire.encode(state).num_bytes for state in states)
    supervisor.announce(group)
    return num_bytes


def _devices(seats: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(device.id for device in seat.devices) for seat in seats)
