"""What a service of the hub is: handlers of journaled requests, and no clock of its own.

Broker, locks, history and membership are services. A handler gets (client, seq, payload), the payload decoded to the
type it declares, and returns the reply's body, or DEFERRED when the reply comes later through
`machine.reply(client, seq, body)` or never. A client is an identity such as "rollout[3]#0": group, rank and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


class Handler(NamedTuple):
    """Who takes a request, and what its payload is."""

    payload: Any
    """A type that msgspec decodes to."""
    handle: Callable[[str, int, Any], Any]


class Service(Protocol):
    """Its handlers, by name."""

    def handlers(self) -> Mapping[str, Handler]: ...


DEFERRED = object()


def question(answer: Callable[[Any], Any]) -> Handler:
    """A request that changes nothing."""
    return Handler(Any, lambda client, seq, payload: answer(payload))


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
