"""The secret of a session that spans several nodes, and the doors it locks. On one node sockets are files in a folder
that only its user can enter.

    calls, sends, hub           CURVE: encrypted, both ends prove that they have the key
    requests to a store server  a MAC over each request, and over that part of the answer that will be unpickled
    payloads of a store         in the clear: encryption costs a large part of the bandwidth

The key reaches other processes inside their start requests; never in a file, on a command line, in the environment or
in a log. Nothing is unpickled that was not made by a holder of it. CURVE's server key,
public elsewhere, is known only to holders here: knowing it is the proof that a client gives.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

import zmq


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One CURVE key pair, the same in every process of the session. Does not show itself when printed."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> SessionKey:
        return cls(*zmq.curve_keypair())

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Let only holders of the key in at the endpoints that `socket` binds from now on."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_server = True

    def present(self, socket: zmq.Socket[Any]) -> None:
        """Show the key at the endpoints that `socket` connects to from now on, and ask it of them."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_serverkey = self.public

    def mac(self, *parts: bytes | memoryview) -> bytes:
        """A code over `parts` that only a holder of the key can make."""
        maker = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in parts:
            maker.update(len(part).to_bytes(8, "little"))
            maker.update(part)
        return maker.digest()

    def is_mac(self, code: bytes, *parts: bytes | memoryview) -> bool:
        return hmac.compare_digest(code, self.mac(*parts))
