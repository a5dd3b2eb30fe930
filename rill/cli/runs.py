"""`rill runs`: the runs in a folder, from their files alone, while they run and after."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rill.cli.arguments import RUNS, AsJson, Root, RunName, to_write
from rill.cli.console import Commands, say, say_json, say_paged, say_table
from rill.cli.progress import curve_lines, duration, history_of
from rill.errors import UserError
from rill.telemetry.chrome import export_chrome
from rill.telemetry.evaluations import Evaluation
from rill.telemetry.evaluations import load as load_evaluation
from rill.telemetry.evaluations import newest as newest_evaluation
from rill.telemetry.guards import read_findings
from rill.telemetry.metrics import MetricRow, accuracies, read_metrics
from rill.telemetry.paired import Paired
from rill.telemetry.paired import compare as paired_test
from rill.telemetry.rollouts import GroupRecord, each_group, in_order
from rill.telemetry.run import Run, RunStatus, list_runs

REWARD = "reward/mean"
_STYLES = {
    RunStatus.RUNNING.value: "cyan",
    RunStatus.FINISHED.value: "green",
    RunStatus.FAILED.value: "red",
    RunStatus.INTERRUPTED.value: "yellow",
    RunStatus.UNKNOWN.value: "red",
}

_COLUMNS = ["run", "status", "steps", "reward", "held-out", "started", "lasted"]
_PAIRED_COLUMNS = ["set", "prompts", "first", "second", "difference", "95 % interval", "better / worse", "p"]

app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, root: Root = RUNS, as_json: AsJson = False) -> None:
    """List runs: status, steps, last reward. Works on running, finished and copied runs alike.

    \b
    Examples:
      rill runs                      the runs in ./runs
      rill runs --root /data/runs    those elsewhere
      rill runs show demo            one of them
      rill runs rollouts demo        what its model says
      rill runs trace demo           its timeline, for https://ui.perfetto.dev
      rill runs verify demo          are its checkpoints and its token log whole?
      rill runs compare demo demo-2  which is better, and is it more than chance?
      rill runs rm demo-2            delete one
    """
    if context.invoked_subcommand is not None:
        return
    found = [summarise(run) for run in list_runs(root)]
    if as_json:
        say_json(found)
    elif not found:
        say(f"no runs in {root}/: start one with `rill train RECIPE`")
    else:
        say_table(_COLUMNS, [_row(summary) for summary in found], styles=_STYLES)


@app.command()
def show(run: RunName, root: Root = RUNS, as_json: AsJson = False) -> None:
    """Show one run: status, environment, curves, what guards found, latest figures.

    \b
    Example:
      rill runs show demo
    """
    from rill.dashboard.card import machine

    opened = Run.open(run, root=root)
    summary = summarise(opened)
    rows = read_metrics(opened.path)
    starts = opened.starts()
    if as_json:
        say_json({**summary, "starts": starts, "latest": rows[-1].values if rows else {}})
        return
    status = typer.style(summary["status"], fg=_STYLES[summary["status"]])
    say(f"{opened.path}: {status} {summary['message']}".rstrip())
    if starts:
        last = machine(starts)
        say(f"started {last['starts']} time(s), last with: {last['command']}")
        say(f"on {last['host']}, python {last['python']}, {last['versions']}")
    else:
        say(f"how it was started is lost: {opened.environment_path} is missing or damaged")
    is_ended = summary["status"] in (RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.UNKNOWN)
    if is_ended and (rows or any(opened.checkpoints_dir.glob("step-*"))):
        say(f"resume with: {opened.resume_command}")
    for line in curve_lines(history_of(rows)):
        say(line)
    for finding in read_findings(opened.path):
        guard = typer.style(f"step {finding.step}: {finding.guard}", fg="yellow")
        say(f"guard          {guard}: {finding.seen}. {finding.meaning}")
    if rows:
        say(f"step {rows[-1].step}:")
        say_table(
            ["figure", "value"], [[name, f"{value:.6g}"] for name, value in sorted(rows[-1].values.items())]
        )


@app.command()
def rollouts(
    run: RunName,
    root: Root = RUNS,
    step: Annotated[
        int | None,
        typer.Option("--step", help="Only samples of the policy after this many steps. Default: the newest."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many groups.")] = 1,
    failed: Annotated[bool, typer.Option("--failed", help="Only samples whose reward failed.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="Only groups of this prompt, by its id.")] = "",
    search: Annotated[str, typer.Option("--search", help="Only groups in which these words occur.")] = "",
) -> None:
    """Print what the model said, with the reward of each answer. On a terminal a long list goes through the pager.

    \b
    Examples:
      rill runs rollouts demo                the newest group
      rill runs rollouts demo --step 0 -n 3  three groups from before the first step
      rill runs rollouts demo --failed       answers whose reward raised or hung, and why
      rill runs rollouts demo -n 99 --search "carry"    every group with that word, up to 99
    """
    opened = Run.open(run, root=root)
    found = (
        group
        for group in each_group(opened)
        if (step is None or group.version == step + 1)
        and (not failed or any(sample.error for sample in group.samples))
        and (not prompt or group.prompt_id == prompt)
        and (not search or any(search.lower() in "".join(sample.tokens).lower() for sample in group.samples))
    )
    groups = heapq.nlargest(count, found, key=in_order)
    if not groups:
        say(_none_recorded(opened, step, failed, prompt or search))
    say_paged(line for group in reversed(groups) for line in _group_lines(group, failed))


@app.command()
def trace(
    run: RunName,
    root: Root = RUNS,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Default: trace.json in the run folder.", callback=to_write),
    ] = None,
) -> None:
    """Merge a run's spans into one file for https://ui.perfetto.dev or chrome://tracing.

    \b
    Example:
      rill runs trace demo -o demo-trace.json
    """
    opened = Run.open(run, root=root)
    target = out or opened.path / "trace.json"
    num_events = export_chrome(opened.path, target)
    say(f"{target}: {num_events} events")


@app.command()
def verify(run: RunName, root: Root = RUNS) -> None:
    """Check every checkpoint and the token log of a run against their checksums. Exit code 1: something is damaged.

    \b
    Example:
      rill runs verify demo
    """
    from rill.journal.checkpoints import damage_of, score_of, step_of, whole_checkpoints
    from rill.journal.reader import LogReader

    opened = Run.open(run, root=root)
    damages = 0
    for folder in whole_checkpoints(opened):
        damage = damage_of(folder, deep=True)
        score = score_of(folder)
        told = "whole" if score is None else f"whole, score {score:g}"
        say(f"step {step_of(folder):>6}  {typer.style(damage, fg='red') if damage else told}")
        damages += bool(damage)
    reader = LogReader(opened.path)
    reader.read_all()
    for damage in reader.damages():
        say(f"token log    {typer.style(damage, fg='red')}")
        damages += 1
    sequences = [sequence for _, sequence in reader.sequences()]
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    begun = sum(not sequence.is_finished for sequence in sequences)
    say(f"token log    {len(sequences)} answers with {num_tokens} tokens, {begun} of them under way")
    if damages:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunName,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    step: Annotated[int | None, typer.Option("--step", help="Default: the newest checkpoint.")] = None,
    root: Root = RUNS,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder; no other process of the run is needed.

    \b
    Example:
      rill runs export demo --step 20 -o models/demo-20
    """
    from rill.journal.checkpoints import step_of, whole_checkpoints

    opened = Run.open(run, root=root)
    found = {step_of(folder): folder for folder in whole_checkpoints(opened)}
    if not found or (step is not None and step not in found):
        raise UserError(f"{opened.path} has checkpoints of steps {', '.join(map(str, found)) or '(none)'}")
    if out.exists():
        raise UserError(f"{out} exists: name a new folder")
    from rill.algorithms import Algorithm
    from rill.cli.config import load_and_resolve
    from rill.training.policy import PolicyTrainer
    from rill.workflows.rl_config import RLConfig

    _, config = load_and_resolve(str(opened.config_path), [])
    if not isinstance(config, RLConfig):
        raise UserError(f"{opened.path} is no RL run: what it trained is in its folder `model`")
    chosen = max(found) if step is None else step
    trainer = PolicyTrainer(config.trainer, Algorithm(config.algorithm))
    trainer.load(found[chosen] / "actor")
    trainer.export(out)
    trainer.close()
    say(f"{out}: the policy after step {chosen}")


