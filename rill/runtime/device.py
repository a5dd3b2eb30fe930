"""What processes are placed on: nodes, and devices with ids that count through the whole cluster.

A device is a cpu slot, a GPU, or anything a user registers under a kind of its own (a robot arm, an NPU).
`Cluster` numbers devices; workers read their own from `self.devices`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from rill.errors import PlanError

CPU, CUDA = "cpu", "cuda"
LOCAL_NODE = "node0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One thing that a process can hold. `id` and `node_id` are given by the cluster."""

    kind: str
    index: int = 0
    """Counts the devices of this kind on its node, from 0. For cuda: the GPU's own number."""
    id: int = -1
    """The global id, unique in the cluster."""
    node_id: str = LOCAL_NODE
    labels: frozenset[str] = frozenset()
    """Names that a placement can select by, e.g. "h200" or "lab-a"."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What a worker needs to reach the device, e.g. {"address": "192.168.0.4"}."""

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.kind, self.index, self.id, self.node_id, self.labels, dict(self.options))
        return (_rebuild_device, values)

    def __str__(self) -> str:
        return f"{self.id} ({self.kind}:{self.index} on {self.node_id})"


def _rebuild_device(
    kind: str, index: int, global_id: int, node_id: str, labels: frozenset[str], options: Mapping[str, str]
) -> Device:
    return Device(kind=kind, index=index, id=global_id, node_id=node_id, labels=labels, options=options)


def num_own_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    node_id: str
    host: str = "127.0.0.1"
    """An address that the other nodes can reach."""
    labels: frozenset[str] = frozenset()
    num_cores: int = field(default_factory=num_own_cores)
    """The cores that processes there may run on; unless given, those of the machine that made this object."""


def local_devices(
    wanted: str | int | Sequence[Device], *, labels: frozenset[str] = frozenset()
) -> list[Device]:
    """The devices of this machine that `wanted` names, without ids.

    "auto": every GPU, or one cpu slot per core where there is none. A number: that many GPUs, or that many
    cpu slots where there is none. "cpu:4", "cuda:2" or "cuda:2,cpu:4": that many of each kind. A list of
    Device: as given.
    """
    if isinstance(wanted, str) and wanted != "auto":
        return [device for part in wanted.split(",") for device in _devices_of_kind(part.strip(), labels)]
    if isinstance(wanted, (str, int)):
        gpus = visible_gpus()
        kind = CUDA if gpus else CPU
        num_devices = wanted if isinstance(wanted, int) else len(gpus) or os.cpu_count() or 1
        return _devices_of_kind(f"{kind}:{num_devices}", labels)
    return [replace(device, labels=device.labels | labels) for device in wanted]


def _devices_of_kind(part: str, labels: frozenset[str]) -> list[Device]:
    kind, _, count = part.partition(":")
    if not kind or not count.isdigit():
        raise PlanError(f"devices={part!r} is not 'auto', a number or 'kind:number', e.g. 'cpu:4'")
    num_devices = int(count)
    if kind == CUDA:
        gpus = visible_gpus()
        if num_devices > len(gpus):
            raise PlanError(
                f"{num_devices} GPUs asked for, this machine shows {len(gpus)}: "
                f"use devices='cuda:{len(gpus)}', or 'cpu:{num_devices}' for cpu slots"
            )
        return [Device(kind=CUDA, index=gpu, labels=labels) for gpu in gpus[:num_devices]]
    return [Device(kind=kind, index=index, labels=labels) for index in range(num_devices)]


def visible_gpus() -> list[int]:
    """The NVIDIA GPUs that this process may use, found without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and all(part.strip().isdigit() for part in visible.split(",")):
        return [int(part) for part in visible.split(",")]
    if visible == "":
        return []
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return list(range(sum(1 for _ in folder.iterdir())))
    return list(range(sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))))


def number(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Give global ids in order."""
    return tuple(replace(device, id=n) for n, device in enumerate(devices))


def visible_devices_env(gpus: Sequence[int]) -> Mapping[str, str]:
    """The environment that shows a process these GPUs and no others, as cuda:0, cuda:1 …"""
    return MappingProxyType({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))})


def gpus_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """The numbers of the GPUs among them, each once, in order: a process sees them as cuda:0, cuda:1 …"""
    return tuple(dict.fromkeys(device.index for device in devices if device.kind == CUDA))


def torch_device(devices: Sequence[Device], seen: Sequence[int]) -> str:
    """The torch name of a rank's first GPU in a process that sees the GPUs `seen`, else "cpu"."""
    gpus = gpus_of(devices)
    return f"cuda:{seen.index(gpus[0])}" if gpus else "cpu"
