"""What a service of the hub is: a class whose methods `on_x(client, seq, payload)` handle the requests "service.x".

Broker, locks, history and membership are services. A request is journaled before it counts, and its payload is decoded
to the type that the handler declares. What the handler returns is the reply; None: it comes later, through
`machine.reply(client, seq, body)`, or never. A client is an identity such as "rollout[3]#0": group, rank and launch.
A service has no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import msgspec

Handler = tuple[msgspec.msgpack.Decoder[Any], Callable[[str, int, Any], Any]]


def handlers_of(prefix: str, service: object) -> Iterator[tuple[str, Handler]]:
    """By the names of the requests."""
    for name in dir(service):
        if name.startswith("on_"):
            method = getattr(service, name)
            *_, payload, _ = get_type_hints(method).values()  # self has none; the last is what it returns
            yield f"{prefix}.{name[3:]}", (msgspec.msgpack.Decoder(payload), method)


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