@app.command()
def compare(
    first: Annotated[
        str, typer.Argument(help="A run (its newest `rill eval`), or the file of an evaluation.")
    ],
    second: Annotated[str, typer.Argument(help="The one to compare it with.")],
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Compare two runs, and two evaluations prompt by prompt with a paired test.

    \b
    Examples:
      rill runs compare demo demo-2                  after `rill eval` of each
      rill runs compare before.jsonl after.jsonl     files of `rill eval … -o FILE`
    """
    ends = [_end_of(name, root) for name in (first, second)]
    opened = [run for run, _ in ends if run is not None]
    evaluations = [evaluation for _, evaluation in ends if evaluation is not None]
    found: dict[str, Paired] = {}
    if len(evaluations) == 2:
        rewards = [evaluation.rewards() for evaluation in evaluations]
        for name in sorted(rewards[0].keys() & rewards[1].keys()):
            if (paired := paired_test(rewards[0][name], rewards[1][name])) is not None:
                found[name] = paired
    if as_json:
        say_json(
            {"runs": [summarise(run) for run in opened], "sets": {n: asdict(p) for n, p in found.items()}}
        )
        return
    if opened:
        say_table(_COLUMNS, [_row(summarise(run)) for run in opened], styles=_STYLES)
    if found:
        say_table(_PAIRED_COLUMNS, [_paired_row(name, paired) for name, paired in found.items()])
    elif len(evaluations) == 2:
        say("the two evaluations share no prompt of any set: evaluate both on the same data")
    else:
        lacking = [name for name, (_, evaluation) in zip((first, second), ends) if evaluation is None]
        say("; ".join(f"{name} has no evaluation yet: rill eval {name}" for name in lacking))


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="Runs, by name or folder.")],
    root: Root = RUNS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs with all they left: models, checkpoints, figures. Asks first; one that is running is left alone.

    \b
    Example:
      rill runs rm demo-2 demo-3
    """
    opened = [Run.open(name, root=root) for name in names]
    for each in opened:
        if each.state().status is RunStatus.RUNNING:
            raise UserError(f"{each.path} is running: end it first")
    if not yes:
        typer.confirm(f"delete {', '.join(str(each.path) for each in opened)}?", abort=True)
    for each in opened:
        each.remove()
        if each.path.exists():
            raise UserError(f"{each.path} could not be deleted, or not all of it: see whose it is")
        say(f"deleted {each.path}")


def summarise(run: Run) -> dict[str, Any]:
    """What the list shows of a run."""
    state = run.state()
    rows = read_metrics(run.path)
    return {
        "name": run.name,
        "path": str(run.path),
        "status": state.status.value,
        "message": state.message,
        "steps": max(rows[-1].step, 0) if rows else 0,  # a warm-up counts up to 0
        "reward": _last(rows, REWARD),
        "accuracy": _accuracy(rows),
        "started_s": state.created_s,
        "lasted_s": state.lasted_s(rows[-1].time_s if rows else 0.0),
    }


def _row(summary: dict[str, Any]) -> list[str]:
    reward = "-" if summary["reward"] is None else f"{summary['reward']:.3f}"
    accuracy = "-" if summary["accuracy"] is None else f"{summary['accuracy']:.1%}"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary["started_s"]))
    return [
        summary["name"],
        summary["status"],
        str(summary["steps"]),
        reward,
        accuracy,
        started,
        duration(summary["lasted_s"]),
    ]


