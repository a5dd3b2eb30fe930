"""`rill plan`: which worker on which devices, in what chunks, predicted from a profile. And what `--plan` of `rill
train` means: `choose`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rill.cli.arguments import RUNS, AsJson, Root, to_write
from rill.cli.config import read_recipe, resolved_recipe
from rill.cli.console import say, say_json, say_table
from rill.config.files import RecipeValues
from rill.config.recipes import list_recipes
from rill.errors import UserError
from rill.planning.cost import Problem
from rill.planning.picture import draw
from rill.planning.pilot import Pilot
from rill.planning.plan import Plan
from rill.planning.plan import choose as choose_plan
from rill.planning.profile import Profile, merge_all
from rill.planning.profiler import find_profile
from rill.planning.recipe import (
    check_follows,
    devices_of,
    devices_on_paper,
    identity_of,
    leave_in,
    problem_of,
    profile_of,
    put_into,
    words,
)
from rill.planning.search import Found, Mode
from rill.telemetry.run import Run

if TYPE_CHECKING:
    from rill.workflows.config import OnlineConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)

NUM_ROUNDS = 2
"""Times that `rill plan` measures every size; `rill train --plan` measures once."""

Target = Annotated[
    str,
    typer.Argument(help="A recipe or a run.", metavar="RECIPE|RUN", show_default=False),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, such as cluster.devices=4.")
]
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile", "-p", help="A profile's file; several are merged. Default: the recipe is measured."
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        "--devices", "-n", help='How many: "64", or by kind, "gpu=64,cpu=128". Default: the recipe\'s.'
    ),
]
OtherOk = Annotated[
    bool, typer.Option("--other-ok", help="Take a profile of another model, machine or version of rill.")
]


@app.command()
def plan(
    target: Target,
    overrides: Overrides = None,
    profile: Profiles = None,
    devices: Devices = "",
    mode: Annotated[Mode, typer.Option(help="Which plans to look at.")] = Mode.AUTO,
    other_ok: OtherOk = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is stored.")] = False,
    graph: Annotated[
        str | None, typer.Option(help="Draw the graph instead: text or mermaid.", metavar="STYLE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan to this file.", callback=to_write)
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Write the profile that was used.", callback=to_write)
    ] = None,
    as_json: AsJson = False,
    root: Root = RUNS,
) -> None:
    """Find the fastest plan: who shares devices, who has its own, how many, in what chunks.

    \b
    Examples:
      rill plan demo cluster.devices=2                  measures the recipe for some seconds
      rill plan demo -n 64 -o plan.toml                 the same, for a machine with 64 devices
      rill train demo cluster.devices=2 --plan plan.toml
      rill plan runs/demo                               from the figures of a run
      rill plan demo -p h100.toml -n 64                 from a profile of another machine
      rill plan demo --graph mermaid                    the workflow as a picture
    """
    asked = read_question(
        target, overrides, profile, devices, is_other_ok=other_ok, is_fresh=fresh, root=root, is_quiet=as_json
    )
    if save_profile is not None:
        save_profile.write_text(asked.profile.dumps(), encoding="utf-8")
        say(f"{save_profile}: the profile of {', '.join(asked.profile.workers)}")
    if graph is not None:
        say(draw(asked.problem.graph, graph))
        return
    made, _ = asked.answer(mode)
    if out is not None:
        out.write_text(made.dumps(), encoding="utf-8")
    if as_json:
        say_json(msgspec.to_builtins(made))
    else:
        _say_plan(made, out)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `rill plan`, `rill simulate` and `rill train --plan` start with."""

    problem: Problem
    profile: Profile
    notes: Sequence[str] = ()
    """What is amiss with the profile."""

    def answer(self, mode: Mode) -> tuple[Plan, Found]:
        profile = self.profile
        return choose_plan(self.problem, mode, tried=profile.tried, basis=profile.basis(), notes=self.notes)


def read_question(
    target: str,
    overrides: Sequence[str] | None,
    profiles: Sequence[str] | None,
    devices: str,
    *,
    is_other_ok: bool,
    root: Path,
    is_fresh: bool = False,
    is_quiet: bool = False,
) -> Question:
    """From a recipe or a run, and profiles or what is measured of it."""
    used = merge_all(Profile.load(source) for source in profiles) if profiles else None
    run = _find_run(target, root)
    names = [recipe.name for recipe in list_recipes()]
    if run is None and target not in names and not Path(target).is_file():
        raise UserError(f"{target!r} is no recipe or run; the recipes are {', '.join(names)}")
    values = read_recipe(target if run is None else run.config_path, overrides)
    return of_recipe(
        values, used=used, run=run, root=root, is_other_ok=is_other_ok, is_fresh=is_fresh,
        num_devices=_counts(devices, used) if devices else None, num_rounds=NUM_ROUNDS, is_quiet=is_quiet,
    )  # fmt: skip


