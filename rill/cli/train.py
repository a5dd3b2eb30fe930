"""`rill train`: start a recipe, or go on with a run; ends with what was reached and what to do next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rill.cli.console import say
from rill.cli.progress import Progress
from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.dashboard.report import write_report
from rill.errors import RillError
from rill.telemetry import trace
from rill.telemetry.guards import Finding, GuardWatch
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import RUNS_FOLDER, Run, write_atomically
from rill.telemetry.sinks.base import RunInfo, build_sinks
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.checkpoints import require_checkpoint, step_of, whole_checkpoints
from rill.workflows.loop import StepReport
from rill.workflows.sections import RecipeConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)


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
    assert isinstance(config, RecipeConfig), f"the workflow {schema} has no recipe's Config"
    config_toml = dump_config(config, values.provenance)
    if run is None:
        run = Run.create(name or values.name, root=root, config_toml=config_toml)
    else:
        write_atomically(run.config_path, config_toml)
    carry_out(config, run)


def carry_out(config: RecipeConfig, run: Run) -> None:
    """Run a resolved recipe in its folder, showing progress and writing its files."""
    _log_to(run)
    trace.configure(run.path, "driver")
    sinks = build_sinks(config.sinks, RunInfo(name=run.name, directory=run.path, config=config.model_dump()))
    metrics = MetricLog(run.path, sinks)
    if checkpoints := whole_checkpoints(run):
        metrics.rewind(step_of(checkpoints[-1]))
    say(f"run folder: {run.path}")

    def record(report: StepReport) -> None:
        metrics.write(logged_step(report), report.metrics)

    watch = GuardWatch(run.path, config.guards())

    def guard(report: StepReport) -> None:
        for finding in watch.check(report.step, report.metrics) if report.phase == "step" else ():
            progress.note(f"guard: {finding}")

    with run.running():
        try:
            with Progress(Console()) as progress:
                WORKFLOWS.load(config.workflow)(config, run, [record, progress.observe, guard]).run()
        except RillError as error:
            if advice := _how_to_go_on(run):
                error.add_note(advice)
            raise
        finally:
            watch.close()
            metrics.close()
            trace.flush()
    _summarise(run, progress, write_report(run), watch.findings)


def logged_step(report: StepReport) -> int:
    """Where a report stands in the log: a warm-up counts up to 0, where RL begins, so that no step stands for two."""
    return report.step if report.phase == "step" else report.step - report.num_steps


def _how_to_go_on(run: Run) -> str:
    """Empty when the run did not come as far as its first figures: there is nothing to go on with."""
    checkpoints = whole_checkpoints(run)
    if not checkpoints and not (run.metrics_path.exists() and run.metrics_path.stat().st_size):
        return ""
    if not checkpoints:
        return "there is no checkpoint to go on from: `checkpoint_every` was not reached (0: only at the end)"
    return f"go on from step {step_of(checkpoints[-1])} with: {run.resume_command}"


def _summarise(run: Run, progress: Progress, page: Path, findings: Sequence[Finding]) -> None:
    for finding in findings:
        say(f"guard:    {finding}")
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
