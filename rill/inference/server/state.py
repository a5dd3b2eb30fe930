"""What every route needs, in one record on the application: who is let in, and how administration acts on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rill.data.tool_calls import SYNTAXES, detect_syntax
from rill.inference.base import AdapterEngine, Engine, Feature
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.errors import ApiError, bad_request
from rill.inference.server.generation import Generation
from rill.inference.server.metrics import Metrics
from rill.inference.server.reasoning import CLOSE
from rill.inference.server.text import TextCodec
from rill.inference.server.weights import WeightInbox

if TYPE_CHECKING:
    from rill.models.loading import ModelConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


class Admission:
    """Lets generation requests in, counts them, and closes the door when the server drains. On the event loop, without
    locks."""

    def __init__(self, max_concurrent: int) -> None:
        self.num_in_flight = 0
        self.is_draining = False
        self._max_concurrent = max_concurrent
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        """Takes a place for one generation request."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self._max_concurrent and self.num_in_flight >= self._max_concurrent:
            message = f"{self.num_in_flight} requests are in flight, the limit: try again soon"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        self.num_in_flight += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight. False when the deadline passed first."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class ServerState:
    def __init__(
        self, engine: Engine, codec: TextCodec, config: ServerConfig, model: ModelConfig | None
    ) -> None:
        self.engine, self.codec, self.config, self.model = engine, codec, config, model
        self.tool_syntax = SYNTAXES.get(config.tool_syntax) or detect_syntax(codec.chat_template)
        """How this model writes tool calls."""
        is_taught = config.reasoning == "auto" and CLOSE in codec.chat_template
        self.has_reasoning = config.reasoning == "think" or is_taught
        """Its answers may begin with a block of reasoning."""
        self.keys = KeyRing(config)
        self.admission = Admission(config.max_concurrent)
        self.metrics = Metrics()
        self.generation = Generation(
            engine, self.admission, self.metrics, config.request_timeout_s, config.stream_interval_s
        )
        self.inbox = WeightInbox(engine, model)
        self.started_at = int(time.time())
        self.is_paused = self.is_asleep = False
        self._acting = asyncio.Lock()

    @property
    def served_names(self) -> list[str]:
        """What clients may ask for: the base model, then the adapters that are loaded now."""
        adapters = sorted(self.engine.adapters) if isinstance(self.engine, AdapterEngine) else []
        return [self.config.model_name, *adapters]

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a model's name stands for; None is the base model."""
        if model is None or model == self.config.model_name:
            return None
        served = self.served_names
        if model in served:
            return model
        message = f"there is no model {model!r}: served are {', '.join(served)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def require(self, feature: Feature, param: str, message: str) -> None:
        """400 with this message where the engine lacks what `param` asks for."""
        if feature not in self.engine.features:
            raise bad_request(message, param, "unsupported")

    async def act(self, what: str, work: Callable[[], T]) -> T:
        """In a thread, one thing at a time. What has begun is never left half done: a caller that leaves or a deadline
        that passes ends the waiting, not the work, and the next one waits for its end."""

        async def alone() -> T:
            async with self._acting:
                return await asyncio.to_thread(work)

        running, limit = asyncio.ensure_future(alone()), self.config.admin_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(running), limit)
        except TimeoutError:
            running.add_done_callback(
                lambda done: log.warning("%s ended late: %s", what, done.exception() or "done")
            )
            raise ApiError(503, f"{what} did not end within {limit:g} s and goes on: see /health") from None
