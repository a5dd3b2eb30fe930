"""`rill push`: a model to the Hugging Face hub, with a page that says how it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rill.cli.console import say, waiting
from rill.errors import UserError
from rill.models.card import TrainingCard, read_card
from rill.telemetry.run import Run

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def push(
    model: Annotated[str, typer.Argument(help="A run (its trained model), or a model's folder.")],
    name: Annotated[str, typer.Argument(help="OWNER/NAME on the hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
) -> None:
    """Upload a model. Needs HF_TOKEN, or `hf auth login`. A README.md that lies in the folder is kept.

    \b
    Example:
      rill push demo me/three-digit-sums
    """
    run = Run.find(model)
    folder = Path(model) if run is None else run.trained_model()
    if not (folder / "config.json").is_file():
        if not folder.exists():
            Run.open(model)  # tells the runs there are
        raise UserError(f"{model} is neither a run nor the folder of a model")
    card = read_card(folder)
    page = folder / "README.md"
    if card is not None and not page.exists():
        page.write_text(page_of(card, _accuracies(run)), encoding="utf-8")
    with waiting("uploading"):
        from rill.models.hub import push_folder

        url = push_folder(folder, name, private=not public, message=f"rill {card.run if card else model}")
    say(url)


def page_of(card: TrainingCard, accuracies: dict[str, str]) -> str:
    """A model page: the hub reads the block at its head, people read the rest."""
    head = ["---", "library_name: transformers", f"tags: [rill, {card.workflow}]"]
    if "/" in card.base_model and not Path(card.base_model).exists():
        head.append(f"base_model: {card.base_model.partition('@')[0]}")
    form = "as plain text, without a chat template" if card.prompts == "bare" else "through its chat template"
    lines = [
        *head,
        "---",
        f"# {card.run}",
        "",
        f"Trained with rill ({card.workflow}). It was asked {form}, for instance:",
        "",
        *(f"    {line}" for line in card.example.splitlines()),
        *(["", "| evaluation | accuracy, 95 % interval |", "|---|---|"] if accuracies else []),
        *(f"| {name} | {value} |" for name, value in accuracies.items()),
    ]
    return "\n".join(lines) + "\n"


def _accuracies(run: Run | None) -> dict[str, str]:
    """Of the run's newest evaluation, by set."""
    from rill.telemetry.evaluations import newest

    evaluation = newest(run) if run is not None else None
    metrics = evaluation.metrics if evaluation is not None else {}
    return {
        key.removesuffix("/accuracy").removeprefix("eval/").replace("eval", "held_out"): (
            f"{value:.1%} ({metrics[f'{key}_low']:.1%} – {metrics[f'{key}_high']:.1%})"
        )
        for key, value in metrics.items()
        if key.endswith("/accuracy")
    }
