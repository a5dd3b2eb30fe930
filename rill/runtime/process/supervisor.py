"""The driver's groups: starts their processes, knows which run, tells everybody of those that come and go.

    launch, add ─▶ agents start processes ─▶ hello of each ─▶ `__init__` ─▶ ready ─▶ member of its group
    agents' exit events ─▶ calls that wait for the process fail, the hub and the directory hear of it

Methods are called by user threads; events arrive on the nodes' reader threads and on the inbox thread.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rill.errors import PeerDiedError, PlanError, RunError, StuckError, UserError
from rill.runtime.address import DRIVER_GROUP, WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.device.device import Device, gpus_of
from rill.runtime.device.placement import Placement, Seat, resolve, seats_on_free_devices
from rill.runtime.group import Move, check_class
from rill.runtime.handle import Handle
from rill.runtime.hub.membership import LEFT
from rill.runtime.hub.messages import Roster
from rill.runtime.process.backend import NodeClient
from rill.runtime.process.call import NO_ARGUMENTS, encode_arguments
from rill.runtime.process.launcher import Launcher
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.members import Group, Member
from rill.runtime.process.move import move_group
from rill.runtime.process.waits import left_s
from rill.runtime.process.worker_main import HELLO, INIT, MEMBERS, NO_HUB, STOP
from rill.runtime.transfer.parcel import pack_inline
from rill.runtime.worker import Worker

KILL_WAIT_S = 10.0
MAX_LAUNCH_BYTES = 2**32 - 2**20
GOODBYE_WAIT_S = 2.0
START_LOOK_S = 0.5
"""How often it is looked at whether a rank that others wait for has failed."""
HELLO_WAIT_S = 600.0
"""From a process's start to its hello, before anything of the user's is imported: long only where a node is overloaded.
"""


class Supervisor:
    def __init__(
        self,
        context: RuntimeContext,
        launcher: Launcher,
        find_node: Callable[[str], NodeClient],
        devices: Callable[[], Sequence[Device]],
    ) -> None:
        """`find_node` and `devices` give what the cluster has now."""
        self.context = context
        self._launcher = launcher
        self._find_node = find_node
        self._devices = devices
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._groups: dict[str, Group] = {}
        self._by_key: dict[str, Member] = {}
        """Every process that was started, by its identity, which is its key at the agents."""
        self._launches: Counter[tuple[str, int]] = Counter()
        """By group and rank: a name may be used again, an identity may not."""
        self.moves: list[Move] = []
        self._is_closed = False
        context.mailbox.on(HELLO, self._on_hello)

    # --- what a group asks for ----------------------------------------------------------------------------

    def launch(
        self,
        cls: type[Worker],
        name: str,
        placement: Placement,
        init_kwargs: Mapping[str, Any],
        env: Mapping[str, str],
        threads: int | None,
    ) -> None:
        """Start a group. Nothing is left of one that an agent refuses."""
        check_class(cls)
        arguments = encode_arguments((cls,), init_kwargs)
        if arguments.num_bytes > MAX_LAUNCH_BYTES:
            raise UserError(
                f"{name} is launched with {arguments.num_bytes} bytes of arguments, {MAX_LAUNCH_BYTES} can be "
                "sent: give it what is large by a channel or a file"
            )
        payload = pack_inline(arguments)
        with self._lock:
            self._check_name(name)
            seats = resolve(placement, self._devices())
            group = self._groups[name] = Group(cls, name, env, threads, payload)
        try:
            self.begin(group, seats)
        except BaseException:
            self.close_group(name, 0.0)
            raise

    def roster(self, name: str) -> Roster:
        """The members of a group, once all have said hello or ended: calls may be made before `__init__` has run, and
        wait for it there; those to the dead fail."""
        group = self._group(name)
        if group.roster is not None:
            return group.roster
        with self._changed:
            members = group.members.values()
            if not self._changed.wait_for(lambda: all(m.is_settled for m in members), HELLO_WAIT_S):
                silent = [member.identity for member in members if not member.is_settled]
                raise StuckError(f"{', '.join(silent)} did not start within {HELLO_WAIT_S:g} s")
            launches = {member.seat.rank: member.address.incarnation for member in members}
            seats, addresses = [member.seat for member in members], [member.address for member in members]
            group.roster = _roster(group, launches, seats, addresses)
            return group.roster

    def ranks(self, name: str) -> tuple[int, ...]:
        return tuple(self._group(name).members)

    def devices_of(self, name: str) -> dict[int, tuple[int, ...]]:
        members = list(self._group(name).members.items())
        return {rank: tuple(device.id for device in member.seat.devices) for rank, member in members}

    def lost(self, name: str) -> list[int]:
        return [rank for rank, member in list(self._group(name).members.items()) if member.is_lost]

    def wait_ready(self, name: str, timeout_s: float) -> None:
        self.wait_started(list(self._group(name).members.values()), timeout_s)

    def relaunch(self, name: str, rank: int, timeout_s: float) -> None:
        group = self._group(name)
        with group.changing:
            old = group.members[rank]
            self._end([old])
            (member,) = self._start(group, [old.seat], tuple(group.members))
            self._take_in(group, [member])
            member.ready.wait(timeout_s)
            self.announce(group)

    def add(self, name: str, placement: Placement | None, count: int | None, timeout_s: float) -> list[int]:
        group = self._group(name)
        if (placement is None) == (count is None):
            raise UserError(f"{name}.add: give a placement or a count, one of them")
        with group.changing:
            if placement is not None:
                seats: Sequence[Seat] = resolve(placement, self._devices())
            else:
                last = list(group.members.values())[-1].seat
                with self._lock:
                    members = [m for group in self._groups.values() for m in group.members.values()]
                held = {device.id for member in members for device in member.seat.devices}
                seats = seats_on_free_devices(name, count or 0, last, self._devices(), held)
            seats = [Seat(group.next_rank + n, seat.devices) for n, seat in enumerate(seats)]
            group.next_rank += len(seats)
            new = self._start(group, seats, (*group.members, *(seat.rank for seat in seats)))
            try:
                self.wait_started(new, timeout_s)
            except BaseException:
                self._end(new)
                raise
            self._take_in(group, new)
            self.announce(group)
            self._tell_members(group)
        return [seat.rank for seat in seats]

    def remove(self, name: str, ranks: Sequence[int], notice_s: float) -> None:
        group = self._group(name)
        with group.changing:
            with self._lock:
                leaving = [group.members[rank] for rank in dict.fromkeys(ranks)]
                if len(leaving) == len(group.members):
                    raise UserError(f"{name} would have no rank left: close it instead")
                for member in leaving:
                    del group.members[member.seat.rank]
                group.changed()
            self.retire(leaving, notice_s, is_told=notice_s > 0)
            self.announce(group)
            self._tell_members(group)

    def move(self, name: str, placement: Placement, timeout_s: float) -> Move:
        group = self._group(name)
        seats = resolve(placement, self._devices())
        with group.changing:
            move = move_group(self, group, seats, timeout_s)
        self.moves.append(move)
        return move

    def close_group(self, name: str, timeout_s: float) -> None:
        with self._lock:
            group = self._groups.pop(name, None)
            # Also one that is about to join or to leave it.
            running = [m for m in self._by_key.values() if m.group is group and m.is_running]
        if group is None:
            return
        self.retire(running, timeout_s)
        group.changed()
        with contextlib.suppress(RunError):  # no hub any more: nobody needs to know
            self.context.hub.submit("registry.group", _roster(group, {}, ()))

    # --- starting and ending processes --------------------------------------------------------------------

    def begin(self, group: Group, seats: Sequence[Seat]) -> None:
        """Give a group without processes its first, or, in a move, its next members."""
        ranks = tuple(seat.rank for seat in seats)
        with self._lock:
            group.members.clear()
            group.next_rank = max(group.next_rank, 1 + max(ranks))
            group.changed()
            launches = {rank: self._launches[group.name, rank] for rank in ranks}
        self.context.hub.submit("registry.group", _roster(group, launches, seats))
        self._take_in(group, self._start(group, seats, ranks))

    def _take_in(self, group: Group, members: Sequence[Member]) -> None:
        with self._lock:
            group.members.update((member.seat.rank, member) for member in members)
            group.changed()

    def announce(self, group: Group) -> None:
        """Tell the hub, and so everybody, who can be called now: whoever asks the hub after this gets this answer."""
        self.context.hub.call("registry.group", self.roster(group.name))

    def call(self, members: Iterable[Member], method: str, *args: object, concurrent: bool = False) -> Handle:
        """Call a method of the runtime's own on members that have said hello."""
        targets = [member.address for member in members]
        group = targets[0].group if targets else ""
        return self.context.call(group, method, targets, encode_arguments(args, {}), concurrent=concurrent)

    def wait_started(self, members: Sequence[Member], timeout_s: float) -> None:
        """Until every `__init__` has run; raises what the first failing one raised, also while others wait for it."""
        deadline_s = time.monotonic() + timeout_s
        for member in members:
            while not member.ready.ended(min(START_LOOK_S, left := left_s(deadline_s))) and left:
                lost = next((other for other in members if other.is_lost), None)
                if lost is not None:
                    lost.ready.wait(left)
                    raise PeerDiedError(f"{lost.address.name} died while others of its group started")
            member.ready.wait(left_s(deadline_s))

    def retire(self, members: Sequence[Member], timeout_s: float, *, is_told: bool = False) -> None:
        """End processes in order within the time, else by a kill. `is_told`: run their `notice`."""
        self._ask_to_stop(members, timeout_s, is_told=is_told)
        self._wait_ended(members, timeout_s)
        self._end(members)

    def close(self, timeout_s: float) -> None:
        """Close every group; what is still busy then is left to the agents."""
        with self._lock:
            self._is_closed = True
            groups = list(self._groups)
            running = [member for member in self._by_key.values() if member.is_running]
        self._ask_to_stop(running, timeout_s)
        self._wait_ended(running, timeout_s)
        for name in groups:
            with contextlib.suppress(StuckError):
                self.close_group(name, 0.0)

    def _start(self, group: Group, seats: Sequence[Seat], ranks: tuple[int, ...]) -> list[Member]:
        """Start a process on each of `seats`; none is left where one is refused."""
        new = {seat.rank for seat in seats}
        beside = [member.seat for rank, member in group.members.items() if rank not in new]
        sharing = Counter(seat.node_id for seat in (*beside, *seats))
        started: list[Member] = []
        try:
            for seat in seats:
                member = self._start_one(group, seat, ranks, sharing[seat.node_id])
                started.append(member)
        except BaseException:
            self._end(started)
            raise
        return started

    def _start_one(self, group: Group, seat: Seat, ranks: tuple[int, ...], num_sharing: int) -> Member:
        node = self._find_node(seat.node_id)
        with self._lock:
            incarnation = self._launches[group.name, seat.rank]
            self._launches[group.name, seat.rank] += 1
            gpus = gpus_of(seat.devices)
            address = WorkerAddress(group.name, seat.rank, seat.node_id, incarnation=incarnation, gpus=gpus)
            ready = Handle(f"{group.name}.{INIT}", [address], self.context.late)
            member = self._by_key[address.identity] = Member(group, seat, address, ready)
        num_threads = group.threads or max(1, node.node.num_cores // num_sharing)
        try:
            node.request(self._launcher.worker(node, member, ranks, num_threads))
        except BaseException:
            member.is_running = False
            del self._by_key[member.identity]
            raise
        return member

    def _ask_to_stop(self, members: Sequence[Member], notice_s: float, *, is_told: bool = False) -> None:
        """Once: a worker that has read it stops after the calls before it."""
        with self._lock:
            asked = [m for m in members if not m.is_leaving and m.is_running and m.has_said_hello]
            for member in members:
                member.is_leaving = True
        if is_told and asked:
            self.call(asked, "notice", notice_s, concurrent=True)
        for member in asked if notice_s > 0 else ():
            member.goodbye = Handle(STOP, [member.address])
            self.context.calls.call(member.goodbye, STOP, NO_ARGUMENTS)

    def _end(self, members: Sequence[Member]) -> None:
        """Kill the processes that run, and wait until the agents say so."""
        with self._lock:
            running = [member for member in members if member.is_running]
            for member in running:
                member.is_leaving = True
        for member in running:
            with contextlib.suppress(RunError):  # a node that is gone has no process
                self._find_node(member.seat.node_id).request(member.identity)
        if not self._wait_ended(running, KILL_WAIT_S):
            alive = ", ".join(member.identity for member in running if member.is_running)
            raise StuckError(f"{alive} did not end within {KILL_WAIT_S:g} s of its kill")

    def _wait_ended(self, members: Sequence[Member], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(m.is_running for m in members), timeout_s)

    def _tell_members(self, group: Group) -> None:
        """`Worker.ranks` follows, between the calls before and those after."""
        self.call([m for m in group.members.values() if m.has_said_hello], MEMBERS, tuple(group.members))

    # --- events -------------------------------------------------------------------------------------------

    def process_ended(self, key: str, reason: str) -> None:
        """The agent of its node says so. Keys of processes that are no group's are none of our business."""
        member = self._by_key.get(key)
        if member is None:
            return
        if member.goodbye is not None and reason.startswith("exit code 0"):
            member.goodbye.ended(GOODBYE_WAIT_S)  # its last answers may be on their way
        with self._lock:
            if self._by_key.pop(key, None) is None:
                return
            member.is_running = False
            self._changed.notify_all()
        told = LEFT if member.is_leaving else reason
        if endpoint := member.address.endpoint_from(self.context.site.node_id):
            self.context.mailbox.forget(endpoint)
        # First the hub: whoever hears of the death by a failed call finds there what the dead process had taken.
        with contextlib.suppress(RunError):  # no hub any more: who waits here must hear of it all the same
            self.context.hub.submit("registry.died", [key, told])
        self.context.directory.report_death(key, told)
        if not member.has_said_hello:
            member.ready.lose(0, f"died before it was ready: {reason}")

    def node_lost(self, node_id: str, reason: str) -> None:
        with self._lock:
            lost = [key for key, member in self._by_key.items() if member.seat.node_id == node_id]
        for key in lost:
            self.process_ended(key, reason)

    def hub_lost(self, reason: str) -> None:
        """There will be no hub any more: every process's waits for it must fail."""
        with self._lock:
            running = [m for m in self._by_key.values() if m.is_running and m.has_said_hello]
        self.context.hub.abandon(reason)
        for member in running:
            endpoint = member.address.endpoint_from(self.context.site.node_id)
            self.context.mailbox.post(endpoint, [NO_HUB, reason.encode()])

    def _on_hello(self, _: str, frames: Frames) -> None:
        address = pickle.loads(frames[0])
        assert isinstance(address, WorkerAddress)
        with self._lock:
            member = self._by_key.get(address.identity)
            if member is None:
                return  # it ended meanwhile
            member.address = address
            member.ready.targets = (address,)
            # Under the lock: whoever calls the group from now on comes after its `__init__`.
            self.context.calls.call(member.ready, INIT, member.group.init_payload)
            self._changed.notify_all()

    # --- what there is ------------------------------------------------------------------------------------

    def ranks_on(self, node_id: str) -> dict[str, list[int]]:
        """The ranks on a node, by group; PlanError where a group has no others."""
        found: dict[str, list[int]] = {}
        with self._lock:
            for name, group in self._groups.items():
                ranks = [rank for rank, member in group.members.items() if member.seat.node_id == node_id]
                if ranks and len(ranks) == len(group.members):
                    raise PlanError(f"all of {name} is on {node_id}: close or move the group first")
                if ranks:
                    found[name] = ranks
        return found

    def _group(self, name: str) -> Group:
        with self._lock:
            if self._is_closed:
                raise RunError("the cluster is closed")
            if name not in self._groups:
                raise RunError(f"the group {name!r} is closed")
            return self._groups[name]

    def _check_name(self, name: str) -> None:
        if not name or not all(c.isalnum() or c in "-_." for c in name) or name == DRIVER_GROUP:
            raise UserError(f"{name!r} cannot name a group: use letters, digits, - _ and . (not 'driver')")
        if self._is_closed:
            raise RunError("the cluster is closed: no group can be launched on it")
        if name in self._groups:
            raise PlanError(f"there is a group {name!r} already: close it first or choose another name")


def _roster(
    group: Group, launches: dict[int, int], seats: Sequence[Seat], addresses: Sequence[WorkerAddress] = ()
) -> Roster:
    devices = {seat.rank: [device.id for device in seat.devices] for seat in seats}
    return Roster(group.name, group.version, launches, devices, list(addresses))
