"""What every route needs, in one record on the application; and how administration acts on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rill.data.tool_calls import ToolSyntax
from rill.inference.base import Engine
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.errors import ApiError
from rill.inference.server.generation import Generation
from rill.inference.server.limits import Admission
from rill.inference.server.metrics import Metrics
from rill.inference.server.text import TextCodec

if TYPE_CHECKING:
    from rill.inference.server.weights import WeightInbox
    from rill.models.loading import ModelConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ServerState:
    engine: Engine
    codec: TextCodec
    tool_syntax: ToolSyntax
    """How this model writes tool calls."""
    has_reasoning: bool
    """Its answers may begin with a block of reasoning."""
    config: ServerConfig
    keys: KeyRing
    admission: Admission
    metrics: Metrics
    generation: Generation
    model: ModelConfig | None
    """What the engine was loaded from: new weights are compared with it, and /reload_weights goes back to it."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    admin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_paused: bool = False
    is_asleep: bool = False
    inbox: WeightInbox | None = None
    """Made by the first update: the parent of replicas needs no torch until then."""

    async def act(self, what: str, work: Callable[[], T]) -> T:
        """In a thread, one thing at a time. What has begun is never left half done: a caller that leaves or a deadline
        that passes ends the waiting, not the work, and the next one waits for its end."""

        async def alone() -> T:
            async with self.admin_lock:
                return await asyncio.to_thread(work)

        running, limit = asyncio.ensure_future(alone()), self.config.admin_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(running), limit)
        except TimeoutError:
            running.add_done_callback(
                lambda done: log.warning("%s ended late: %s", what, done.exception() or "done")
            )
            raise ApiError(503, f"{what} did not end within {limit:g} s and goes on: see /health") from None
