"""A wish to stop (the first Ctrl-C): granted at the end of the step, which is saved; nothing is lost by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.journal.checkpoints import step_of, whole_checkpoints
from rill.telemetry.run import Run, RunStatus
from rill.workflows.loop import StepReport
from tests.e2e.tiny import EXACT, fingerprint, resume, start


@pytest.mark.slow
@pytest.mark.parametrize(
    "lag", [(), ("cluster.devices=2", "placement.rollout=0", "placement.actor=1", "loop.max_lag=1")]
)
def test_a_run_that_is_stopped_keeps_its_last_step_and_goes_on_from_it(
    tmp_path: Path, lag: tuple[str, ...]
) -> None:
    def stop(report: StepReport) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "stopped", *EXACT, *lag, "loop.checkpoint_every=0", observers=[stop])
    run = Run.open("stopped", root=tmp_path)
    assert run.state().status is RunStatus.INTERRUPTED
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [3]
    seen: list[int] = []
    resume(run, observers=[lambda report: seen.append(report.step)])
    assert seen == [4, 5, 6, 7, 8]
    if not lag:  # ahead of the trainer, what comes together in time decides
        assert fingerprint(run) == fingerprint(start(tmp_path, "whole", *EXACT, "loop.checkpoint_every=0"))
