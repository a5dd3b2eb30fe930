from __future__ import annotations

from pathlib import Path

from rill.dashboard.card import UNKNOWN, run_card
from rill.dashboard.figures import Figures
from rill.telemetry.metrics import MetricLog, read_metrics


def card(folder: Path, config: dict[str, object], starts: list[object]) -> list[str]:
    figures = Figures(rows=read_metrics(folder))
    return [row["answer"] for row in run_card(config, starts, figures)]


def test_the_nine_questions_are_answered_from_the_files(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.write(
            1, {"time/train_s": 3.0, "time/rollout_wait_s": 1.0, "mismatch/abs_mean": 1e-7, "lag/max": 2.0}
        )
    config = {
        "rollout": {"engine": {"type": "native"}, "group_size": 8, "sampling": {"max_new_tokens": 40}},
        "placement": {"rollout": "0", "actor": "1"},
        "trainer": {"compute_dtype": "bfloat16"},
        "sync": {"canary": True},
        "loop": {"max_lag": 2, "prompts_per_step": 4},
        "algorithm": {"type": "grpo", "correction": {"type": "tis"}},
        "cluster": {"devices": 2},
        "model": {"shape": {"hidden_size": 8}},
    }  # fmt: skip
    starts = [{"versions": {"rill": "0.1.0"}, "git": {"commit": "abcdef0123456789", "has_changes": True}}]
    answers = card(tmp_path, config, starts)
    for part, answer in zip(
        ["rill 0.1.0, commit abcdef012345 with changes", "rollout on 0, actor on 1", "canary after every sync on",
         "asynchronous, max_lag 2; correction tis; largest lag of the last step 2", "yes", "no experts",
         "8 samples a prompt, 4 prompts a step", "at most 40 new tokens", "4.00 s a step on 2 devices: training 75%"],
        answers, strict=True,
    ):  # fmt: skip
        assert part in answer


def test_what_the_files_do_not_hold_is_said_to_be_unknown(tmp_path: Path) -> None:
    assert card(tmp_path, {}, []) == [UNKNOWN] * 9
    assert card(tmp_path, {"rollout": "odd"}, ["odd"]) == [UNKNOWN] * 9
