from __future__ import annotations

from pathlib import Path

from rill.telemetry.evaluations import Answer, newest, next_path, save
from rill.telemetry.run import Run


def test_two_evaluations_at_once_have_a_file_each_and_one_that_has_not_ended_is_not_the_newest(
    tmp_path: Path,
) -> None:
    run = Run.create("r", root=tmp_path)
    first, second = next_path(run), next_path(run)
    assert (first.name, second.name, newest(run)) == ("0001.jsonl", "0002.jsonl", None)
    answer = Answer(set="held_out", prompt_id="p", prompt="2+2=", expected="4", response="4", reward=1.0)
    save(first, model="r", metrics={}, config={}, answers=[answer])
    evaluation = newest(run)
    assert evaluation is not None and evaluation.path == first
    assert evaluation.rewards() == {"held_out": {"p": [1.0]}}
