"""What goes over the line between a process and the hub, before anybody asks what it means.

process ──▶ Requests (numbered, journaled) · Query · Ping
process ◀── Output (numbered replies and pushes) · Gap (send again from here) · Answer · Expelled
"""

from __future__ import annotations

from typing import Any

import msgspec

from rill.runtime.hub.service import OutKind

Request = tuple[str, msgspec.Raw]
"""Method and payload."""


class Requests(msgspec.Struct, tag="s", array_like=True, gc=False):
    """Consecutive requests; applied once each, in order."""

    first_seq: int
    received_out: int
    """The last numbered output that the process has."""
    requests: list[Request]


class Query(msgspec.Struct, tag="q", array_like=True, gc=False):
    """A read-only question: not journaled, not ordered, safe to ask twice."""

    id: int
    method: str
    payload: Any


class Ping(msgspec.Struct, tag="p", array_like=True, gc=False):
    """Still here, and how far both directions are."""

    received_out: int
    next_seq: int


class Output(msgspec.Struct, tag="o", array_like=True, gc=False):
    """Replies and pushes, and the number of the next request that the hub expects: all before it are journaled."""

    expected: int
    entries: list[tuple[int, OutKind, int | str, msgspec.Raw]]
    """(number, kind, seq of the request or topic of the push, body)."""


class Gap(msgspec.Struct, tag="g", array_like=True, gc=False):
    """The hub lacks what came before: send again from this number."""

    expected: int


class Answer(msgspec.Struct, tag="a", array_like=True, gc=False):
    """To a query."""

    id: int
    is_ok: bool
    body: msgspec.Raw


class Expelled(msgspec.Struct, tag="x", array_like=True, gc=False):
    """The hub takes this process for dead."""


ToHub = Requests | Query | Ping
FromHub = Output | Gap | Answer | Expelled
