"""Which process holds which devices: a placement's text becomes one entry per process.

    "all"            one process on every device
    "0-3"            one process on each of the devices 0 to 3
    "0,2"            one process on device 0 and one on device 2
    "0-3:0-7"        devices 0 to 3 shared by processes 0 to 7, two to a device
    "0-3:0-1"        devices 0 to 3 split over processes 0 and 1, two devices each
    "arm:0-1"        the first two devices of kind (or label) "arm"
    "arm:all:0-3"    all of them, shared by four processes
    [[0, 1], 2, 3]   process 0 holds devices 0 and 1; process 1 holds 2, process 2 holds 3

Pure functions over a list of devices; `Cluster` and the planner call them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rill.errors import PlanError
from rill.runtime.device.device import Device

Placement: TypeAlias = "str | int | Sequence[int | Sequence[int]]"
"""A text as above, one device id, or a list with one entry per process: a device id or a list of them."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The devices of one process; all on one node."""

    rank: int
    devices: tuple[Device, ...]

    @property
    def node_id(self) -> str:
        return self.devices[0].node_id


_TEXT = re.compile(
    r"(?:(?!all:)(?P<name>[A-Za-z_][\w.\-]*):)?(?P<devices>all|[\d\-,]+)(?::(?P<ranks>[\d\-,]+))?"
)


def resolve(placement: Placement, devices: Sequence[Device]) -> tuple[Seat, ...]:
    """One seat per process, in the order of ranks. PlanError says what is wrong and which devices exist."""
    if isinstance(placement, int):
        placement = [placement]
    if isinstance(placement, str):
        device_lists = _parse(placement, devices)
    else:
        device_lists = [
            _pick([entry] if isinstance(entry, int) else list(entry), devices, str(placement))
            for entry in placement
        ]
    if not device_lists:
        raise PlanError(f"placement {placement!r} names no device: {_existing(devices)}")
    seats = tuple(Seat(rank, tuple(held)) for rank, held in enumerate(device_lists))
    for seat in seats:
        nodes = sorted({device.node_id for device in seat.devices})
        if len(nodes) != 1:
            where = f"on {' and '.join(nodes)}: not one node" if nodes else "on no device"
            raise PlanError(f"placement {placement!r}: process {seat.rank} is {where}")
    return seats


def seats_on_free_devices(
    group: str, count: int, like: Seat, devices: Sequence[Device], held: Collection[int]
) -> list[Seat]:
    """`count` seats for a group, each with as many devices, of the same kind, as `like`, that nobody holds."""
    each, kind = len(like.devices), like.devices[0].kind
    free: dict[str, list[Device]] = {}
    for device in devices:
        if device.kind == kind and device.id not in held:
            free.setdefault(device.node_id, []).append(device)
    chosen = [of[n : n + each] for of in free.values() for n in range(0, len(of) - each + 1, each)]
    if count < 1 or len(chosen) < count:
        raise PlanError(
            f"{count} more ranks of {group} need {count * each} free devices of kind {kind!r}, and at least one rank; "
            f"there is room for {len(chosen)}: give a placement, which may share devices, or add a node"
        )
    return [Seat(n, tuple(chosen[n])) for n in range(count)]


def _parse(text: str, devices: Sequence[Device]) -> list[list[Device]]:
    match = _TEXT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise PlanError(
            f"placement {text!r} cannot be read: write '0-3', 'all', '0-3:0-7' or 'arm:0', or list the devices of each "
            "process"
        )
    chosen = _devices_of(match, devices, text)
    if match["ranks"] is None:
        return [[device] for device in chosen]
    ranks = _numbers(match["ranks"], text)
    if ranks != list(range(len(ranks))):
        raise PlanError(f"placement {text!r} places processes {ranks}: they count from 0 without gaps")
    return _share_out(chosen, len(ranks), text)


def _devices_of(match: re.Match[str], devices: Sequence[Device], text: str) -> list[Device]:
    name, wanted = match["name"], match["devices"]
    if name is None:
        return list(devices) if wanted == "all" else _pick(_numbers(wanted, text), devices, text)
    named = [device for device in devices if device.kind == name or name in device.labels]
    if not named:
        raise PlanError(f"placement {text!r}: no device has the kind or label {name!r}; {_existing(devices)}")
    if wanted == "all":
        return named
    picks = _numbers(wanted, text)
    if max(picks) >= len(named):
        raise PlanError(f"placement {text!r}: there are {len(named)} devices {name!r}, counted from 0")
    return [named[pick] for pick in picks]


def _numbers(listed: str, text: str) -> list[int]:
    numbers: list[int] = []
    for part in listed.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise PlanError(f"placement {text!r}: {part!r} is neither a number nor a range such as '0-3'")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise PlanError(f"placement {text!r}: the range {part!r} runs backwards")
        numbers.extend(range(low, high + 1))
    return numbers


def _share_out(chosen: list[Device], count: int, text: str) -> list[list[Device]]:
    if count >= len(chosen):
        if count % len(chosen):
            raise PlanError(
                f"placement {text!r}: {count} processes cannot share {len(chosen)} devices evenly"
            )
        to_a_device = count // len(chosen)
        return [[chosen[n // to_a_device]] for n in range(count)]
    if len(chosen) % count:
        raise PlanError(f"placement {text!r}: {len(chosen)} devices do not divide over {count} processes")
    each = len(chosen) // count
    return [chosen[n * each : (n + 1) * each] for n in range(count)]


def _pick(ids: Sequence[int], devices: Sequence[Device], text: str) -> list[Device]:
    by_id = {device.id: device for device in devices}
    unknown = [number for number in ids if number not in by_id]
    if unknown:
        raise PlanError(f"placement {text!r}: there is no device {unknown[0]}; {_existing(devices)}")
    return [by_id[number] for number in ids]


def _existing(devices: Sequence[Device]) -> str:
    return "the cluster's devices: " + (", ".join(str(device) for device in devices) or "none")
