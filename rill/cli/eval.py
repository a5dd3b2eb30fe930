"""`rill eval`: pass@k and what it took, with confidence intervals, of a run's model, or of any model, on its tasks or
another."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rill.cli.arguments import RUNS, AsJson, Model, Root, to_write
from rill.cli.console import say, say_json, say_table, waiting
from rill.config.files import with_overrides
from rill.config.resolve import resolve
from rill.errors import RunError, UserError
from rill.models.card import FILE as CARD_FILE
from rill.models.card import TrainingCard, read_card
from rill.telemetry.evaluations import Answer, costs_of, next_path, rewards_of, save
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import Run

if TYPE_CHECKING:
    from rill.cli.scoring import ScoringConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(name="eval")
def evaluate(
    model: Model,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as samples=8.")] = None,
    task: Annotated[str, typer.Option("--task", help="A dataset's name. Default: the run's own.")] = "",
    root: Root = RUNS,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Keep the answers here. Default: in the run's folder.", callback=to_write
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out problems; every answer is kept with its score.

    \b
    Examples:
      rill eval demo                                        the demo's model on the sets of its recipe
      rill eval demo samples=8 sampling.temperature=1.0     pass@1, @2, @4, @8
      rill eval vault env.limits.max_turns=3                an agent: turns, tool calls and tokens, too
      rill eval ./my-model --task arithmetic data.digits=[3,3] env.reward.answer=last_number
      rill eval Qwen/Qwen2.5-0.5B-Instruct --task hub data.name=openai/gsm8k data.subset=main data.split=test \\
        data.answer_after=#### env.reward.type=math sampling.max_new_tokens=512 -o base.jsonl
      rill runs compare base.jsonl demo                     is the difference more than chance?
    """
    given = with_overrides(_starting_point(model, task, root), overrides or [], model)
    with waiting("loading"):  # seconds: a wrong name above is answered at once
        from rill.cli.scoring import ScoringConfig
    config = resolve(ScoringConfig, given.values, given.provenance)
    run = Run.find(model, root=root)
    own = None if run is None or out is not None else next_path(run)
    try:
        answers = _answers(config, run, own)
    except BaseException:
        if own is not None:
            own.unlink()
        raise
    metrics = _metrics_of(answers)
    path = out or own
    if path is not None:
        save(path, model=model, metrics=metrics, config=config.model_dump(mode="json"), answers=answers)
    errors = [answer.error for answer in answers if answer.error]
    if as_json:
        say_json(metrics)
    else:
        for chosen in config.all_sets():
            what = f"{chosen.data.type}, {chosen.samples} sample(s) at temperature {chosen.temperature:g}"
            _show(chosen.name, metrics, what)
        if errors:
            say(f"for example: {errors[0]}")
        say(f"answers in {path}" if path is not None else "answers are not kept: -o FILE keeps them")
    if errors and len(errors) == len(answers):
        raise RunError(f"every episode failed, so nothing was measured; the first: {errors[0]}")


def _answers(config: ScoringConfig, run: Run | None, own: Path | None) -> list[Answer]:
    """Those of a run are in its rollout viewer too, where they have a file of their own there."""
    from rich.console import Console
    from rich.progress import Progress

    from rill.cli.scoring import score

    transcripts = None
    if run is not None and own is not None:
        steps = [row.step for row in read_metrics(run.path)]
        transcripts = (run.path, f"eval-{own.stem}", max([0, *steps]) + 1)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task_id = progress.add_task("answers", total=None)

        def on_done(done: int, total: int) -> None:
            progress.update(task_id, completed=done, total=total)

        return score(config, on_done, transcripts=transcripts)


def _metrics_of(answers: Sequence[Answer]) -> dict[str, float]:
    from rill.workflows.evaluation import summarise_rewards

    metrics: dict[str, float] = {}
    for name, rows in rewards_of(answers).items():
        metrics |= summarise_rewards(list(rows.values()), name)
        for what, cost in costs_of(answers, name).items():
            key = f"{_place(name)}/{what}"
            metrics |= {key: cost.mean, f"{key}_low": cost.low, f"{key}_high": cost.high}
    return metrics


def _place(name: str) -> str:
    return "eval" if name == "held_out" else f"eval/{name}"


def _show(name: str, metrics: dict[str, float], what: str) -> None:
    place = _place(name)
    rows = [
        [
            key.removeprefix(f"{place}/"),
            f"{value:.3f}",
            f"{metrics[f'{key}_low']:.3f} – {metrics[f'{key}_high']:.3f}",
        ]
        for key, value in metrics.items()
        if key.rpartition("/")[0] == place and f"{key}_low" in metrics
    ]
    reward = metrics.get(f"{place}/reward", float("nan"))
    say(f"{name}: {what}, {int(metrics[f'{place}/prompts'])} prompts, mean reward {reward:.3f}")
    if failed := metrics[f"{place}/errors"]:
        say(f"{failed:.1%} of the episodes failed and count as wrong")
    say_table(["metric", "value", "95 % interval"], rows)


def _data(task: str, card: TrainingCard | None) -> dict[str, Any]:
    """Questions are put to a model in the form in which it was trained; a mixture's sources have their own."""
    return {"type": task, **({"form": card.prompts} if card is not None and task != "mixture" else {})}


def _starting_point(model: str, task: str, root: Path) -> dict[str, Any]:
    """From a run: its model, task and environment. From a model: that, and the task that was named."""
    from rill.models.hub import hub_folder, is_hub_name

    is_run = Run.find(model, root=root) is not None
    if not is_run and ((Path(model) / "config.json").is_file() or is_hub_name(model)):
        if not task:
            raise UserError(
                f"{model} is a model: say what to evaluate it on with --task, such as jsonl or hub"
            )
        folder = hub_folder(model, "model", [CARD_FILE]) if is_hub_name(model) else Path(model)
        card = read_card(folder)
        arguments = dict(card.template_arguments) if card is not None else {}
        return {
            "model": {"path": model},
            "data": _data(task, card),
            "env": {"type": "single_turn", "template_arguments": arguments},
        }
    run = Run.open(model, root=root)
    trained = run.trained_model()
    saved = tomllib.loads(run.config_path.read_text(encoding="utf-8"))
    if saved.get("workflow") == "embodied":
        raise UserError(
            f"{run.name} has trained a robot's policy, which this command cannot ask: its held-out success is in its "
            f"report, and a recipe with policy_path={trained} goes on with it"
        )
    rollout = saved.get("rollout", {})
    sampling = {**rollout.get("sampling", {}), "temperature": 0.0}
    wanted = saved.get("eval", {})
    return {
        "model": {"path": str(trained)},
        "data": _data(task, read_card(trained)) if task else saved["data"],
        "env": rollout.get("env", {"type": "single_turn"}),
        "sampling": sampling,
        **({} if task else {"sets": wanted.get("sets", []), "num_prompts": wanted.get("num_prompts", 256)}),
    }