def of_recipe(
    values: RecipeValues,
    *,
    root: Path,
    used: Profile | None = None,
    run: Run | None = None,
    num_devices: dict[str, int] | None = None,
    num_rounds: int = 1,
    is_other_ok: bool = False,
    is_fresh: bool = False,
    is_quiet: bool = False,
) -> Question:
    """Of a recipe: with the given profile, else that of its run, else what is stored or measured now."""
    config = online_config(values)
    asked = devices_on_paper(num_devices) if num_devices is not None else None
    devices = asked if asked is not None and used is not None else devices_of(config)
    notes: list[str] = []
    if used is not None:
        mine = identity_of(config, len(devices), "")
        wanted = {name: getattr(mine, name) for name in ("version", "model")}
        notes = used.check(wanted, is_other_ok=is_other_ok)
    elif run is not None and not is_fresh:
        used = profile_of(run, config, devices)
    else:
        used = find_profile(
            config, values.provenance, devices, root=root, start=_start, num_rounds=num_rounds,
            is_fresh=is_fresh, say=(lambda _: None) if is_quiet else say,
        )  # fmt: skip
    problem = problem_of(
        config, values.provenance if run is None else {}, used, devices if asked is None else asked
    )
    if getattr(config, config.warm_up_table).steps and run is None:
        notes.append("answers were measured before the supervised steps, and may be shorter after them")
    return Question(problem=problem, profile=used, notes=notes)


def choose(plan: str, values: RecipeValues, *, root: Path) -> Callable[[Path], None]:
    """Write a plan into a recipe's values: of a file, or the best of a mode; why is said. What is returned leaves its
    files in a run folder: with the profile it rests on, the run replans."""
    config = online_config(values)
    if plan in tuple(Mode):
        asked = of_recipe(values, root=root)
        made, found = asked.answer(Mode(plan))
        leave = partial(leave_in, plan=made, problem=asked.problem, found=found, profile=asked.profile)
    elif Path(plan).is_file():
        made = Plan.load(plan)
        check_follows(made, config)
        leave = partial(leave_in, plan=made)
    else:
        raise UserError(
            f"--plan {plan!r}: write {', '.join(Mode)}, or the file of a plan (rill plan … --out)"
        )
    kept = put_into(values.values, values.provenance, made, f"plan {plan}")
    for line in [*words(made), *(f"  {line}" for line in kept)]:
        say(line)
    return leave


def _start(config: OnlineConfig, run: Run, pilot: Pilot) -> None:
    from rill.workflows import WORKFLOWS

    WORKFLOWS.load(config.workflow)(config, run, ()).run(pilot=pilot)


def online_config(values: RecipeValues) -> OnlineConfig:
    from rill.workflows.config import OnlineConfig

    config = resolved_recipe(values)
    if not isinstance(config, OnlineConfig):
        raise UserError(
            f"workflow {values.values['workflow']!r} has one group of workers: there is nothing to plan"
        )
    return config


def _say_plan(made: Plan, out: Path | None) -> None:
    say(f"{made.structure}")
    say(
        f"{made.mode}, {made.step_s:.4g} s a step (± {made.spread:.0%}), "
        f"{made.batch / max(made.step_s, 1e-12):.4g} items/s"
    )
    say()
    rows = [
        [
            name,
            placed.devices if made.devices.keys() == {placed.kind} else f"{placed.kind}: {placed.devices}",
            str(placed.parallel),
            str(placed.chunk),
            f"{placed.seconds:.4g}",
            f"{placed.memory:.0%}",
            ", ".join(placed.shares_with) + (" in turns" if placed.swaps else ""),
        ]
        for name, placed in made.workers.items()
    ]
    say_table(["worker", "devices", "parallel", "chunk", "seconds", "memory", "shares with"], rows)
    say()
    for name, placed in made.workers.items():
        if placed.basis:
            say(f"{name} rests on {placed.basis}")
    for mode, reason in made.rejected.items():
        say(f"not {mode}: {reason}")
    for note in made.notes:
        say(f"mind: {note}")
    if out is not None:
        say(f"{out}: the plan")


# --- reading what the command was given -------------------------------------------------------------------


def _find_run(target: str, root: Path) -> Run | None:
    """A folder under `root` only where no recipe has that name: `rill plan demo` is the recipe."""
    if target in [recipe.name for recipe in list_recipes()]:
        return None
    try:
        return Run.open(target, root=root)
    except UserError:
        return None


def _counts(devices: str, used: Profile | None) -> dict[str, int]:
    kinds = used.kinds() if used is not None else ["cpu"]
    counts = {}
    for part in devices.split(","):
        kind, equals, count = part.strip().rpartition("=")
        if not count.isdigit() or (not equals and len(kinds) > 1):
            raise UserError(
                f'--devices {devices!r}: write a number for each kind, such as "{",".join(f"{k}=8" for k in kinds)}"'
            )
        if (kind := kind if equals else kinds[0]) in counts:
            raise UserError(f"--devices {devices!r} names {kind} twice")
        counts[kind] = int(count)
    return counts
