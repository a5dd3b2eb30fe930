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


def test_on_a_terminal_the_panel_says_how_long_is_left_at_the_pace_of_the_present_phase() -> None:
    out = io.StringIO()
    now_s = 0.0
    console = Console(file=out, force_terminal=True, width=120)
    with Progress(console, clock=lambda: now_s) as progress:
        now_s = 500.0
        progress.observe(StepReport(step=100, num_steps=100, metrics={}, phase="warm-up"))
        progress.observe(StepReport(step=20, num_steps=40, metrics={}))
        assert "left" not in out.getvalue()
        now_s = 530.0
        progress.observe(StepReport(step=30, num_steps=40, metrics={"reward/mean": 0.25}))
    assert "step 30/40, 8 min 50 s, about 30 s left" in out.getvalue()
