"""Over HTTP: the publisher serves its version folders, engines fetch them. Whole or differences, as on disk.

The address holds a random part, so that only who has a manifest can read the weights. Reads are retried a few
times: a connection that breaks costs one bucket, not the version.
"""

from __future__ import annotations

import re
import secrets
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self

import httpx
from pydantic import Field

from rill.errors import ConfigError, WeightSyncError
from rill.types import PolicyVersion
from rill.weights.base import LOOPBACK
from rill.weights.disk import DiskPublisher, DiskReceiver, FileConfig

FILE = re.compile(r"v\d{10}/(manifest\.json|bucket-\d{5}\.(safetensors|delta))")
CLOSES_WITHIN_S = 0.05
"""How often the server looks whether it is to end."""


class HttpTransport:
    class Config(FileConfig):
        type: Literal["http"] = "http"
        host: str = ""
        """Interface to serve on. Unset: 127.0.0.1; in a workflow all of them, and `advertised` is the address of the
        trainer's machine."""
        port: int = Field(default=0, ge=0)
        """0: any free one."""
        advertised: str = ""
        """Host name or address that engines use. Unset: `host`."""
        timeout_s: float = Field(default=120.0, gt=0)
        """Deadline of one bucket, each try."""
        retries: int = Field(default=3, ge=0)
        """Further tries after a broken connection or a server error."""

        def reached_at(self, host: str) -> Self:
            if self.host or host == LOOPBACK:
                return self
            return self.model_copy(update={"host": "0.0.0.0", "advertised": self.advertised or host})

    @staticmethod
    def publisher(config: Config) -> HttpPublisher:
        return HttpPublisher(config)

    @staticmethod
    def receiver(config: Config) -> HttpReceiver:
        return HttpReceiver(config)


class HttpPublisher(DiskPublisher):
    transport = "http"

    def __init__(self, config: HttpTransport.Config) -> None:
        super().__init__(config)
        secret, folder = secrets.token_urlsafe(16), self.folder

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = (
                True  # head and body are two writes: the second must not wait 40 ms for an answer
            )

            def do_GET(self) -> None:
                _, _, rest = self.path.partition("/")
                given, _, name = rest.partition("/")
                path = folder / name
                if (
                    not secrets.compare_digest(given, secret)
                    or not FILE.fullmatch(name)
                    or not path.is_file()
                ):
                    self.send_error(404)
                    return
                with path.open("rb") as file:
                    self.send_response(200)
                    self.send_header("Content-Length", str(path.stat().st_size))
                    self.end_headers()
                    shutil.copyfileobj(file, self.wfile, 1 << 20)

            def log_message(self, *arguments: object) -> None:
                """Quiet: the receiver reports what fails."""

        try:
            self._server = ThreadingHTTPServer((config.host or LOOPBACK, config.port), Handler)
        except OSError as error:
            super().close()
            raise ConfigError(
                f"weights cannot be served on {config.host or LOOPBACK}:{config.port} ({error}): set "
                "sync.transport.port to a free one, or to 0 for any"
            ) from error
        self._server.daemon_threads = True
        host = config.advertised or config.host or LOOPBACK
        self._address = f"http://{host}:{self._server.server_address[1]}/{secret}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSES_WITHIN_S,), daemon=True, name="rill-weights-http"
        )
        self._thread.start()

    def location(self, version: PolicyVersion) -> str:
        return self._address

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
        super().close()


class HttpReceiver(DiskReceiver):
    transport = "http"

    def __init__(self, config: HttpTransport.Config) -> None:
        super().__init__(config)
        self._retries = config.retries
        self._client = httpx.Client(timeout=config.timeout_s, trust_env=False)

    def fetch(self, location: str, name: str) -> bytes:
        failure = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 5.0))
            try:
                response = self._client.get(f"{location}/{name}")
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response.content
            failure = f"status {response.status_code}"
            if response.status_code < 500:
                break
        raise WeightSyncError(f"{name} could not be fetched from the publisher: {failure}")

    def close(self) -> None:
        self._client.close()
