"""The application: routes, middleware and state put together around an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.responses import Response

from rill.data.tool_calls import SYNTAXES, detect_syntax
from rill.inference.base import Engine, Feature
from rill.inference.server import (
    routes_admin,
    routes_chat,
    routes_completions,
    routes_dialects,
    routes_models,
    routes_tokens,
)
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.generation import Generation
from rill.inference.server.http import Access, Application, Call, Routes, json_response
from rill.inference.server.limits import Admission
from rill.inference.server.metrics import Metrics
from rill.inference.server.openapi import PAGE
from rill.inference.server.reasoning import is_taught
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec
from rill.models.pictures import load_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.loading import ModelConfig

ROUTES = (
    routes_tokens, routes_completions, routes_chat, routes_dialects, routes_models, routes_admin,
)  # fmt: skip


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
    config = config or ServerConfig()
    metrics = Metrics()

    @asynccontextmanager
    async def started() -> AsyncIterator[ServerState]:
        pictures = None
        if model is not None and Feature.PICTURES in engine.features:
            pictures = load_pictures(model)
        codec = TextCodec(tokenizer, chat_template=chat_template, pictures=pictures)
        named = SYNTAXES.get(config.tool_syntax)
        state = ServerState(
            engine=engine,
            codec=codec,
            tool_syntax=named or detect_syntax(codec.chat_template),
            has_reasoning=config.reasoning == "think"
            or (config.reasoning == "auto" and is_taught(codec.chat_template)),
            config=config,
            keys=KeyRing(config),
            admission=Admission(config.max_concurrent),
            metrics=metrics,
            generation=Generation(engine, metrics, config.request_timeout_s, config.stream_interval_s),
            model=model,
        )
        yield state
        state.generation.close()

    described = [endpoint for module in ROUTES for endpoint in module.routes]
    app = Application(described, started, max_body_bytes=config.max_body_bytes)
    app.add(_pages(app))
    return app


def _pages(app: Application) -> Routes:
    """What the API says of itself."""
    routes = Routes()

    @routes.get("/openapi.json", Access.OPEN)
    async def openapi(call: Call) -> Response:
        return json_response(app.openapi())

    @routes.get("/docs", Access.OPEN)
    async def page(call: Call) -> Response:
        return Response(PAGE, media_type="text/html")

    return routes
