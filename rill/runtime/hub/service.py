"""What a service of the hub is: handlers of journaled requests, answers to questions, and no clock of its own.

Broker, locks, history and membership are services. A handler gets (client, seq, payload), the payload decoded to the
type it declares, and returns the reply's body, or DEFERRED when the reply comes later through
`machine.reply(client, seq, body)` or never. A client is an identity such as "rollout[3]#0": group, rank and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol


class OutKind(IntEnum):
    """What the hub sends to a client with a number."""

    REPLY = 0
    FAILURE = 1
    PUSH = 2


class Handler(NamedTuple):
    """Who takes a request, and what its payload is."""

    payload: Any
    """A type that msgspec decodes to."""
    handle: Callable[[str, int, Any], Any]


class Service(Protocol):
    """Its handlers and its questions, by name."""

    def handlers(self) -> Mapping[str, Handler]: ...

    def queries(self) -> Mapping[str, Callable[[Any], Any]]: ...


class Deferred:
    """The type of DEFERRED."""


DEFERRED = Deferred()


class ServiceError(Exception):
    """A refusal that goes back to the client as the RillError named `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def name_of(client: str) -> str:
    """ "rollout[3]#0" is the first launch of "rollout[3]"."""
    return client.partition("#")[0]


def group_of(client: str) -> str:
    """The group of "rollout[3]#0" is "rollout"."""
    return client.partition("#")[0].partition("[")[0]
