"""The model behind `rill serve` and `rill chat`: its configuration, its engine, and how it was asked in training.

Importing this takes seconds (torch), so the commands do it when they are called, not to print their help.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rill.cli.arguments import model_path
from rill.cli.console import complain, say
from rill.config import Config, OneOf, PartConfig, resolve
from rill.config.files import with_overrides
from rill.errors import ConfigError
from rill.inference.base import ENGINES, AdapterEngine, Engine, Feature
from rill.inference.server import ServerConfig, bind, create_app, serve
from rill.inference.server.router import Router, RouterConfig
from rill.models.card import TrainingCard, read_card
from rill.models.loading import ModelConfig, load_tokenizer, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLIENT_KEYS_VARIABLE = "RILL_API_KEYS"
ADMIN_KEY_VARIABLE = "RILL_ADMIN_KEY"


class ServeConfig(Config):
    engine: Annotated[PartConfig, OneOf(ENGINES)]
    """The engine and its model."""
    server: ServerConfig = ServerConfig()
    router: RouterConfig = RouterConfig()
    """Only used with more than one replica, or with `isolate`."""
    isolate: bool = False
    """Give a single engine a process of its own too: HTTP and tokenizing then cost it no time."""
    tokenizer: str | None = None
    """A tokenizer folder, or "chars". Unset: the model's own."""
    adapters: dict[str, str] = {}
    """LoRA adapters to serve from the start: name -> PEFT folder. More come through /v1/load_lora_adapter."""
    chat_template: str | None = None
    """A Jinja file used in place of the tokenizer's template. Unset: as the model was trained."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")


def build_config(
    model: str,
    settings: list[str],
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    name: str | None = None,
    engine: str = "native",
    num_replicas: int = 1,
    tensor_parallel_size: int = 1,
    isolate: bool = False,
) -> ServeConfig:
    values: dict[str, Any] = {
        "engine": {"type": engine, "model": {"path": model_path(model)}},
        "server": {"port": port, "host": host, "model_name": name or Path(model).name},
        "router": {"num_replicas": num_replicas},
        "isolate": isolate,
    }
    if tensor_parallel_size != 1:
        values["engine"]["tensor_parallel_size"] = tensor_parallel_size
    if keys := [key for key in os.environ.get(CLIENT_KEYS_VARIABLE, "").split(",") if key]:
        values["server"]["api_keys"] = keys
    if admin := os.environ.get(ADMIN_KEY_VARIABLE):
        values["server"]["admin_key"] = admin
    return resolve(ServeConfig, with_overrides(values, settings, model).values, source="command line")


def run(config: ServeConfig) -> None:
    """Take the address, load, serve, and close in the right order."""
    listener = bind(config.server)
    model = model_of(config)
    tokenizer = load_tokenizer(model)
    card = card_of(config)
    if card is not None and card.prompts == "bare":
        complain(
            f"{model.path} was trained on bare prompts such as {card.example!r:.60}: messages are put to it as plain "
            "text, without a chat template"
        )
    template = template_of(config, tokenizer, card)
    engine = build_engine(config)
    try:
        _load_adapters(engine, config.adapters)
        application = create_app(engine, tokenizer, config.server, model=model, chat_template=template)
        name = config.server.model_name
        serve(
            application,
            config.server,
            listener,
            on_started=lambda url: say(f"{name} at {url}/v1 (docs: {url}/docs)"),
        )
    finally:
        engine.close()


def build_engine(config: ServeConfig) -> Engine:
    if config.router.num_replicas > 1 or config.isolate:
        return Router(config.engine, config.router)
    engine: Engine = ENGINES.load(config.engine.type)(config.engine)
    return engine


def _load_adapters(engine: Engine, adapters: dict[str, str]) -> None:
    if not adapters:
        return
    if Feature.LORA not in engine.features or not isinstance(engine, AdapterEngine):
        raise ConfigError(f"adapters: this engine serves none, and {', '.join(adapters)} was asked for")
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)


def card_of(config: ServeConfig) -> TrainingCard | None:
    """How the model was trained, where it says so."""
    path = model_of(config).path
    return read_card(Path(model_folder(path, weights=False))) if path else None


def template_of(
    config: ServeConfig, tokenizer: PreTrainedTokenizerBase, card: TrainingCard | None
) -> str | None:
    """The one that was given, else the one that the model was trained with; None: the tokenizer's."""
    if config.chat_template:
        return Path(config.chat_template).read_text(encoding="utf-8")
    own = tokenizer.chat_template
    return card.template(own if isinstance(own, str) else None) if card is not None else None


def model_of(config: ServeConfig) -> ModelConfig:
    """The model and the tokenizer to serve it with: an engine's own may be in another process."""
    model = config.engine.model_dump().get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"engine {config.engine.type!r} holds no model of its own: serve native or vllm")
    source = ModelConfig.model_validate(model)
    return source if config.tokenizer is None else source.model_copy(update={"tokenizer": config.tokenizer})
