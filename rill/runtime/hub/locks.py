"""The lock manager: whose turn it is on devices that several groups share. A service of the hub.

    acquire ──▶ WAITING ──(its data is there, devices free)──▶ EVICTING ──(others have offloaded)──▶ HELD ──▶ over
                   ▲                                                                                  │
                   └── regained when the awaited data has come ◀── lent: its ranks all wait on a channel ◀──┘
                                                               that a waiting group works on or feeds

A turn belongs to a whole group: it reserves the devices of all its ranks at once. Groups that share no device, or that
were declared to fit together, never meet here. Order follows the data, by roles learned from the channels' traffic: a
group whose input has data goes first, in order of arrival; one that consumes a channel without data waits; one of which
nothing is known yet gets the devices when nobody better asks, and lends them if it then has to wait.

A group keeps its memory after its turn (it is resident) until another group needs the devices ("evict"). Evictions are
numbered: an answer counts only while that eviction is the process's newest and the process has not been let in since,
so a late answer never hides memory that is there. A dead process holds nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

from rill.runtime.address import group_of, name_of
from rill.runtime.hub.channel_state import ChannelState
from rill.runtime.hub.messages import Acquire, Evict, Evicted

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

LINGER_S = 0.1
"""How long a turn that all have left waits for ranks that have not been in: a switch for a late rank costs more."""
MAX_OWED = 8
"""Blocks that single ranks have alone (one publishes for all) add up, and must not hold others up for long."""


class TurnState(StrEnum):
    WAITING = "waiting"
    EVICTING = "evicting"
    HELD = "held"


class Readiness(IntEnum):
    """Whether a group could use the devices now."""

    READY = 0
    UNKNOWN = 1
    NO_DATA = 2


@dataclass(slots=True, eq=False)
class Turn:
    id: int
    group: str
    devices: frozenset[int]
    channels: tuple[str, ...]
    state: TurnState = TurnState.WAITING
    is_resumed: bool = False
    """A rank of it has its data in hand already, because it lent the devices while it waited, or needs none."""
    asked: dict[str, tuple[int, float, frozenset[int]]] = field(default_factory=dict)
    """client -> (seq, since, its devices): waiting to be let in."""
    inside: set[str] = field(default_factory=set)
    entered: Counter[str] = field(default_factory=Counter)
    """How often each rank has been in, by name."""
    linger_until_s: float | None = None
    """All who came have left; until then the turn waits for ranks that have not come yet."""
    lending: set[str] = field(default_factory=set)
    """Clients that were asked to lend and have not answered."""


class LockService:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._channels = machine.broker.channels
        self._turns: list[Turn] = []
        self._next_turn = 1
        self._resident: dict[str, frozenset[int]] = {}
        """client -> devices on which it has memory."""
        self._next_eviction = 1
        self._evicting: dict[str, int] = {}
        """client -> number of the eviction that it has not answered."""
        self._fits: list[frozenset[str]] = []
        self._owed: Counter[str] = Counter()
        """Name of a rank -> how often it has been in less than its peers, over the turns that have ended."""

    # --- requests -----------------------------------------------------------------------------------------

    def on_acquire(self, client: str, seq: int, asked: Acquire) -> None:
        """Answered with the turn's id when it is this group's turn."""
        group = group_of(client)
        turn = self._find_turn(group, client, asked.is_resumed)
        if turn is None:
            # A rank that comes again awaits nobody: its group's last turn is over.
            for over in [t for t in self._turns if t.group == group and t.linger_until_s is not None]:
                self._end(over)
            turn = Turn(self._next_turn, group, frozenset(asked.devices), tuple(asked.channels))
            self._next_turn += 1
            self._turns.append(turn)
        turn.is_resumed = turn.is_resumed or asked.is_resumed
        turn.asked[client] = (seq, self._machine.now_s, frozenset(asked.devices))
        if turn.state == TurnState.HELD:
            self._let_in(turn)
        self.advance()

    def _find_turn(self, group: str, client: str, is_resumed: bool) -> Turn | None:
        """The group's turn that this rank can join: one that waits, or one that others of the group are in.

        A rank that lent its part may go back into a turn that others of its group have kept; one that left it may
        come again while no other group waits for the devices, and as often as any of its group has, in this turn and
        those before: that one may stand in a collective and wait for it.
        """
        name = name_of(client)
        for turn in self._turns:
            if turn.group != group:
                continue
            if turn.inside and (is_resumed or not (turn.lending or self._is_wanted(turn))):
                return turn
            if turn.entered[name] < max(turn.entered.values(), default=1) and not turn.lending:
                return turn
            if turn.inside and self._owed[name] and not turn.lending:
                self._owed[name] -= 1
                return turn
        return None

    def on_release(self, client: str, seq: int, turn_id: int) -> None:
        for turn in list(self._turns):
            if turn.id == turn_id:
                self._leave(turn, client)
        self.advance()

    def on_hurry(self, client: str, seq: int, payload: None) -> None:
        """Another thread of a waiting process has work that needs no data."""
        for turn in self._turns:
            if client in turn.asked:
                turn.is_resumed = True
        self.advance()

    def on_cancel(self, client: str, seq: int, payload: None) -> None:
        """A deadline passed: the wait is taken back, unless it was granted just now."""
        for turn in list(self._turns):
            if turn.asked.pop(client, None) is not None:
                self._end_if_empty(turn)
        self.advance()

    def on_evicted(self, client: str, seq: int, answer: Evicted) -> None:
        """A process that was told to has given its memory back, or works again already and keeps it."""
        if self._evicting.get(client) != answer.number:
            return  # it has been let in since: what it did before that counts no more
        del self._evicting[client]
        for turn in list(self._turns):
            if answer.is_kept:
                turn.lending.discard(client)
            elif client in turn.lending:
                turn.is_resumed = True  # its ranks will come again with their data: nobody else is awaited
                self._leave(turn, client)
        if not answer.is_kept:
            self._resident.pop(client, None)
        self.advance()

    def on_coreside(self, client: str, seq: int, groups: list[str]) -> bool:
        """These groups fit on their devices together: they need no turns among themselves."""
        self._fits.append(frozenset(groups))
        self.advance()
        return True

    def on_take_turns(self, client: str, seq: int, groups: list[str]) -> bool:
        """Undo `coreside` for these groups; the others of a grant still fit together."""
        self._fits = [fit - frozenset(groups) for fit in self._fits]
        self.advance()
        return True

    # --- what else happens --------------------------------------------------------------------------------

    def next_due_s(self) -> float | None:
        return min((t.linger_until_s for t in self._turns if t.linger_until_s is not None), default=None)

    def tick(self) -> None:
        for turn in list(self._turns):
            if turn.linger_until_s is not None and turn.linger_until_s <= self._machine.now_s:
                self._end(turn)
        self.advance()

    def channels_changed(self) -> None:
        """Data came or went, or somebody began to wait."""
        if any(turn.state == TurnState.WAITING for turn in self._turns):
            self.advance()

    def end_client(self, client: str) -> None:
        self._resident.pop(client, None)
        self._evicting.pop(client, None)
        for turn in list(self._turns):
            turn.asked.pop(client, None)
            self._leave(turn, client)
            self._end_if_empty(turn)
            turn.entered.pop(name_of(client), None)  # relaunched, it joins its group's turn again
        self._owed.pop(name_of(client), None)
        self.advance()

    # --- whose turn it is ---------------------------------------------------------------------------------

    def advance(self) -> None:
        while self._advance_once():
            pass

    def _advance_once(self) -> bool:
        for turn in self._turns:
            if turn.state == TurnState.EVICTING:
                if not self._residents_in_the_way(turn):
                    turn.state = TurnState.HELD
                    self._let_in(turn)
                    return True
                inside = {client for other in self._turns for client in other.inside}
                for client in self._residents_in_the_way(turn):
                    if client not in self._evicting and client not in inside:
                        self._evict(client, 0)
        waiting = []
        for turn in self._turns:
            needed = self._machine.membership.devices_of(turn.group)
            if turn.state == TurnState.WAITING and needed is not None:
                turn.devices |= needed
                waiting.append(turn)
        for wanted in (Readiness.READY, Readiness.UNKNOWN):
            reserved: list[Turn] = []
            for turn in waiting:
                if self._readiness(turn) != wanted:
                    continue
                holders = self._holders(turn)
                if not holders and not any(self._conflict(turn, earlier) for earlier in reserved):
                    turn.state = TurnState.EVICTING
                    return True
                reserved.append(turn)
                for holder in holders:
                    self._ask_to_lend(holder, turn)
        return False

    def _evict(self, client: str, turn_id: int) -> None:
        self._evicting[client] = self._next_eviction
        self._next_eviction += 1
        self._machine.push(client, "evict", Evict(self._evicting[client], turn_id))

    def _let_in(self, turn: Turn) -> None:
        for client, (seq, _, devices) in turn.asked.items():
            turn.inside.add(client)
            turn.entered[name_of(client)] += 1
            turn.linger_until_s = None
            self._evicting.pop(client, None)
            self._resident[client] = devices
            self._machine.reply(client, seq, turn.id)
        turn.asked = {}

    def _leave(self, turn: Turn, client: str) -> None:
        turn.inside.discard(client)
        turn.lending.discard(client)
        self._end_if_empty(turn)

    def _end_if_empty(self, turn: Turn) -> None:
        if turn.inside or turn.asked or turn not in self._turns:
            return
        num_missing = len(self._machine.membership.ranks(turn.group)) - len(turn.entered)
        if turn.state == TurnState.HELD and num_missing > 0 and not turn.is_resumed:
            turn.linger_until_s = self._machine.now_s + LINGER_S
        else:
            self._end(turn)

    def _end(self, turn: Turn) -> None:
        self._turns.remove(turn)
        names = [f"{turn.group}[{rank}]" for rank in self._machine.membership.ranks(turn.group)]
        most = max(turn.entered.values(), default=0)
        owed = {name: self._owed[name] + most - turn.entered[name] for name in names}
        least = min(owed.values())
        for name in names:
            self._owed[name] = min(MAX_OWED, owed[name] - least)

    def _ask_to_lend(self, holder: Turn, wanting: Turn) -> None:
        """The holder's ranks all wait on a channel that the other group works on: it cannot go on without it."""
        if holder.state != TurnState.HELD or holder.lending or holder.asked or not holder.inside:
            return
        waits = [wait for wait in self._machine.broker.waits() if wait[0] in holder.inside]
        if {client for client, *_ in waits} != holder.inside:
            return
        if not self._can_help(wanting, {channel for _, channel, *_ in waits}):
            return
        holder.lending = set(holder.inside)
        for client in sorted(holder.inside):
            self._evict(client, holder.id)

    # --- what is known ------------------------------------------------------------------------------------

    def _readiness(self, turn: Turn) -> Readiness:
        if turn.is_resumed or not turn.channels:
            return Readiness.READY
        channels = [self._channels[name] for name in turn.channels if name in self._channels]
        inputs = [channel for channel in channels if turn.group not in channel.producing_groups()]
        if not inputs or any(self._has_data(channel, turn) for channel in inputs):
            return Readiness.READY
        if any(channel.is_taken_by(turn.group) or channel.producers for channel in inputs):
            return Readiness.NO_DATA
        return Readiness.UNKNOWN

    def _has_data(self, channel: ChannelState, turn: Turn) -> bool:
        """Whether it holds an item, or an epoch's end that one of those who ask has not met."""
        if channel.num_queued or channel.is_closed:
            return True
        seen_at, asking = self._machine.membership.seen_at, map(name_of, turn.asked)
        return any(channel.epoch_of(name, seen_at(name)) < channel.epoch for name in asking)

    def _is_wanted(self, turn: Turn) -> bool:
        """Whether another group waits for devices of this turn."""
        others = [t for t in self._turns if t.state == TurnState.WAITING and t.group != turn.group]
        return any(self._conflict(other, turn) for other in others)

    def _can_help(self, turn: Turn, awaited: set[str]) -> bool:
        """Whether a group works on one of these channels, or what it makes reaches one through any number of others."""
        if any(name in turn.channels or self._channels[name].is_taken_by(turn.group) for name in awaited):
            return True
        named = {t.group: set(t.channels) for t in self._turns}
        seen: set[str] = set()
        frontier = list(awaited)
        while frontier:
            name = frontier.pop()
            if name in seen or name not in self._channels:
                continue
            seen.add(name)
            channel = self._channels[name]
            may_put = {g for g, names in named.items() if name in names and not channel.is_taken_by(g)}
            for group in channel.producing_groups() | may_put:
                if group == turn.group:
                    return True
                frontier += [other for other, c in self._channels.items() if c.is_taken_by(group)]
                frontier += named.get(group, ())
        return False

    def _holders(self, turn: Turn) -> list[Turn]:
        return [t for t in self._turns if t.state != TurnState.WAITING and self._conflict(turn, t)]

    def _conflict(self, one: Turn, other: Turn) -> bool:
        if one.group == other.group:
            return True
        return bool(one.devices & other.devices) and not self._is_at_home(one.group, other.group)

    def _is_at_home(self, one: str, other: str) -> bool:
        """Whether they may be on one device together."""
        return one == other or any(one in groups and other in groups for groups in self._fits)

    def _residents_in_the_way(self, turn: Turn) -> list[str]:
        others = [c for c, devices in self._resident.items() if devices & turn.devices]
        return sorted(c for c in others if not self._is_at_home(group_of(c), turn.group))

    def on_turns(self, client: str, seq: int, payload: None) -> Any:
        """For a stuck-run report."""
        return [self._row(turn) for turn in self._turns]

    def _row(self, turn: Turn) -> dict[str, Any]:
        return {
            "group": turn.group,
            "devices": sorted(turn.devices),
            "inside": sorted(name_of(client) for client in turn.inside),
            "waiting": {client: since_s for client, (_, since_s, _) in turn.asked.items()},
            "behind": [t.group for t in self._holders(turn)] if turn.state == TurnState.WAITING else [],
            "has_data": self._readiness(turn) is Readiness.READY,
        }
