"""`rill train`: start a recipe, or go on with a run; ends with what was reached and what to do next."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rill.cli.console import say
from rill.cli.progress import Progress
from rill.config import Config
from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.dashboard.report import write_report
from rill.telemetry import trace
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import RUNS_FOLDER, Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.checkpoints import require_checkpoint
from rill.workflows.loop import StepReport

app = typer.Typer(rich_markup_mode=None)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file (see `rill recipes`).")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as loop.steps=20.")] = None,
    resume: Annotated[str, typer.Option("--resume", help="Go on with this run (a name or a folder).")] = "",
    name: Annotated[str, typer.Option("--name", help="The run's name. Unset: the recipe's.")] = "",
    root: Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")] = Path(RUNS_FOLDER),
    cluster: Annotated[str, typer.Option("--cluster", help="local or ray; short for cluster.type=…")] = "",
) -> None:
    """Train a model.

    \b
    Examples:
      rill train demo                               a first result in minutes
      rill train demo loop.steps=50 seed=3          with changes
      rill train demo --cluster ray                 the same on Ray
      rill train --resume runs/demo                 go on where it stood
    """
    changes = [*(overrides or []), *([f"cluster.type={cluster}"] if cluster else [])]
    if resume:
        if recipe:
            changes = [recipe, *changes]  # with --resume there is no recipe, so the first word is a change
        run = Run.resume(resume, root=root)
        require_checkpoint(run)
        values = load_recipe(run.config_path, changes)
    elif recipe:
        values = load_recipe(recipe, changes)
        run = None
    else:
        raise typer.BadParameter("give a recipe (see `rill recipes`), or --resume RUN")
    schema = recipe_schema(values.values, str(values.path))
    config = resolve(schema, values.values, values.provenance)
    if run is None:
        run = Run.create(name or values.name, root=root, config_toml=dump_config(config, values.provenance))
    carry_out(config, run)


def carry_out(config: Config, run: Run) -> None:
    """Run a resolved recipe in its folder, showing progress and writing its files."""
    console = Console()
    _log_to(run)
    trace.configure(run.path, "driver")
    metrics = MetricLog(run.path)
    say(f"run folder: {run.path}")

    def record(report: StepReport) -> None:
        metrics.write(report.step, report.metrics)

    with run.running():
        workflow_class = WORKFLOWS.load(config.model_dump()["workflow"])
        try:
            with Progress(console) as progress:
                workflow_class(config, run, [record, progress.observe]).run()
        finally:
            metrics.close()
            trace.flush()
    page = write_report(run)
    _summarise(run, progress, page)


def _summarise(run: Run, progress: Progress, page: Path) -> None:
    for name, label in (("reward/mean", "reward"), ("eval/accuracy", "held-out accuracy")):
        values = progress.history(name)
        if values:
            say(f"{label}: {values[0]:.3f} → {values[-1]:.3f}   {progress.curve(name)}")
    say(f"report:   {page.resolve().as_uri()}")
    say(f"model:    {run.path / 'model'}  (try: rill serve {run.path / 'model'})")
    say(f"next:     rill runs show {run.name}   ·   change the recipe with `rill train RECIPE key=value`")


def _log_to(run: Run) -> None:
    handler = logging.FileHandler(run.log_path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("rill").addHandler(handler)
    logging.getLogger("rill").setLevel(logging.INFO)
