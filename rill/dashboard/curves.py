"""A run's main curves as one small SVG picture, for a page of documentation, a pull request or a message.

Made by `rill report RUN --svg FILE` from the run's metrics alone. The picture is a few kilobytes, holds no script and
no font, and follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rill.dashboard.figures import thinned
from rill.errors import UserError
from rill.telemetry.metrics import ACCURACY, MetricRow, accuracies, figures_of_training, read_metrics
from rill.telemetry.run import Run, write_atomically

DRAWN = (
    (ACCURACY, "held-out accuracy"),
    ("reward/mean", "reward"),
    ("length/response", "tokens per answer"),
    ("sft/loss", "loss"),
    ("reward_model/loss", "loss"),
    ("dpo/loss", "loss"),
    ("eval/loss", "held-out loss"),
)
"""Figures and their titles; those that a run does not have are left out."""
MAX_PANELS = 3
WIDTH, HEIGHT = 250, 150
LEFT, RIGHT, TOP, BOTTOM = 38, 8, 26, 20
MAX_POINTS = 120
"""Longer curves are averaged down to this many points."""

STYLE = (
    "text{font:10px system-ui,sans-serif;fill:#6b7078}.t{font-size:11px;font-weight:600;fill:#1d1f23}"
    ".g{stroke:#e3e1dc}.c{fill:none;stroke:#2f6fdb;stroke-width:1.6;stroke-linejoin:round}.d{fill:#2f6fdb}"
    "@media(prefers-color-scheme:dark){text{fill:#989da6}.t{fill:#e8e6e1}.g{stroke:#30343a}.c{stroke:#6ea3ff}.d{fill:#6ea3ff}}"
)


Points = Sequence[tuple[float, float]]
"""(step, value)"""


def write_curves(run: Run, target: Path) -> Path:
    """The picture of the run's first few figures among DRAWN."""
    curves = curves_of(read_metrics(run.path))
    if not curves:
        raise UserError(f"{run.path} has no figures to draw yet: the first comes with the first step")
    write_atomically(target, draw(curves))
    return target


def curves_of(rows: Sequence[MetricRow]) -> list[tuple[str, Points]]:
    """(title, points) of those with more than one; long ones are averaged, both ends stay as they are."""
    curves: list[tuple[str, Points]] = []
    known = figures_of_training(rows)
    sets = [name for name in accuracies(known) if name != ACCURACY]
    for name, title in (DRAWN[0], *((n, f"accuracy, {n.split('/')[1]}") for n in sets), *DRAWN[1:]):
        points = [(row.step, y) for row in rows if math.isfinite(y := row.values.get(name, math.nan))]
        if name in known and len(points) > 1:
            inner = zip(*thinned([x for x, _ in points[1:-1]], [y for _, y in points[1:-1]], MAX_POINTS - 2))
            curves.append((title, [points[0], *inner, points[-1]]))
    return curves[:MAX_PANELS]


def draw(curves: Sequence[tuple[str, Points]]) -> str:
    width = WIDTH * len(curves)
    panels = "".join(
        f'<g transform="translate({i * WIDTH} 0)">{_panel(*curve)}</g>' for i, curve in enumerate(curves)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}">'
        f"<style>{STYLE}</style>{panels}</svg>\n"
    )


def _panel(title: str, points: Points) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = _range(ys)
    first, last = min(xs), max(xs)

    def across(x: float) -> float:
        return LEFT + (x - first) / ((last - first) or 1.0) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    lines = "".join(
        f'<path class="g" d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 4}" y="{up(y) + 3:.1f}" text-anchor="end">{y:.3g}</text>'
        for y in (low, (low + high) / 2, high)
    )
    path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
    return (
        f'<text class="t" x="{LEFT}" y="13">{escape(title)}: {ys[0]:.3g} → {ys[-1]:.3g}</text>{lines}'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">{first:g}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">step {last:g}</text>'
        f'<path class="c" d="M{path}"/>'
        f'<circle class="d" cx="{across(xs[-1]):.1f}" cy="{up(ys[-1]):.1f}" r="2.5"/>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What the axis spans: 0…1 for shares, so that pictures of different runs compare; else from lowest to highest."""
    low, high = min(values), max(values)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)
