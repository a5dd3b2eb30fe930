"""What processes are placed on: nodes, and devices with ids that count through the whole cluster.

A device is a cpu slot, a GPU, or anything of a kind of the user's own (a robot arm; an NPU: accelerator.py).
`Cluster` numbers devices; workers read their own from `self.devices`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rill.errors import PlanError
from rill.runtime.device.accelerator import ACCELERATORS, CPU, CUDA, accelerator

LOCAL_NODE = "node0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One thing that a process can hold. `id` and `node_id` are given by the cluster."""

    kind: str
    index: int = 0
    """Counts the devices of this kind on its node, from 0. For cuda: the GPU's own number."""
    id: int = -1
    node_id: str = LOCAL_NODE
    labels: frozenset[str] = frozenset()
    """Names that a placement can select by, e.g. "h200" or "lab-a"."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What a worker needs to reach the device, e.g. {"address": "192.168.0.4"}."""

    def __str__(self) -> str:
        return f"{self.id} ({self.kind}:{self.index} on {self.node_id})"


NodeDevices: TypeAlias = str | int | Sequence[Device]
"""The devices of one node, as `local_devices` reads them."""
DeviceSpec: TypeAlias = NodeDevices | Mapping[str, NodeDevices]
"""The same for every node, or by the nodes' labels: {"gpus": "cuda:8", "lab": [Device(kind="arm")], "*": "cpu:4"}."""


def num_own_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    host: str = "127.0.0.1"
    """An address that the other nodes can reach."""
    labels: frozenset[str] = frozenset()
    num_cores: int = field(default_factory=num_own_cores)
    """The cores that processes there may run on; unless given, those of the machine that made this object."""


def devices_of_nodes(wanted: DeviceSpec, nodes: Sequence[Node]) -> dict[str, NodeDevices]:
    """What `wanted` says of each node, by its id. A mapping's keys are labels or ids of nodes, or "*" for the rest."""
    if not isinstance(wanted, Mapping):
        return {node.node_id: wanted for node in nodes}
    known = {"*"} | {name for node in nodes for name in (*node.labels, node.node_id)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise PlanError(
            f"devices: no node has the label or id {unknown[0]!r}; there are {', '.join(sorted(known - {'*'}))}"
        )
    chosen: dict[str, NodeDevices] = {}
    for node in nodes:
        names = [name for name in wanted if name in node.labels or name == node.node_id]
        if len(names) > 1:
            raise PlanError(f"devices: {node.node_id} is meant by {' and '.join(map(repr, names))}: give one")
        chosen[node.node_id] = wanted[names[0]] if names else wanted.get("*", ())
    return chosen


def local_devices(wanted: NodeDevices) -> list[Device]:
    """The devices of this machine that `wanted` names, without ids.

    "auto": every GPU and everything of a registered kind that can be counted, or one cpu slot per core where there is
    nothing of the kind. A number: that many GPUs, or that many cpu slots where there is none. "cpu:4", "cuda:2",
    "npu:auto" or "cuda:2,cpu:4": that many of each kind. A list of Device: as given.
    """
    if isinstance(wanted, str) and wanted != "auto":
        return [device for part in wanted.split(",") for device in _devices_of_kind(part.strip())]
    if isinstance(wanted, str):
        counted = [name for name in ACCELERATORS if name != CPU and accelerator(name).devices() is not None]
        found = [device for name in counted for device in _devices_of_kind(f"{name}:auto")]
        return found or _devices_of_kind(f"{CPU}:auto")
    if isinstance(wanted, int):
        return _devices_of_kind(f"{CUDA if accelerator(CUDA).devices() else CPU}:{wanted}")
    return list(wanted)


def _devices_of_kind(part: str) -> list[Device]:
    kind, _, count = part.partition(":")
    if not kind or not (count.isdigit() or count == "auto"):
        raise PlanError(f"devices={part!r} is not 'auto', a number or 'kind:number', e.g. 'cpu:4'")
    there = accelerator(kind).devices()
    if count == "auto":
        if there is None:
            raise PlanError(
                f"devices='{part}': nothing is known that counts {kind!r}: say how many, or register an accelerator "
                "that finds them (rill.runtime.device.accelerator)"
            )
        chosen: Sequence[int] = there
    elif there is None or kind == CPU:  # slots are what one makes of them
        chosen = range(int(count))
    elif int(count) > len(there):
        raise PlanError(
            f"{count} devices of kind {kind!r} asked for, this machine shows {len(there)}: "
            f"use devices='{kind}:{len(there)}', or 'cpu:{count}' for cpu slots"
        )
    else:
        chosen = there[: int(count)]
    return [Device(kind=kind, index=index) for index in chosen]


def number(devices: Sequence[Device], first: int = 0) -> tuple[Device, ...]:
    return tuple(replace(device, id=first + n) for n, device in enumerate(devices))


def visible_devices_env(devices: Sequence[Device]) -> dict[str, str]:
    """The environment that shows a process these devices, of every kind that has a variable for it, and no others."""
    env = {}
    for name in ACCELERATORS:
        if variable := accelerator(name).visible_env:
            env[variable] = ",".join(dict.fromkeys(str(d.index) for d in devices if d.kind == name))
    return env


def gpus_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """The numbers of the GPUs among them, each once, in order: a process sees them as cuda:0, cuda:1 …"""
    return tuple(dict.fromkeys(device.index for device in devices if device.kind == CUDA))


def torch_device(devices: Sequence[Device]) -> str:
    """The torch name of a rank's first device, as its process sees it; "cpu" if torch knows none."""
    for device in devices:
        kind = accelerator(device.kind)
        if kind.torch_name and device.kind != CPU:
            return f"{kind.torch_name}:{0 if kind.visible_env else device.index}"
    return CPU
