"""The application, put together around an engine, and run: by uvicorn in the foreground with a graceful drain, or in a
thread for tests and workflows.

SIGTERM ──▶ new requests get 503, /health turns 503 ──▶ requests in flight end (at most drain_timeout_s) ──▶ exit
second signal ──▶ exit now
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from rill.errors import ConfigError, EngineError, StuckError
from rill.inference.base import Engine, Feature
from rill.inference.collector import CollectorHold
from rill.inference.server import (
    routes_admin,
    routes_chat,
    routes_completions,
    routes_dialects,
    routes_tokens,
)
from rill.inference.server.config import ServerConfig
from rill.inference.server.http import Application
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec
from rill.models.loading import ModelConfig, model_folder
from rill.models.pictures import load_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROUTES = (routes_tokens, routes_completions, routes_chat, routes_dialects, routes_admin)

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may wait for the interpreter while answers are made: the engine's, or each of those that carry
requests to a replica and its news back. Python's own 5 ms, for several of them in turn, let an engine idle."""


def create_app(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    config: ServerConfig | None = None,
    *,
    model: ModelConfig | None = None,
    chat_template: str | None = None,
) -> Application:
    """An ASGI application over the engine. The caller owns the engine and closes it after the application.

    `model` is what the engine was loaded from. With it, weights that do not fit are refused before the engine is asked,
    and stay without effect; without it, an engine that was given wrong weights is out of service until whole ones come.
    """
    pictures = None
    if model is not None and model.path:  # once: what a name of the hub means may change
        model = model.model_copy(update={"path": model_folder(model.path, holds="")})
    if model is not None and Feature.PICTURES in engine.features:
        pictures = load_pictures(model)
    codec = TextCodec(tokenizer, chat_template=chat_template, pictures=pictures)
    state = ServerState(engine, codec, config or ServerConfig(), model)
    return Application([endpoint for module in ROUTES for endpoint in module.routes], state)


class _Server(uvicorn.Server):
    def __init__(
        self, app: Application, config: ServerConfig, on_started: Callable[[], None] = lambda: None
    ) -> None:
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # who speaks to us is the peer of the socket, whatever a header says
            # Connections that stay open after the drain (idle keep-alive) must not hold the exit.
            timeout_graceful_shutdown=5,
        )
        super().__init__(settings)
        self._app, self._drain_timeout_s, self._on_started = app, config.drain_timeout_s, on_started
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is not None or self._loop is None:
            super().handle_exit(sig, frame)
            self.force_exit = True  # else connections have five seconds more
        else:
            self.drain()

    def drain(self) -> None:
        """From any thread, and from signal handlers, which run between any two bytecodes: the loop does the work."""

        def begin() -> None:
            if self._drain is None:
                self._drain = asyncio.ensure_future(self._drain_then_exit())

        assert self._loop is not None
        self._loop.call_soon_threadsafe(begin)

    async def _drain_then_exit(self) -> None:
        admission = self._app.state.admission
        log.info("draining: %d requests in flight", admission.num_in_flight)
        if not await admission.drain(self._drain_timeout_s):
            what = "drain: %d requests did not end in %.0f s and are cut off"
            log.warning(what, admission.num_in_flight, self._drain_timeout_s)
        self.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """Take the address. Done before an engine is loaded: that takes minutes, and a port in use is known at once.

    It listens at once, because only that keeps others from the port; clients that come before the engine is there wait.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = (
                f"port {config.port} of {config.host} is taken by another process: stop that one, or choose"
            )
            raise ConfigError(f"{problem} another port (0 picks a free one)") from error
        raise ConfigError(
            f"{config.host}:{config.port} cannot be listened on: {error}: choose an address of this machine and a port "
            "you may use (0 picks a free one)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Application,
    config: ServerConfig,
    listener: socket.socket | None = None,
    *,
    on_started: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal; returns after the drain. `on_started` hears the address once requests are answered."""
    listener = listener or bind(config)
    hold, usual_s = CollectorHold(), sys.getswitchinterval()
    hold.take()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        _Server(app, config, lambda: on_started(url_of(listener)) if on_started else None).run([listener])
    finally:
        sys.setswitchinterval(usual_s)
        hold.give_back()


class BackgroundServer:
    """Serves from a daemon thread. Use as a context manager; `.url` is the base address."""

    def __init__(self, app: Application, config: ServerConfig, timeout_s: float = 30.0) -> None:
        listener = bind(config)
        self.url = url_of(listener)
        self._timeout_s = timeout_s
        self._server = _Server(app, config)
        self.drain = self._server.drain
        """What SIGTERM does: refuse new requests, end those in flight, stop. Returns at once."""
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="rill-server", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if not self._thread.is_alive():
                raise EngineError("the server ended while starting; its log has the cause")
            if time.monotonic() > deadline:
                raise StuckError(f"the server did not start within {timeout_s} s")
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(self._timeout_s)

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
