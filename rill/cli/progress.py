"""What `rill train` shows while it runs: a live panel on a terminal, a line a step elsewhere.

An observer of the loop: it is called after every step with the step's figures and never touches the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rill.workflows.loop import StepReport

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/accuracy", "held-out", "{:.1%}"),
    ("length/response", "tokens/answer", "{:.1f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("mismatch/abs_mean", "mismatch", "{:.2e}"),
    ("lag/max", "lag", "{:.0f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("time/rollout_wait_s", "rollout s", "{:.2f}"),
    ("time/train_s", "train s", "{:.2f}"),
    ("time/sync_s", "sync s", "{:.2f}"),
    ("warmup/loss", "warm-up loss", "{:.3f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("sft/train_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
)
"""Figure, what a person calls it, how it is written."""


class Progress:
    """Use as a context manager; `observe` is the loop's observer.

    >>> with Progress(Console()) as progress:
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
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )

    def observe(self, report: StepReport) -> None:
        self._report = report
        if self._pace is None or self._pace[0] != report.phase:
            self._pace = (report.phase, report.step, self._clock())
        self._latest.update(report.metrics)
        for name in ("reward/mean", "eval/accuracy"):
            if name in report.metrics:
                self._history.setdefault(name, []).append(report.metrics[name])
        if self._live is None:
            self._console.print(plain_line(report), soft_wrap=True, highlight=False)
        else:
            self._live.update(self._panel())

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays, above the live panel."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def curve(self, name: str) -> str:
        """The figure's history as one line of bars."""
        return spark(self._history.get(name, []))

    def history(self, name: str) -> list[float]:
        return self._history.get(name, [])

    def _panel(self) -> RenderableType:
        assert self._report is not None
        table = Table(box=None, pad_edge=False, header_style="dim")
        shown = [row for row in SHOWN if row[0] in self._latest]
        for _, label, _ in shown:
            table.add_column(label, justify="right")
        table.add_row(*(form.format(self._latest[name]) for name, _, form in shown))
        now_s = self._clock()
        head = Text(
            f"{self._report.phase} {self._report.step}/{self._report.num_steps}, "
            f"{_duration(now_s - self._began)}{self._left(now_s)}",
            style="bold",
        )
        lines: list[RenderableType] = [head, table]
        for name, values in self._history.items():
            lines.append(Text(f"{name:>14} {spark(values)} {values[0]:.2f} → {values[-1]:.2f}"))
        return Group(*lines)

    def _left(self, now_s: float) -> str:
        """By the pace since the phase's first report: a warm-up, or the steps before a resume, say nothing about it."""
        assert self._report is not None and self._pace is not None
        _, first_step, began_s = self._pace
        done, left = self._report.step - first_step, self._report.num_steps - self._report.step
        return f", about {_duration((now_s - began_s) / done * left)} left" if done > 0 and left > 0 else ""


def plain_line(report: StepReport) -> str:
    """One step as one line, for logs."""
    figures = "  ".join(
        f"{label} {form.format(report.metrics[name])}"
        for name, label, form in SHOWN
        if name in report.metrics
    )
    return f"{report.phase} {report.step}/{report.num_steps}  {figures}"


def spark(values: list[float], width: int = CURVE_WIDTH) -> str:
    """A curve in one line of characters; averages where there are more values than characters."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
