"""Where the processes of a run are: what each is told about its surroundings, and how others reach it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rill.runtime.process.session_key import SessionKey

DRIVER_GROUP = "driver"
STORE_GROUP = "store-"
"""Followed by a node's id: the name of its store server in the hub and at its agent."""


class WorkerAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a process of the run can be reached. A relaunched rank has a new one."""

    group: str
    rank: int
    node_id: str
    pid: int = 0
    endpoint: str = ""
    tcp_endpoint: str = ""
    """The mailbox that processes of other nodes send to. Empty where the run has one node."""
    incarnation: int = 0
    """Counts the launches of this rank, from 0."""
    gpus: tuple[int, ...] = ()
    """The GPUs that this process sees, by their numbers on the node; its cuda:0 is the first."""

    @property
    def name(self) -> str:
        return f"{self.group}[{self.rank}]"

    @property
    def identity(self) -> str:
        """Unique in the session and never used again."""
        return f"{self.group}[{self.rank}]#{self.incarnation}"

    def endpoint_from(self, node_id: str) -> str:
        return self.endpoint if node_id == self.node_id else self.tcp_endpoint


def name_of(identity: str) -> str:
    """The rank behind "rollout[3]#0", its first launch, is "rollout[3]"."""
    return identity.partition("#")[0]


def group_of(identity: str) -> str:
    """The group of "rollout[3]#0" is "rollout"."""
    return identity.partition("[")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every process of a session is told about where it runs."""

    session_dir: Path
    """Sockets, logs and the session's lock file, under the system's temporary directory."""
    shm_dir: Path
    """Shared-memory files of this session on this node; whoever survives removes it with everything in it."""
    node_id: str
    hub_endpoint: str
    host: str = "127.0.0.1"
    """The address of this node that other nodes can reach."""
    key: SessionKey | None = None
    """What lets this process in at other nodes. None where the run stays on one node."""
    report_dir: Path | None = None
    """Where a stuck-run report is written: a folder that outlives the session. None: the user's under the system's
    temporary directory."""
