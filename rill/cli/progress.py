"""What `rill train` shows while it runs: a live panel on a terminal, a line a step elsewhere.

An observer of the loop: it is called after every step with the step's figures and never touches the workers. On a
terminal the panel is drawn again four times a second, so that its clock goes on while a step takes long:

    step 23/40 ━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━ 41 s, about 18 s left

           reward  0.844  ▂▁▂▂▂▂▃▂▃▄▄▄▅▅▆▅▆▇▆▆▇▇▇  from 0.328
         held-out 100.0%  ▁██                       from 18.4%
    tokens/answer   30.8  ▁▁▂▁▂▂▂▃▃▄▄▅▅▆▆▇▇▇▇▇▇██  from 14.5
          entropy  0.035  █▇▇▆▆▅▄▄▃▃▂▂▂▁▁▁▁▁▁▁▁▁▁  from 0.303

    a step: rollout 0.39 s, train 0.46 s, sync 0.02 s     tokens/s 11,402   mismatch 9.5e-08   lag 0
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rill.telemetry.metrics import ACCURACY, MetricRow, accuracies, figures_of_training, mean

if TYPE_CHECKING:
    from rill.workflows.loop import StepReport

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60

Figure = tuple[str, str, str]
"""Its name, what a person calls it, how it is written."""

CURVES: tuple[Figure, ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    (ACCURACY, "held-out", "{:.1%}"),
    ("length/response", "tokens/answer", "{:.1f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("reward_model/loss", "loss", "{:.4f}"),
    ("dpo/loss", "loss", "{:.4f}"),
    ("bc/loss", "loss", "{:.4f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
)
"""Drawn over the whole run."""

PHASES: tuple[Figure, ...] = (
    ("time/rollout_wait_s", "rollout", "{:.2f} s"),
    ("time/train_s", "train", "{:.2f} s"),
    ("time/sync_s", "sync", "{:.2f} s"),
)
"""What a step's time goes to."""

STATES: tuple[Figure, ...] = (
    ("throughput/sampled_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("throughput/actions_per_s", "actions/s", "{:,.0f}"),
    ("sft/train_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("reward_model/train_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("dpo/train_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("mismatch/abs_mean", "mismatch", "{:.1e}"),
    ("lag/max", "lag", "{:.0f}"),
)
"""The latest values."""


class Screen(Console):
    """Standard output, as long as somebody reads it: whoever closes the pipe (`| head`) ends no run."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Use as a context manager; `observe` is the loop's observer.

    >>> with Progress(Screen()) as progress:
    ...     workflow = Workflow(config, run, [progress.observe])
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._pace: tuple[str, int, float] | None = None
        self._latest: dict[str, float] = {}
        self._history: dict[str, list[float]] = {}
        self._report: StepReport | None = None
        self._live = (
            Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def observe(self, report: StepReport) -> None:
        if self._pace is None or self._pace[0] != report.phase:
            self._pace = (report.phase, report.step, self._clock())
            self._latest, self._history = {}, {}  # a warm-up's figures say nothing once RL has begun
        self._report = report
        self._latest.update(report.metrics)
        for name, _, _ in CURVES:
            if name in report.metrics:
                self._history.setdefault(name, []).append(report.metrics[name])
        if self._live is None:
            self._console.print(plain_line(report), soft_wrap=True, highlight=False)
        else:
            self._live.refresh()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays, above the live panel."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    @property
    def has_reports(self) -> bool:
        return self._report is not None

    def _panel(self) -> RenderableType:
        elapsed_s = self._clock() - self._began
        if self._report is None:
            return Text(f"starting the workers … {duration(elapsed_s)}", style="bold")
        lines: list[RenderableType] = [self._head(self._report, elapsed_s), Text(), self._curves()]
        if states := self._states():
            lines += [Text(), Columns(states, padding=(0, 3))]
        return Group(*lines)

    def _head(self, report: StepReport, elapsed_s: float) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=report.num_steps, completed=report.step)
        times = f"{duration(elapsed_s)}{self._left(report)}"
        head.add_row(Text(f"{report.phase} {report.step}/{report.num_steps}", style="bold"), bar, Text(times))
        return head

    def _curves(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        width = max(3, min(CURVE_WIDTH, self._console.width - 42))
        for name, label, form in curves_of(self._latest):
            if name in self._latest:
                values = self._history[name]
                first, last = _ends(values)
                table.add_row(label, form.format(last), spark(values, width), f"from {form.format(first)}")
        return table

    def _states(self) -> list[Text]:
        written = [
            Text.assemble((f"{label} ", "dim"), form.format(self._latest[name]))
            for name, label, form in STATES
            if name in self._latest
        ]
        phases = _written(PHASES, self._latest, ", ")
        return [Text.assemble(("a step: ", "dim"), phases), *written] if phases else written

    def _left(self, report: StepReport) -> str:
        """By the pace since the phase's first report: a warm-up, or the steps before a resume, say nothing about it."""
        assert self._pace is not None
        _, first_step, began_s = self._pace
        done, left = report.step - first_step, report.num_steps - report.step
        if done <= 0 or left <= 0:
            return ""
        return f", about {duration((self._clock() - began_s) / done * left)} left"


def curves_of(known: Iterable[str]) -> list[Figure]:
    """CURVES, and behind the held-out accuracy that of every evaluation set with a name."""
    named = [name for name in accuracies(known) if name != ACCURACY]
    sets: list[Figure] = [(name, name.split("/")[1], "{:.1%}") for name in named]
    at = 1 + next(n for n, (name, _, _) in enumerate(CURVES) if name == ACCURACY)
    return [*CURVES[:at], *sets, *CURVES[at:]]


def plain_line(report: StepReport) -> str:
    """One step as one line, for logs."""
    figures = (*curves_of(report.metrics), *STATES, *PHASES)
    return f"{report.phase} {report.step}/{report.num_steps}  {_written(figures, report.metrics)}"


def history_of(rows: Sequence[MetricRow]) -> dict[str, list[float]]:
    """Every figure of training over the run, those of before a resume too."""
    return {
        name: [row.values[name] for row in rows if name in row.values] for name in figures_of_training(rows)
    }


def curve_lines(history: Mapping[str, list[float]]) -> list[str]:
    """The main figures from first to last, one line each, aligned."""
    return [
        f"{label:<14} {form.format(ends[0]):>7} → {form.format(ends[1]):<7} {spark(values)}"
        for name, label, form in curves_of(history)
        if (values := history.get(name)) and (ends := _ends(values))
    ]


def spark(values: list[float], width: int = CURVE_WIDTH) -> str:
    """A curve in one line of characters; averages where there are more values than characters. What is not a number,
    the loss of a step that was skipped, is a gap."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [mean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The first and the last that are numbers, where there are any."""
    finite = [value for value in values if math.isfinite(value)] or values
    return finite[0], finite[-1]


def _written(figures: tuple[Figure, ...], values: Mapping[str, float], between: str = "  ") -> str:
    return between.join(
        f"{label} {form.format(values[name])}" for name, label, form in figures if name in values
    )


def duration(seconds: float) -> str:
    """For people: 41 s, 3 min 5 s, 2 h 7 min, 3 d 4 h."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
