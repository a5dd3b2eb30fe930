"""Between machines: the publisher serves its version folders over TCP, engines fetch them, whole or by differences.

Served on the one address under which the engines reach the trainer's machine. A manifest brings the publisher's key:
only who has one is answered, and every byte that comes, manifests of earlier versions included, is signed with it (see
rill.runtime.transfer.tcp). Nothing is encrypted. A connection that breaks costs a chunk, not the version.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field
from torch import Tensor

from rill.errors import ConfigError, RillError, WeightSyncError
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer.tcp import ByteClient, ByteServer
from rill.types import PolicyVersion
from rill.weights.base import LOOPBACK
from rill.weights.disk import DiskPublisher, DiskReceiver, FileConfig
from rill.weights.manifest import BucketSpec, WeightManifest

FILE = re.compile(r"v\d{10}/(manifest\.json|bucket-\d{5}\.(safetensors|delta))")


class TcpPublisher(DiskPublisher):
    transport = "tcp"

    def __init__(self, config: TcpTransport.Config) -> None:
        super().__init__(config)
        self._key, host = secrets.token_bytes(32), config.host or LOOPBACK
        try:
            self._server = ByteServer(host, _signer(self._key), self._read, port=config.port, is_fixed=True)
        except OSError as error:
            super().close()
            raise ConfigError(
                f"weights cannot be served on {host}:{config.port} ({error}): set sync.transport.port to a free one, "
                "or to 0 for any, and sync.transport.host to an address of the trainer's machine"
            ) from error

    def location(self, version: PolicyVersion) -> str:
        return self._server.endpoint

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        return replace(super().finish(manifest), key=self._key)  # not in the folder: its readers need none

    def close(self) -> None:
        self._server.close()
        super().close()

    def _read(self, name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
        path = self.folder / name
        if not FILE.fullmatch(name) or not path.is_file():
            raise WeightSyncError(f"{name} is not there, or not any more")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes), path.stat().st_size


class TcpReceiver(DiskReceiver):
    transport = "tcp"

    def __init__(self, config: TcpTransport.Config) -> None:
        super().__init__(config)
        self._timeout_s = config.timeout_s
        self._client: ByteClient | None = None
        self._server: tuple[str, bytes] = ("", b"")

    def buckets(self, manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        server = (manifest.location, manifest.key)
        if self._client is None or server != self._server:
            self.close()
            self._server, endpoint = server, manifest.location
            what = f"the publisher at {endpoint}"
            signer = _signer(manifest.key)
            self._client = ByteClient(signer, lambda _: endpoint, what, timeout_s=self._timeout_s)
        return super().buckets(manifest)

    def fetch(self, location: str, name: str) -> bytes | bytearray:
        assert self._client is not None, "a manifest comes first: it brings the publisher's key"
        try:
            return self._client.fetch(name)
        except RillError as error:
            raise WeightSyncError(f"{name} could not be fetched: {error}") from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _signer(key: bytes) -> SessionKey:
    return SessionKey(b"", key)


class TcpTransport:
    class Config(FileConfig):
        type: Literal["tcp"] = "tcp"
        host: str = ""
        """The trainer's address, to serve on and to be reached at. Unset: 127.0.0.1; in a workflow that of its node."""
        port: int = Field(default=0, ge=0)
        """0: any free one."""
        timeout_s: float = Field(default=120.0, gt=0)
        """An engine that has heard nothing of the publisher for so long gives the pull up."""

        def reached_at(self, host: str) -> Self:
            return self if self.host else self.model_copy(update={"host": host})

    publisher = TcpPublisher
    receiver = TcpReceiver
