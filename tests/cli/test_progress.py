from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rill.cli.progress import Progress, curve_lines, duration, history_of, plain_line, spark
from rill.telemetry.metrics import MetricRow
from rill.workflows.loop import StepReport


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False)) as progress:
        progress.observe(StepReport(step=3, num_steps=9, metrics={"reward/mean": 0.25, "eval/accuracy": 0.5}))
    assert out.getvalue() == "step 3/9  reward 0.250  held-out 50.0%\n"


def test_whoever_closes_the_pipe_ends_no_run() -> None:
    program = (
        "import sys; from rill.cli.progress import Screen\n"
        "sys.stdin.read()\n"
        "for n in range(3): Screen().print(n)\n"
        "sys.stderr.write('it goes on')"
    )
    read, write = os.pipe()
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    os.close(read)  # nobody reads any more, and only then does it write
    assert running.communicate("", timeout=120)[1] == "it goes on"
    assert running.returncode == 0


def test_figures_a_workflow_does_not_report_are_left_out() -> None:
    assert plain_line(StepReport(step=1, num_steps=2, metrics={}, phase="warm-up")) == "warm-up 1/2  "


def test_a_curve_rises_from_the_lowest_bar_to_the_highest() -> None:
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([1.0, 1.0]) == "▁▁"
    assert spark([0.0, float("nan"), 1.0, float("inf")]) == "▁ █ " and spark([float("nan")]) == " "
    assert len(spark([float(i) for i in range(1000)], width=20)) == 20
    assert spark([0.0, float("nan"), 1.0, 1.0], width=2) == "▁█", "one step that was skipped leaves no gap"


def test_a_loss_of_the_warm_up_or_of_a_skipped_step_is_not_the_runs() -> None:
    nan = float("nan")
    steps = [(-1, {"sft/loss": 0.9}), (0, {"sft/loss": 0.3}), (0, {"eval/accuracy": 0.2})]
    warm_up = [MetricRow(step=step, time_s=0.0, values=values) for step, values in steps]
    assert curve_lines(history_of(warm_up[:2]))[0].startswith("loss            0.9000 → 0.3000")
    rl = [*warm_up, MetricRow(step=1, time_s=0.0, values={"reward/mean": 0.5, "eval/accuracy": 0.4})]
    assert [line.split("  ")[0] for line in curve_lines(history_of(rl))] == ["reward", "held-out"]
    assert "20.0% → 40.0%" in curve_lines(history_of(rl))[1]
    losses = [nan, 0.5, 0.25, nan]
    sft = [MetricRow(step=n + 1, time_s=0.0, values={"sft/loss": loss}) for n, loss in enumerate(losses)]
    assert curve_lines(history_of(sft)) == ["loss            0.5000 → 0.2500   █▁ "]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Progress(console, clock=lambda: 0.0) as progress:
        for row in sft:
            progress.observe(StepReport(step=row.step, num_steps=4, metrics=row.values))
    assert "0.2500" in drawn(console) and "nan" not in drawn(console).splitlines()[-3]


def drawn(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_on_a_terminal_the_panel_says_how_long_is_left_at_the_pace_of_the_present_phase() -> None:
    now_s = 0.0
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console, clock=lambda: now_s) as progress:
        now_s = 500.0
        progress.observe(StepReport(step=100, num_steps=100, metrics={}, phase="warm-up"))
        progress.observe(StepReport(step=20, num_steps=40, metrics={}))
        assert "left" not in drawn(console)
        now_s = 530.0
        progress.observe(StepReport(step=30, num_steps=40, metrics={"reward/mean": 0.25}))
    assert "step 30/40" in drawn(console)
    assert "8 min 50 s, about 30 s left" in drawn(console)


def test_before_the_first_report_the_panel_says_what_is_waited_for() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Progress(console, clock=lambda: 0.0):
        pass
    assert "starting the workers" in drawn(console)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_is_cut_off_on_any_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    figures = {
        "reward/mean": 0.123,
        "eval/accuracy": 1.0,
        "length/response": 1031.5,
        "throughput/sampled_tokens_per_s": 12345.0,
        "mismatch/abs_mean": 9.4e-8,
        "time/train_s": 1.25,
    }
    with Progress(console, clock=lambda: 0.0) as progress:
        for number in range(100):
            progress.observe(StepReport(step=number, num_steps=100, metrics=figures))
    for value in ("0.123", "100.0%", "1031.5", "12,345", "9.4e-08", "1.25 s", "step 99/100"):
        assert value in drawn(console)
    assert "…" not in drawn(console).replace("workers …", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (185, "3 min 5 s"), (7620, "2 h 7 min"), (273_600, "3 d 4 h"), (-1, "0 s")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_evaluation_sets_with_a_name_are_shown_beside_the_held_out_side() -> None:
    metrics = {
        "reward/mean": 0.5,
        "eval/accuracy": 0.5,
        "eval/gsm8k/accuracy": 0.25,
        "eval/gsm8k/accuracy_low": 0.2,
    }
    report = StepReport(step=1, num_steps=2, metrics=metrics)
    assert plain_line(report).startswith("step 1/2  reward 0.500  held-out 50.0%  gsm8k 25.0%")
    assert any(line.startswith("gsm8k ") for line in curve_lines({"eval/gsm8k/accuracy": [0.1, 0.25]}))
