"""`rill plan`: which worker on which devices, in what chunks, predicted from a profile."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rill import __version__
from rill.cli.console import say, say_json, say_table
from rill.config.files import load_recipe
from rill.config.recipes import list_recipes
from rill.errors import PlanError, UserError
from rill.planning.cost import Pin, Problem
from rill.planning.graph import Edge, Graph, Node, Sync, read_history
from rill.planning.measured import profile_of_run
from rill.planning.picture import draw
from rill.planning.plan import Plan, parse_ids, plan_values
from rill.planning.profile import Profile, merge_all
from rill.planning.search import Mode, alternatives, search
from rill.telemetry.run import RUNS_FOLDER, Run

app = typer.Typer(rich_markup_mode=None, add_completion=False)

ORDER = ("env", "rollout", "reward", "reference", "teacher", "critic", "actor")
"""Workers of rill's own workflows in the order of their data, for a recipe whose run left no call records."""

Target = Annotated[str, typer.Argument(help="A run, a recipe, or a graph file.", metavar="RUN|RECIPE|GRAPH")]
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile", "-p", help="A profile's file, or a run to measure; several are merged. Default: the run."
    ),
]
Devices = Annotated[
    str, typer.Option("--devices", "-n", help='How many: "64", or by kind, "gpu=64,cpu=128".')
]
Batch = Annotated[int | None, typer.Option(help="Items of a step, where the target does not say.")]
Lag = Annotated[int, typer.Option(help="Steps that generation may be ahead of training.")]
OtherOk = Annotated[
    bool, typer.Option("--other-ok", help="Take a profile of another model, machine or version of rill.")
]
Root = Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")]


