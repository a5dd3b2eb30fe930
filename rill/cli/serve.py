"""`rill serve`: a model behind the OpenAI API, on this machine, until a signal.

Options cover what is set often; everything else of the engine, the server and the router is a KEY=VALUE, as in recipes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from rill.cli.console import complain, say
from rill.config import Config, OneOf, PartConfig, resolve
from rill.config.files import with_overrides
from rill.errors import ConfigError
from rill.inference.base import ENGINES, AdapterEngine, Engine, Feature
from rill.inference.server import ServerConfig, bind, create_app, serve
from rill.inference.server.replica_set import RouterConfig
from rill.inference.server.router import Router
from rill.models.card import read_card
from rill.telemetry.run import RUNS_FOLDER, Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.loading import ModelConfig

CLIENT_KEYS_VARIABLE = "RILL_API_KEYS"
ADMIN_KEY_VARIABLE = "RILL_ADMIN_KEY"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


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


@app.command()
def serve_model(
    model: Annotated[
        str, typer.Argument(help="A run (its trained model), a Hugging Face folder, or a name of the hub.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="engine.*, server.* and router.* as KEY=VALUE.")
    ] = None,
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="0.0.0.0 listens on every interface.")] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients. Unset: its folder's.")
    ] = None,
    engine: Annotated[str, typer.Option(help="native or vllm.")] = "native",
    replicas: Annotated[int, typer.Option(help="Processes, each with an engine.")] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="A process of its own for a single engine too.")
    ] = False,
) -> None:
    """Serve a model over the OpenAI API. Keys come from RILL_API_KEYS (commas between) and RILL_ADMIN_KEY.

    \b
    Examples:
      rill serve demo                               the model of that run
      rill serve Qwen/Qwen2.5-0.5B-Instruct
      rill serve models/tiny --port 9000 --replicas 2 engine.max_context=4096 server.requests_per_minute=600
      rill serve models/tiny adapters.math=adapters/math
      RILL_API_KEYS=k1,k2 RILL_ADMIN_KEY=secret rill serve models/tiny --host 0.0.0.0
    """
    config = build_config(
        model,
        settings or [],
        port=port,
        host=host,
        name=name,
        engine=engine,
        num_replicas=replicas,
        isolate=isolate,
    )
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(name)s: %(message)s")
    if host not in ("127.0.0.1", "localhost", "::1") and not config.server.api_keys:
        complain(f"warning: {host} is open to others and no client keys are set ({CLIENT_KEYS_VARIABLE})")
    run(config)


def build_config(
    model: str,
    settings: list[str],
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    name: str | None = None,
    engine: str = "native",
    num_replicas: int = 1,
    isolate: bool = False,
) -> ServeConfig:
    values: dict[str, Any] = {
        "engine": {"type": engine, "model": {"path": folder_of(model)}},
        "server": {"port": port, "host": host, "model_name": name or Path(model).name},
        "router": {"num_replicas": num_replicas},
        "isolate": isolate,
    }
    if keys := [key for key in os.environ.get(CLIENT_KEYS_VARIABLE, "").split(",") if key]:
        values["server"]["api_keys"] = keys
    if admin := os.environ.get(ADMIN_KEY_VARIABLE):
        values["server"]["admin_key"] = admin
    return resolve(ServeConfig, with_overrides(values, settings, model).values, source="command line")


def folder_of(model: str) -> str:
    """A run stands for the model it left; everything else is a folder, or a name of the hub, itself."""
    is_run = any((path / "status.json").is_file() for path in (Path(RUNS_FOLDER) / model, Path(model)))
    return str(Run.open(model).trained_model()) if is_run else model


def run(config: ServeConfig) -> None:
    """Take the address, load, serve, and close in the right order."""
    from rill.models.loading import load_tokenizer

    listener = bind(config.server)
    model = model_of(config)
    tokenizer = load_tokenizer(model)
    template = template_of(config, tokenizer)
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


def template_of(config: ServeConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The one that was given, else the one that the model was trained with; None: the tokenizer's."""
    from rill.models.loading import model_folder

    if config.chat_template:
        return Path(config.chat_template).read_text(encoding="utf-8")
    source = model_of(config).path
    folder = Path(model_folder(source, weights=False)) if source else None
    card = read_card(folder) if folder else None
    if card is not None and card.prompts == "bare":
        complain(
            f"{folder} was trained on bare prompts such as {card.example!r:.60}: messages are put to it as plain text, "
            "without a chat template"
        )
    own = tokenizer.chat_template
    return card.template(own if isinstance(own, str) else None) if card is not None else None


def model_of(config: ServeConfig) -> ModelConfig:
    """The model and the tokenizer to serve it with: an engine's own may be in another process."""
    from rill.models.loading import ModelConfig

    model = config.engine.model_dump().get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"engine {config.engine.type!r} holds no model of its own: serve native or vllm")
    source = ModelConfig.model_validate(model)
    return source if config.tokenizer is None else source.model_copy(update={"tokenizer": config.tokenizer})
