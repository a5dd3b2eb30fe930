"""What a sandbox is: a session in which programs run that nobody has read, written by a model and possibly hostile.

Called by environments (tools that run commands) and by the code reward. Every backend promises: no network unless it
is given, nothing of this machine to be read but its libraries, nothing to be changed, and the limits below. Where it
cannot, it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import RillError, UnsupportedError
from rill.registry import Registry

if TYPE_CHECKING:
    from rill.envs.sandbox.session import Sandbox

SANDBOXES = Registry(
    "sandbox",
    {
        "bubblewrap": "rill.envs.sandbox.bubblewrap:Bubblewrap",
        "container": "rill.envs.sandbox.container:Container",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one session may use."""

    exec_s: float = 10.0
    """One command or program; it is killed then. Each call may set its own."""
    memory_bytes: int = 2**30
    """Address space of each process."""
    disk_bytes: int = 64 * 2**20
    """Of its files together; they live in memory."""
    file_bytes: int = 16 * 2**20
    """Of any one file."""
    num_files: int = 64
    """Open at the same time, in one process."""
    num_processes: int = 16
    """And threads, at the same time."""
    output_bytes: int = 2**20
    """Of one command; more ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a command."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    ended: str
    """"ok", "error" (a non-zero exit), "timeout", "output"."""

    @property
    def text(self) -> str:
        """Both outputs, as a terminal would show them."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class SandboxError(RillError):
    """A session that ended, or does what no session should: what runs in it is to blame, and not the run."""


async def open_sandbox(
    kind: str = "bubblewrap", limits: Limits | None = None, *, packages: bool = False, **options: Any
) -> Sandbox:
    """A new session. `packages`: Python programs may import what is installed here (in a container: in its image), not
    the standard library alone. `options`: of the backend, container.Options.

    Raises UnsupportedError where this machine cannot isolate it.
    """
    session: Sandbox = await SANDBOXES.load(kind).open(limits or Limits(), packages=packages, **options)
    return session


def missing(kind: str = "bubblewrap", **options: Any) -> str | None:
    """What keeps such sandboxes from working here, and how to mend it; None: nothing."""
    try:
        SANDBOXES.load(kind).check(**options)
    except UnsupportedError as error:
        return str(error)
    return None