@app.command()
def plan(
    target: Target,
    profile: Profiles = None,
    devices: Devices = "",
    batch: Batch = None,
    lag: Lag = 0,
    mode: Annotated[Mode, typer.Option(help="Which plans to look at.")] = Mode.AUTO,
    min_chunk: Annotated[int, typer.Option(help="Fewest items that may pass at a time: a group's size.")] = 1,
    pin: Annotated[
        list[str] | None, typer.Option(help='What is decided already: "actor=0-7", "rollout=gpu:16".')
    ] = None,
    other_ok: OtherOk = False,
    graph: Annotated[
        str | None, typer.Option(help="Draw the graph instead: text, dot or mermaid.", metavar="STYLE")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this file.")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write the profile that was used.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    root: Root = Path(RUNS_FOLDER),
) -> None:
    """Find the fastest plan: who shares devices, who has its own, how many, in what chunks.

    \b
    Examples:
      rill plan demo --devices 4                        from the figures of the run "demo"
      rill plan demo --save-profile demo.profile.toml   what was measured, as a file
      rill plan grpo.graph.toml -p h100.toml -n 64 -o plan.toml
      rill plan demo --graph mermaid                    the workflow as a picture
    """
    if graph is not None and not profile and _is_graph_file(target):
        say(draw(Graph.load(target).collapsed(), graph))
        return
    problem, used, notes = read_problem(
        target,
        profile,
        devices,
        batch,
        lag,
        is_other_ok=other_ok,
        root=root,
        min_chunk=min_chunk,
        pins=pin or (),
    )
    if save_profile is not None:
        save_profile.write_text(used.dumps(), encoding="utf-8")
        say(f"{save_profile}: the profile of {', '.join(used.workers)}")
    if graph is not None:
        say(draw(problem.graph, graph))
        return
    best = search(problem, mode)
    made = Plan.of(
        problem,
        best,
        others=alternatives(problem, best) if mode is Mode.AUTO else (),
        basis=used.basis(),
        notes=notes,
    )
    if out is not None:
        out.write_text(made.dumps(), encoding="utf-8")
    if as_json:
        say_json(plan_values(made))
    else:
        _say_plan(made, out)


def read_problem(
    target: str,
    profiles: Sequence[str] | None,
    devices: str,
    batch: int | None,
    lag: int,
    *,
    is_other_ok: bool,
    root: Path,
    min_chunk: int = 1,
    pins: Sequence[str] = (),
) -> tuple[Problem, Profile, list[str]]:
    """What `rill plan` and `rill simulate` start with: the problem, its profile, and what is amiss with that."""
    run = None if _is_graph_file(target) else _find_run(target, root)
    if not profiles and run is None:
        raise UserError(f"{target} is no run in {root}/: give a profile (--profile FILE), or run it first")
    used = merge_all(_profile(source, root) for source in (profiles or [target]))
    graph, model = _graph_of(target, run, used, batch)
    wanted = {"version": __version__} | ({"model": model} if model else {})
    notes = used.check(wanted, is_other_ok=is_other_ok)
    problem = Problem(
        graph=graph,
        workers=used.costs(),
        pools=used.pools(_counts(devices, used)),
        min_chunk=min_chunk,
        lag=lag,
        pins=dict(_pin(text) for text in pins),
    )
    return problem, used, notes


def _say_plan(made: Plan, out: Path | None) -> None:
    say(f"{made.structure}")
    say(
        f"{made.mode}, {made.step_s:.4g} s a step (± {made.spread:.0%}), {made.batch / made.step_s:.4g} items/s"
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


def _is_graph_file(target: str) -> bool:
    path = Path(target)
    if path.suffix != ".toml" or not path.is_file():
        return False
    try:
        return "nodes" in tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"cannot read {target}: {error}") from None


def _find_run(target: str, root: Path) -> Run | None:
    try:
        return Run.open(target, root=root)
    except UserError:
        return None


def _profile(source: str, root: Path) -> Profile:
    if Path(source).is_file():
        return Profile.load(source)
    return profile_of_run(Run.open(source, root=root))


def _graph_of(target: str, run: Run | None, used: Profile, batch: int | None) -> tuple[Graph, str]:
    """The graph without cycles, and the model that the target names ("" where it names none)."""
    if _is_graph_file(target):
        graph = Graph.load(target)
        return (graph if batch is None else _with_batch(graph, batch)).collapsed(), ""
    if run is not None:
        if calls := read_history(run.path):
            return Graph.from_calls(calls, batch=batch).collapsed(), profile_of_run(run).identity.model
        values: Mapping[str, Any] = tomllib.loads(run.config_path.read_text(encoding="utf-8"))
        model = profile_of_run(run).identity.model
    else:
        names = [recipe.name for recipe in list_recipes()]
        if target not in names and not Path(target).is_file():
            raise UserError(f"{target!r} is no run, recipe or graph file; the recipes are {', '.join(names)}")
        values, model = load_recipe(target).values, ""
    return _chain(used, batch or _recipe_batch(values)), model


def _chain(used: Profile, batch: int) -> Graph:
    """rill's own workflows pass items from worker to worker in one order."""
    known = {name: ORDER.index(name.split(".")[0]) for name in used.workers if name.split(".")[0] in ORDER}
    names = sorted(known, key=known.__getitem__)
    if not names:
        raise UserError(
            f"the profile's workers ({', '.join(used.workers)}) are of no workflow of rill's: give a graph file"
        )
    edges = tuple(Edge(source=a, target=b) for a, b in zip(names, names[1:]))
    ends = {name.split(".")[0]: name for name in names}
    syncs = (
        (Sync(source=ends["actor"], target=ends["rollout"]),) if {"actor", "rollout"} <= ends.keys() else ()
    )
    return Graph(nodes=tuple(Node(name=name) for name in names), edges=edges, syncs=syncs, batch=batch)


def _recipe_batch(values: Mapping[str, Any]) -> int:
    groups = values.get("loop", {}).get("prompts_per_step")
    size = values.get("rollout", {}).get("group_size")
    if not groups or not size:
        raise UserError("the recipe does not say how many samples a step has: give --batch")
    return int(groups) * int(size)


def _with_batch(graph: Graph, batch: int) -> Graph:
    return Graph(nodes=graph.nodes, edges=graph.edges, syncs=graph.syncs, batch=batch)


def _counts(devices: str, used: Profile) -> dict[str, int]:
    kinds = used.kinds()
    if not devices:
        raise UserError('how many devices? Give --devices 8, or --devices "gpu=64,cpu=128"')
    counts = {}
    for part in devices.split(","):
        kind, equals, number = part.strip().rpartition("=")
        if not number.isdigit() or (not equals and len(kinds) > 1):
            raise UserError(
                f'--devices {devices!r}: write a number for each kind, such as "{",".join(f"{k}=8" for k in kinds)}"'
            )
        counts[kind if equals else kinds[0]] = int(number)
    return counts


def _pin(text: str) -> tuple[str, Pin]:
    worker, equals, what = text.partition("=")
    if not equals:
        raise UserError(
            f'--pin {text!r}: write WORKER=IDS ("actor=0-7") or WORKER=KIND:COUNT ("rollout=gpu:16")'
        )
    kind, colon, count = what.partition(":")
    if colon and count.isdigit():
        return worker, Pin(kind=kind, devices=int(count))
    return worker, Pin(ids=parse_ids(what))
