"""The application: routes and state put together around an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rill.inference.base import Engine, Feature
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
from rill.models.pictures import load_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.loading import ModelConfig

ROUTES = (routes_tokens, routes_completions, routes_chat, routes_dialects, routes_admin)


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
    if model is not None and Feature.PICTURES in engine.features:
        pictures = load_pictures(model)
    codec = TextCodec(tokenizer, chat_template=chat_template, pictures=pictures)
    state = ServerState(engine, codec, config or ServerConfig(), model)
    return Application([endpoint for module in ROUTES for endpoint in module.routes], state)
