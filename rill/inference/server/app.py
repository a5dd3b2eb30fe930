"""The application: routes, middleware and state put together around an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from rill import __version__
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
from rill.inference.server.errors import ERRORS, install_error_handlers
from rill.inference.server.generation import Generation
from rill.inference.server.limits import Admission, BodyLimit
from rill.inference.server.metrics import CountResponses, Metrics
from rill.inference.server.reasoning import is_taught
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec
from rill.models.pictures import load_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.loading import ModelConfig

ROUTES = (
    routes_completions, routes_chat, routes_dialects, routes_tokens, routes_models, routes_admin,
)  # fmt: skip


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
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pictures = None
        if model is not None and Feature.PICTURES in engine.features:
            pictures = load_pictures(model)
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
        yield
        app.state.server.generation.close()
        if app.state.server.inbox is not None:
            app.state.server.inbox.close()

    app = FastAPI(title="rill", version=__version__, lifespan=lifespan, responses=ERRORS, redoc_url=None)
    install_error_handlers(app)
    for module in ROUTES:
        app.include_router(module.routes)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    app.add_middleware(CountResponses, metrics=metrics)
    return app
