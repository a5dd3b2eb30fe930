"""The application: routes, middleware and state put together around an engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rill import __version__
from rill.inference.base import Engine, Feature
from rill.inference.server import (
    routes_admin,
    routes_chat,
    routes_completions,
    routes_dialects,
    routes_embeddings,
    routes_models,
    routes_tokens,
)
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.errors import install_error_handlers
from rill.inference.server.generation import Generation
from rill.inference.server.limits import Admission, BodyLimit
from rill.inference.server.metrics import Metrics
from rill.inference.server.reasoning import is_taught
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec
from rill.inference.server.tool_calls import SYNTAXES, detect_syntax
from rill.models.pictures import load_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.loading import ModelConfig

log = logging.getLogger(__name__)

_NAME = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NAME, "code": _NAME}
_BODY = {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}
_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": _BODY}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": "An error, shaped as OpenAI's.",
        "content": {"application/json": {"schema": _SCHEMA}},
    }
    for status in (400, 401, 403, 404, 408, 409, 413, 429, 502, 503)
}


ROUTES = (
    routes_completions,
    routes_chat,
    routes_dialects,
    routes_tokens,
    routes_embeddings,
    routes_models,
    routes_admin,
)


def create_app(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    config: ServerConfig | None = None,
    *,
    model: ModelConfig | None = None,
    chat_template: str | None = None,
) -> FastAPI:
    """An ASGI application over the engine. The caller owns the engine and closes it after the application.

    `model` is what the engine was loaded from. With it, weights that do not fit are refused before the engine is asked,
    and stay without effect; without it, an engine that was given wrong weights is out of service until whole ones come.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        metrics = Metrics()
        sees = model is not None and Feature.PICTURES in engine.features
        pictures = load_pictures(model) if sees and model is not None else None
        codec = TextCodec(tokenizer, chat_template=chat_template, pictures=pictures)
        named = SYNTAXES.get(config.tool_syntax)
        app.state.server = ServerState(
            engine=engine,
            codec=codec,
            tool_syntax=named or detect_syntax(codec.chat_template),
            has_reasoning=config.reasoning == "think"
            or (config.reasoning == "auto" and is_taught(codec.chat_template)),
            config=config,
            keys=KeyRing(config),
            admission=Admission(config.requests_per_minute, config.max_concurrent),
            metrics=metrics,
            generation=Generation(engine, metrics, config.request_timeout_s, config.stream_interval_s),
            model=model,
        )
        app.state.count_response = metrics.count_response
        yield
        app.state.server.generation.close()
        if app.state.server.inbox is not None:
            app.state.server.inbox.close()

    app = FastAPI(
        title="rill",
        version=__version__,
        lifespan=lifespan,
        responses=_ERRORS,
        docs_url="/docs",
        redoc_url=None,
    )
    install_error_handlers(app)
    for module in ROUTES:
        app.include_router(module.routes)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    app.add_middleware(CountResponses, owner=app)
    return app


class CountResponses:
    """Counts answers by route and status. Routes, not paths: a client must not be able to make new time series."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self.app = app
        self.owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = "unknown" if route is None else route.path
                self.owner.state.count_response(path, message["status"])
            await send(message)

        await self.app(scope, receive, counted)
