"""A failing or hanging reward is data."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from rill.envs.rewards.base import REWARDS
from rill.envs.rewards.runner import RewardRunner, Score, ScoringConfig
from rill.types import Prompt, Trajectory, Turn

# --- user functions that the runner is pointed at -----------------------------------------------------------


def length(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    return float(len(text))


def raises(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    raise KeyError("no such thing")


def hangs(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    while True:
        pass


def sleeps(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    time.sleep(30)
    return 1.0


def not_a_number(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    return float("nan")


def a_text(prompt: Prompt, text: str, trajectory: Trajectory) -> str:
    return "1.0"


def nothing(prompt: Prompt, text: str, trajectory: Trajectory) -> None:
    return None


def a_coroutine(prompt: Prompt, text: str, trajectory: Trajectory) -> Any:
    return later(prompt, text, trajectory)


def leaves(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    sys.exit("no more")


def times_out(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    raise TimeoutError("the shop is closed")


def too_few(prompt: Prompt, text: str) -> float:
    return 1.0


def hungry(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    return float(len(bytearray(2**30)))


def stops_afterwards(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return 1.0


def dies(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    os._exit(3)


def prints(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    print("this must not reach the answer pipe")
    return 2.0


async def later(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    await asyncio.sleep(0.01)
    return 0.5


running = most_running = 0


async def counts_itself(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    global running, most_running
    running += 1
    most_running = max(most_running, running)
    await asyncio.sleep(0.01)
    running -= 1
    return 1.0


async def never(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    await asyncio.sleep(60)
    return 1.0


def meets_others(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    folder = Path(prompt.metadata["folder"])
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.02)
    return 1.0


PROMPT = Prompt(id="p", text="2+2=", answer="4")


def answered(text: str) -> Trajectory:
    return Trajectory(
        id="t",
        group_id="g",
        prompt_id="p",
        token_ids=np.array([1, 2], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        versions=np.array([-1, 0], dtype=np.int32),
        loss_mask=np.array([False, True]),
        turn_ids=np.array([0, 1], dtype=np.int32),
        turns=(
            Turn(index=0, role="prompt", start=0, end=1),
            Turn(index=1, role="assistant", start=1, end=2, text=text),
        ),
    )


def score_all(runner: RewardRunner, pairs: Sequence[tuple[Prompt, Trajectory]]) -> list[Score]:
    async def gather() -> list[Score]:
        return list(await asyncio.gather(*(runner.score(prompt, t) for prompt, t in pairs)))

    return asyncio.run(gather())


def config(value: dict[str, Any]) -> Any:
    return REWARDS.load(value["type"]).Config.model_validate(value)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": f"tests.envs.test_runner:{name}", **more}


@pytest.fixture
def run() -> Iterator[Any]:
    runners: list[RewardRunner] = []

    def run(reward: dict[str, Any], text: str = "4", **scoring: Any) -> tuple[Score, RewardRunner]:
        runner = RewardRunner(config(reward), ScoringConfig(**{"timeout_s": 20.0, **scoring}))
        runners.append(runner)
        return score_all(runner, [(PROMPT, answered(text))])[0], runner

    yield run
    for runner in runners:
        runner.close()


def test_a_mix_is_the_weighted_sum_and_reports_its_parts(run: Any) -> None:
    mix = {
        "type": "mix",
        "terms": [
            {"reward": {"type": "exact"}, "weight": 1.0},
            {"reward": {"type": "format", "shape": "number"}, "weight": 0.25},
            {
                "reward": {"type": "mix", "terms": [{"reward": {"type": "exact", "name": "watched"}}]},
                "weight": 0.0,
            },
        ],
    }
    scored, _ = run(mix)
    assert scored.value == pytest.approx(1.25)
    assert scored.parts == {"exact": 1.0, "format": 1.0, "watched": 1.0}
    assert scored.error is None
    for wrong in ({"timeout_s": 5.0}, {"terms": []}):
        with pytest.raises(
            ValidationError, match="timeout_s|at least 1 item"
        ):  # time limits are the terms' own
            run({**mix, **wrong})


def test_a_user_function_runs_in_a_process_and_may_print(run: Any) -> None:
    scored, _ = run(function("prints"))
    assert (scored.value, scored.error) == (2.0, None)


@pytest.mark.parametrize("run_in", ["process", "thread", "inline"])
def test_a_raising_reward_says_where(run: Any, run_in: str) -> None:
    scored, _ = run(function("raises", run_in=run_in))
    line = raises.__code__.co_firstlineno + 1
    assert scored.parts == {} and "KeyError" in scored.error
    assert f"test_runner.py:{line} in raises" in scored.error


@pytest.mark.parametrize(
    "reward",
    [
        function("hangs", timeout_s=0.3),
        function("sleeps", timeout_s=0.3, run_in="thread"),
        function("never", timeout_s=0.3),
    ],
    ids=["busy in a process", "asleep in a thread", "a coroutine"],
)
def test_a_hanging_reward_ends_at_its_deadline(run: Any, reward: dict[str, Any]) -> None:
    started = time.monotonic()
    scored, _ = run(reward)
    assert time.monotonic() - started < 15
    assert scored.parts == {} and "0.3 s" in scored.error


def test_a_pattern_that_backtracks_for_ever_is_killed_and_the_next_score_works(run: Any) -> None:
    runner = RewardRunner(
        config({"type": "regex", "pattern": "(a+)+$"}), ScoringConfig(timeout_s=0.5, num_processes=1)
    )
    hostile, kind = score_all(runner, [(PROMPT, answered("a" * 60 + "!")), (PROMPT, answered("aaa"))])
    runner.close()
    assert "0.5 s" in (hostile.error or "")
    assert kind.value == 1.0 and kind.error is None


def test_a_score_that_is_not_finite_is_a_failure(run: Any) -> None:
    scored, _ = run(function("not_a_number", run_in="inline"))
    assert "nan" in scored.error


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_a_text_or_nothing_is_not_a_score(run: Any, run_in: str) -> None:
    assert "returned '1.0'" in run(function("a_text", run_in=run_in))[0].error
    assert "returned None" in run(function("nothing", run_in=run_in))[0].error


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_what_a_reward_ends_with_is_told_as_it_is(run: Any, run_in: str) -> None:
    assert "SystemExit: no more" in run(function("leaves", run_in=run_in))[0].error
    assert "TimeoutError: the shop is closed" in run(function("times_out", run_in=run_in))[0].error


@pytest.mark.parametrize("run_in", ["inline", "thread"])
@pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited")
def test_a_coroutine_that_nobody_awaits_is_not_a_score(run: Any, run_in: str) -> None:
    assert "returned <coroutine object later" in run(function("a_coroutine", run_in=run_in))[0].error


def test_a_function_that_cannot_be_called_is_named_before_anything_starts() -> None:
    with pytest.raises(
        ValueError, match=r"too_few cannot be called with \(prompt, response_text, trajectory\)"
    ):
        config(function("too_few"))


def test_a_score_that_wants_too_much_memory_is_a_failure(run: Any) -> None:
    assert "MemoryError" in run(function("hungry"), memory_bytes=2**28)[0].error
    assert run(function("hungry"), memory_bytes=2**31)[0].value == 2**30, "libraries do not count"


def test_a_dying_process_is_a_failure_and_is_replaced(run: Any) -> None:
    scored, runner = run(function("dies"))
    assert "died" in scored.error
    again = score_all(runner, [(PROMPT, answered("4"))])[0]
    assert "died" in (again.error or "")


def test_a_process_that_is_killed_while_it_is_idle_costs_no_score(run: Any) -> None:
    scored, runner = run(function("length"), num_processes=1)
    assert scored.value == 1.0
    for child in psutil.Process().children():
        if "rill.envs.child" in " ".join(child.cmdline()):
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
    again = score_all(runner, [(PROMPT, answered("four"))])[0]
    assert (again.value, again.error) == (4.0, None)


def test_a_process_that_reads_nothing_more_does_not_hold_its_caller(run: Any) -> None:
    """More than a pipe holds: sending it must end at the deadline too."""
    scored, runner = run(function("stops_afterwards"), timeout_s=5.0, num_processes=1)
    assert scored.value == 1.0
    time.sleep(0.3)
    runner.config = ScoringConfig(timeout_s=0.4, num_processes=1)
    stuck = score_all(runner, [(PROMPT, answered("x" * 2_000_000))])[0]
    assert stuck.error == "reward stops_afterwards: no score within 0.4 s"


def test_coroutine_functions_are_awaited(run: Any) -> None:
    scored, _ = run(function("later"))
    assert scored.value == 0.5


def test_one_failing_term_leaves_the_others_their_value(run: Any) -> None:
    terms = [{"reward": {"type": "exact"}}, {"reward": function("raises", run_in="inline"), "weight": 0.5}]
    scored, _ = run({"type": "mix", "terms": terms})
    assert scored.parts == {"exact": 1.0} and "reward raises" in scored.error


def test_many_scores_share_few_processes(run: Any) -> None:
    runner = RewardRunner(config(function("length")), ScoringConfig(num_processes=2))
    scored = score_all(runner, [(PROMPT, answered("x" * n)) for n in range(40)])
    runner.close()
    assert [t.value for t in scored] == [float(n) for n in range(40)]


def test_a_slow_score_does_not_hold_the_others_up(tmp_path: Path) -> None:
    """Each waits until all three are there: with one place that nobody gives up, none would ever end."""
    prompt = Prompt(id="p", text="q", metadata={"folder": str(tmp_path)})
    runner = RewardRunner(config(function("meets_others", timeout_s=60.0)), ScoringConfig(num_processes=1))
    scored = score_all(runner, [(prompt, answered("x"))] * 3)
    runner.close()
    assert [score.value for score in scored] == [1.0] * 3


def test_no_more_scores_run_at_once_than_allowed() -> None:
    from tests.envs import test_runner as this  # the module that the runner imported by name

    runner = RewardRunner(config(function("counts_itself")), ScoringConfig(max_concurrent=3))
    scored = score_all(runner, [(PROMPT, answered("x"))] * 12)
    runner.close()
    assert [t.value for t in scored] == [1.0] * 12 and this.most_running == 3


def test_a_terms_own_bound_is_kept_and_the_wait_does_not_count_against_its_deadline() -> None:
    from tests.envs import test_runner as this

    this.most_running = 0
    reward = config(function("counts_itself", max_concurrent=1, timeout_s=0.5))
    runner = RewardRunner(reward, ScoringConfig(max_concurrent=64))
    scored = score_all(
        runner, [(PROMPT, answered("x"))] * 80
    )  # 0.8 s of work one by one, more than the deadline
    runner.close()
    assert {t.error for t in scored} == {None} and this.most_running == 1
