"""`rill report`: a run as one HTML file that opens offline and can be mailed, or its main curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rill.cli.arguments import RUNS, Root, RunName, to_write
from rill.cli.console import say
from rill.dashboard.curves import write_curves
from rill.dashboard.report import write_report
from rill.telemetry.run import Run

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    run: RunName,
    root: Root = RUNS,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Default: report.html in the run folder.", callback=to_write),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", help="Draw the main curves into this SVG file instead of the page.", callback=to_write
        ),
    ] = None,
) -> None:
    """Write a page with a run's curves, its timeline and its rollouts. Works while the run goes on.

    \b
    Examples:
      rill report demo
      rill report demo --svg demo.svg     only its curves, as a picture of a few kilobytes
    """
    opened = Run.open(run, root=root)
    written = write_report(opened, out) if svg is None else write_curves(opened, svg)
    say(written.resolve().as_uri())
