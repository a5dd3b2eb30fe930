"""`rill engine`: engines join and leave a run that is running, asked for from another terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from rill.cli.arguments import RUNS, Root, RunName
from rill.cli.console import Commands, say
from rill.telemetry.requests import ask
from rill.telemetry.run import Run

app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False)

Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for the run's answer.")]


@app.callback()
def engine() -> None:
    """Give a run that is running more engines, or take some away. What it trains on stays the same.

    \b
    Examples:
      rill engine join demo                 one more, on devices that no part of the run has
      rill engine join demo --devices 2-3   one on each of devices 2 and 3
      rill engine leave demo 1              rollout[1] goes; others go on with what it was saying
    """


@app.command()
def join(
    run: RunName,
    devices: Annotated[
        str, typer.Option("--devices", help="One engine on each, as in a placement: 2-3. Default: free ones.")
    ] = "",
    root: Root = RUNS,
    timeout_s: Timeout = 600.0,
) -> None:
    """Start more engines. They take the newest weights, prove it, and share the work from then on.

    \b
    Example:
      rill engine join demo --devices 2-3
    """
    say(ask(Run.open(run, root=root), devices=devices, timeout_s=timeout_s))


@app.command()
def leave(
    run: RunName,
    rank: Annotated[int, typer.Argument(help="The number in rollout[…].")],
    root: Root = RUNS,
    timeout_s: Timeout = 600.0,
) -> None:
    """End one engine. The others go on with its answers, behind the tokens that it has said.

    \b
    Example:
      rill engine leave demo 1
    """
    say(ask(Run.open(run, root=root), leaving=rank, timeout_s=timeout_s))
