"""What a workflow would do on more devices: plan and simulate at doubling sizes, find the knee, draw it.

Called by `rill simulate`. The knee is the last doubling that still made steps at least 1.5 × as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from rill.errors import PlanError
from rill.planning.cost import Problem
from rill.planning.plan import structure_text
from rill.planning.search import Found, Mode, search
from rill.planning.simulator import Simulated, Weather, simulate

WORTH = 1.5
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the cluster."""

    devices: int
    found: Found | None
    simulated: Simulated | None
    why_not: str = ""

    @property
    def mode(self) -> str:
        return str(self.found.tree.mode) if self.found else "impossible"

    @property
    def structure(self) -> str:
        return structure_text(self.found.tree) if self.found else self.why_not


@dataclass(frozen=True, kw_only=True)
class Scaling:
    sizes: tuple[Size, ...]

    @property
    def possible(self) -> list[Size]:
        return [size for size in self.sizes if size.simulated is not None]

    def efficiency(self, size: Size) -> float:
        """Items a second and device, relative to the smallest size that has a plan."""
        first = self.possible[0]
        assert size.simulated and first.simulated
        return (size.simulated.items_per_s / size.devices) / (first.simulated.items_per_s / first.devices)

    @property
    def knee(self) -> int:
        """Devices beyond which doubling no longer pays."""
        last = self.possible[0]
        for size in self.possible[1:]:
            assert size.simulated and last.simulated
            if size.simulated.items_per_s < WORTH * last.simulated.items_per_s:
                break
            last = size
        return last.devices


def doublings(first: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def scale(
    problem: Problem,
    sizes: Sequence[int],
    *,
    mode: Mode = Mode.AUTO,
    steps: int = 5,
    seed: int = 0,
    weather: Weather | None = None,
) -> Scaling:
    """The first pool takes each size in turn; the others keep their proportion to it."""
    whole = problem.pools[0].count
    found = []
    for devices in sizes:
        pools = tuple(
            replace(pool, count=devices if i == 0 else max(1, round(pool.count * devices / whole)))
            for i, pool in enumerate(problem.pools)
        )
        at_size = replace(problem, pools=pools)
        try:
            best = search(at_size, mode)
        except PlanError as error:
            found.append(Size(devices=devices, found=None, simulated=None, why_not=str(error)))
            continue
        simulated = simulate(at_size, best.tree, steps=steps, seed=seed, weather=weather)
        found.append(Size(devices=devices, found=best, simulated=simulated))
    if not any(size.simulated for size in found):
        raise PlanError(f"no size from {sizes[0]} to {sizes[-1]} has a plan: {found[-1].why_not}")
    return Scaling(sizes=tuple(found))


def draw_svg(scaling: Scaling, title: str) -> str:
    """Above, efficiency by devices; below, the step by phase."""
    sizes = scaling.possible
    width, left, step = 120 + 72 * len(sizes), 60, 72
    phases = list(dict.fromkeys(name for size in sizes if size.simulated for name in size.simulated.busy))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(phases)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="430" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="430" fill="white"/>',
        f'<text x="{left}" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="{left}" y="36" fill="#555">efficiency against {sizes[0].devices} devices; '
        f"knee at {scaling.knee}</text>",
    ]
    points = []
    longest = max(sum(s.simulated.busy.values()) for s in sizes if s.simulated) or 1.0
    for i, size in enumerate(sizes):
        assert size.simulated
        x, efficiency = left + 36 + i * step, scaling.efficiency(size)
        y = 160 - 110 * min(1.0, efficiency)
        points.append(f"{x},{y:.1f}")
        parts.append(f'<circle cx="{x}" cy="{y:.1f}" r="3" fill="#4c78a8"/>')
        parts.append(f'<text x="{x}" y="{y - 7:.1f}" text-anchor="middle">{efficiency:.0%}</text>')
        parts.append(f'<text x="{x}" y="176" text-anchor="middle" fill="#555">{size.devices}</text>')
        bottom = 380.0
        for name, seconds in size.simulated.busy.items():
            height = 170 * seconds / longest
            bottom -= height
            parts.append(
                f'<rect x="{x - 22}" y="{bottom:.1f}" width="44" height="{height:.1f}" fill="{colour[name]}"/>'
            )
        parts.append(
            f'<text x="{x}" y="{bottom - 4:.1f}" text-anchor="middle">{size.simulated.mean_step_s:.3g} s</text>'
        )
        parts.append(f'<text x="{x}" y="394" text-anchor="middle" fill="#555">{size.mode}</text>')
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#4c78a8" stroke-width="1.5"/>')
    for i, name in enumerate(phases):
        parts.append(f'<rect x="{left + i * 90}" y="408" width="10" height="10" fill="{colour[name]}"/>')
        parts.append(f'<text x="{left + 14 + i * 90}" y="417">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
