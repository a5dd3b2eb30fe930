"""What every route needs, in one record on the application."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from rill.inference.base import Engine
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.generation import Generation
from rill.inference.server.limits import Admission
from rill.inference.server.metrics import Metrics
from rill.inference.server.text import TextCodec
from rill.inference.server.tool_calls import ToolSyntax

if TYPE_CHECKING:
    from rill.inference.server.weights import WeightInbox
    from rill.models.loading import ModelConfig


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
    """Administration is one thing at a time."""
    is_paused: bool = False
    is_asleep: bool = False
    inbox: WeightInbox | None = None
    """Made by the first update: the parent of replicas needs no torch until then."""


def state_of(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state