def _accuracy(rows: list[MetricRow]) -> float | None:
    """On the held-out side; of the first set with a name where there is none."""
    named = accuracies(name for row in rows for name in row.values)
    return _last(rows, named[0]) if named else None


def _end_of(name: str, root: Path) -> tuple[Run | None, Evaluation | None]:
    """A run with its newest evaluation, or an evaluation of no run."""
    if Path(name).is_file():
        return None, load_evaluation(Path(name))
    run = Run.open(name, root=root)
    return run, newest_evaluation(run)


def _paired_row(name: str, paired: Paired) -> list[str]:
    return [
        name,
        str(paired.num_prompts),
        f"{paired.first:.1%}",
        f"{paired.second:.1%}",
        f"{paired.difference:+.1%}",
        f"{paired.low:+.1%} – {paired.high:+.1%}",
        f"{paired.num_gained} / {paired.num_lost}",
        f"{paired.p_value:.2g}",
    ]


def _last(rows: list[MetricRow], name: str) -> float | None:
    """Of the latest step that has it: not every step is evaluated."""
    return next((row.values[name] for row in reversed(rows) if name in row.values), None)


def _group_lines(group: GroupRecord, failed: bool) -> Iterator[str]:
    when = f"after step {group.version - 1}" if group.version > 0 else "nothing sampled"
    prompt = f", prompt {group.prompt_id}" if group.prompt_id else ""
    yield typer.style(f"{group.group}, {when}{prompt}, expected {group.answer!r}", bold=True)
    for sample in group.samples:
        if not sample.error and failed:
            continue
        reward = typer.style(f"{sample.score:6.2f}", fg="green" if sample.score > 0 else "red")
        text = f"{typer.style(sample.prompt, dim=True)}▸{sample.response}".replace("\n", "\n          ")
        yield f"  {reward}  {text}"
        if sample.error:
            yield f"          {typer.style(sample.error, fg='red')}"


def _none_recorded(run: Run, step: int | None, failed: bool, wanted: str) -> str:
    steps = sorted({group.version - 1 for group in each_group(run) if group.version > 0})
    if not steps:
        return f"{run.path} has recorded no rollouts (see rollout.log_groups)"
    which = (" with a failed reward" if failed else "") + (f" with {wanted!r}" if wanted else "")
    after = "" if step is None else f" after step {step}"
    return f"no recorded rollout{which}{after}: {run.path} has those after steps {steps[0]} to {steps[-1]}"
