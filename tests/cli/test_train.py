from __future__ import annotations

from rill.cli.train import logged_step
from rill.workflows.loop import StepReport


def test_a_warm_up_is_logged_before_the_first_step_and_never_over_one() -> None:
    warm_up = [StepReport(step=n, num_steps=500, metrics={}, phase="warm-up") for n in (25, 500)]
    assert [logged_step(report) for report in warm_up] == [-475, 0]
    assert logged_step(StepReport(step=7, num_steps=40, metrics={})) == 7
