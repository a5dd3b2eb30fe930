"""`rill simulate`: what a workflow would cost on a cluster of any size, in which mode, and where more stops paying."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rill.cli.arguments import RUNS, AsJson, Root, to_write
from rill.cli.console import say, say_json, say_table
from rill.cli.plan import Devices, OtherOk, Overrides, Profiles, Target, read_question
from rill.errors import UserError
from rill.planning.plan import Plan
from rill.planning.price import price
from rill.planning.scaling import Scaling, doublings, draw_svg, scale
from rill.planning.search import Mode
from rill.planning.simulator import Weather, simulate

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(name="simulate")
def simulate_command(
    target: Target,
    overrides: Overrides = None,
    profile: Profiles = None,
    devices: Devices = "",
    first: Annotated[
        int,
        typer.Option("--from", min=0, help="The smallest size; sizes double from there. 0: 8, or 1 up to 8."),
    ] = 0,
    mode: Annotated[Mode, typer.Option(help="Which plans to look at.")] = Mode.AUTO,
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of searching for one.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate at each size.")] = 5,
    seed: Annotated[int, typer.Option(help="Of lengths, failures and stragglers.")] = 0,
    failures_per_hour: Annotated[float, typer.Option(help="Of one device.")] = 0.0,
    repair_s: Annotated[float, typer.Option(help="Until a failed device is back.")] = 300.0,
    slow: Annotated[str, typer.Option(help='Stragglers as SHARE:FACTOR, such as "0.01:1.5".')] = "0:1",
    jitter: Annotated[float, typer.Option(help="Relative deviation of every chunk's time.")] = 0.0,
    other_ok: OtherOk = False,
    svg: Annotated[
        Path | None,
        typer.Option(help="Draw efficiency and time by phase into this file.", callback=to_write),
    ] = None,
    as_json: AsJson = False,
    root: Root = RUNS,
) -> None:
    """Simulate steps on clusters from a few devices to --devices, each with its best plan.

    \b
    Examples:
      rill simulate runs/demo --devices 64                 from the figures of the run "demo"
      rill simulate demo cluster.devices=2 -n 64           measures the recipe on two devices first
      rill simulate demo -p h100.toml -n 1024 --svg scaling.svg
      rill simulate demo -p h100.toml -n 256 --failures-per-hour 0.001 --slow 0.01:1.5
    """
    asked = read_question(
        target, overrides, profile, devices, is_other_ok=other_ok, root=root, is_quiet=as_json
    )
    problem, notes = asked.problem, asked.notes
    slow_share, slow_factor = _slow(slow)
    weather = Weather(
        failures_per_hour=failures_per_hour,
        repair_s=repair_s,
        jitter=jitter,
        slow_share=slow_share,
        slow_factor=slow_factor,
    )
    if plan is not None:
        tree = price(problem, Plan.load(plan).tree(problem.graph)).tree
        done = simulate(problem, tree, steps=steps, seed=seed, weather=weather)
        if as_json:
            say_json(asdict(done))
        else:
            say(
                f"{done.mean_step_s:.4g} s a step, {done.items_per_s:.4g} items/s, {done.num_failures} failures"
            )
            say_table(["phase", "seconds a step"], [[name, f"{s:.4g}"] for name, s in done.busy.items()])
        return
    largest = problem.pools[0].count
    scaling = scale(
        problem,
        doublings(first or (8 if largest > 8 else 1), largest),
        mode=mode,
        steps=steps,
        seed=seed,
        weather=weather,
    )
    if svg is not None:
        svg.write_text(draw_svg(scaling, f"{target} on {problem.pools[0].kind}"), encoding="utf-8")
    if as_json:
        say_json(_values(scaling))
        return
    _say_scaling(scaling)
    for note in notes:
        say(f"mind: {note}")
    if svg is not None:
        say(f"{svg}: efficiency and time by phase")


def _say_scaling(scaling: Scaling) -> None:
    rows = []
    for size in scaling.sizes:
        if size.found is None or size.simulated is None:
            rows.append([str(size.devices), "impossible", "", "", "", "", size.why_not])
            continue
        efficiency = scaling.efficiency(size)
        rows.append(
            [
                str(size.devices),
                size.mode,
                f"{size.found.step_s:.4g}",
                f"{size.simulated.mean_step_s:.4g}",
                f"{size.simulated.items_per_s:.4g}",
                f"{efficiency:>4.0%} {'█' * round(20 * min(1.0, efficiency))}",
                size.structure,
            ]
        )
    say_table(["devices", "mode", "predicted s", "simulated s", "items/s", "efficiency", "plan"], rows)
    if len(scaling.possible) == 1:
        say(f"one size has a plan, {scaling.knee}: give more --devices, or a smaller --from, to see a knee")
    elif scaling.knee == scaling.possible[-1].devices:
        say(f"no knee up to {scaling.knee} devices: every doubling makes steps at least 1.5 × as fast")
    else:
        say(f"the knee is at {scaling.knee} devices: the next doubling makes steps less than 1.5 × as fast")


def _values(scaling: Scaling) -> dict[str, object]:
    sizes = [
        {
            "devices": size.devices,
            "mode": size.mode,
            "plan": size.structure,
            "predicted_step_s": size.found.step_s if size.found else None,
            "step_s": size.simulated.mean_step_s if size.simulated else None,
            "items_per_s": size.simulated.items_per_s if size.simulated else None,
            "efficiency": scaling.efficiency(size) if size.simulated else None,
            "phases_s": size.simulated.busy if size.simulated else {},
        }
        for size in scaling.sizes
    ]
    return {"sizes": sizes, "knee": scaling.knee}


def _slow(text: str) -> tuple[float, float]:
    share, colon, factor = text.partition(":")
    try:
        return float(share), float(factor) if colon else 1.5
    except ValueError:
        raise UserError(f'--slow {text!r}: write SHARE:FACTOR, such as "0.01:1.5"') from None
