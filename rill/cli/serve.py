"""`rill serve`: a model behind the OpenAI API, on this machine, until a signal.

Options cover what is set often; everything else of the engine, the server and the router is a KEY=VALUE, as in recipes.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from rill.cli.arguments import Model, model_path
from rill.cli.console import complain, waiting

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def serve_model(
    model: Model,
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
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Processes, on CUDA each with a GPU, that hold one model together (native).")
    ] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="A process of its own for a single engine too.")
    ] = False,
) -> None:
    """Serve a model over the OpenAI API. Keys come from RILL_API_KEYS (commas between) and RILL_ADMIN_KEY.

    \b
    Examples:
      rill serve demo                               the model of that run
      rill serve Qwen/Qwen2.5-0.5B-Instruct
      rill serve models/tiny --port 9000 --replicas 2 engine.max_context=4096 server.max_concurrent=64
      rill serve models/tiny adapters.math=adapters/math
      rill serve models/large --tensor-parallel-size 2
      RILL_API_KEYS=k1,k2 RILL_ADMIN_KEY=secret rill serve models/tiny --host 0.0.0.0
    """
    model_path(model)  # a wrong name is answered at once
    with waiting("loading"):
        from rill.cli.serving import CLIENT_KEYS_VARIABLE, build_config, run

    config = build_config(
        model,
        settings or [],
        port=port,
        host=host,
        name=name,
        engine=engine,
        num_replicas=replicas,
        tensor_parallel_size=tensor_parallel_size,
        isolate=isolate,
    )
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(name)s: %(message)s")
    if host not in ("127.0.0.1", "localhost", "::1") and not config.server.api_keys:
        complain(f"warning: {host} is open to others and no client keys are set ({CLIENT_KEYS_VARIABLE})")
    run(config)
