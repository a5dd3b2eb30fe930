"""Kinds of devices beyond cpu slots and NVIDIA GPUs: what a cluster must know to give them out like those.

A kind needs no registration to be placed: a list of Device with any `kind` will do. It is registered where processes
must be shown their own devices by a variable of the environment, where torch has a name for it, or where nodes can say
themselves how many they have.

    register_kind(DeviceKind(name="npu", visible_env="ASCEND_RT_VISIBLE_DEVICES", torch_name="npu", count=count_npus))
    Cluster(devices="npu:auto")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rill.errors import PlanError

BUILT_IN = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind, registered by a user."""

    name: str
    visible_env: str = ""
    """The variable that tells a process the numbers of its own devices of this kind; it then counts them from 0."""
    torch_name: str = ""
    """What torch calls it: `self.device` is "npu:0" for "npu". Empty: torch does not know it."""
    count: Callable[[], int] | None = None
    """How many a node has: a function of a module, called on each node. None: `devices` says it."""


_kinds: dict[str, DeviceKind] = {}


def register_kind(kind: DeviceKind) -> None:
    """Make a kind known to clusters that this process opens from now on. Again: the newer counts."""
    if kind.name in BUILT_IN or not kind.name.isidentifier():
        raise PlanError(
            f"a device kind cannot be called {kind.name!r}: choose a plain name other than cpu and cuda"
        )
    _kinds[kind.name] = kind


def registered_kinds() -> tuple[DeviceKind, ...]:
    return tuple(_kinds.values())


def register_kinds(kinds: Iterable[DeviceKind]) -> None:
    """On another node: what the driver has registered."""
    for kind in kinds:
        register_kind(kind)


def find_kind(name: str) -> DeviceKind | None:
    return _kinds.get(name)
