from __future__ import annotations

import io

from rich.console import Console

from rill.cli.progress import Progress, plain_line, spark
from rill.workflows.loop import StepReport


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False)) as progress:
        progress.observe(StepReport(step=3, num_steps=9, metrics={"reward/mean": 0.25, "eval/accuracy": 0.5}))
    assert out.getvalue() == "step 3/9  reward 0.250  held-out 50.0%\n"
    assert progress.history("reward/mean") == [0.25]


def test_figures_a_workflow_does_not_report_are_left_out() -> None:
    assert plain_line(StepReport(step=1, num_steps=2, metrics={}, phase="warm-up")) == "warm-up 1/2  "


def test_a_curve_rises_from_the_lowest_bar_to_the_highest() -> None:
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([1.0, 1.0]) == "▁▁"
    assert len(spark([float(i) for i in range(1000)], width=20)) == 20


def test_on_a_terminal_the_panel_says_how_long_is_left() -> None:
    out = io.StringIO()
    now = iter([0.0, 30.0, 30.0, 30.0])
    console = Console(file=out, force_terminal=True, width=120)
    with Progress(console, clock=lambda: next(now)) as progress:
        progress.observe(StepReport(step=10, num_steps=30, metrics={"reward/mean": 0.25}))
    assert "about 1 min 0 s left" in out.getvalue()
