"""Which groups are begun, awaited, trained on and begun again: bookkeeping alone, without channels or threads."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.data.curriculum import Curriculum, CurriculumConfig
from rill.data.loader import PromptSource
from rill.errors import RunError
from rill.inference.base import Completion
from rill.types import Prompt, StopReason
from rill.workers.records import Outcome, Progress, Task
from rill.workflows.config import LoopConfig
from rill.workflows.staleness import Staleness, State


class Numbers:
    """A source of prompts."""

    def __init__(self, size: int = 10_000) -> None:
        self.position = 0
        self.size = size

    def next(self, count: int) -> list[Prompt]:
        end = min(self.position + count, self.size)
        prompts = [Prompt(id=f"p{i}", answer={"n": i}) for i in range(self.position, end)]
        self.position = end
        return prompts

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Bench:
    def __init__(
        self,
        *,
        batch: int = 2,
        max_lag: int = 0,
        extra: int = 0,
        max_resumes: int = 8,
        max_refills: int = 0,
        in_order: bool = False,
        size: int = 10_000,
        steps: int = 1000,
        source: PromptSource | None = None,
    ) -> None:
        config = LoopConfig(
            prompts_per_step=batch,
            max_lag=max_lag,
            steps=steps,
            overprovision=extra / batch,
            order="admission" if in_order else "completion",
            max_resumes=max_resumes,
            max_refills=max_refills,
        )
        self.state = Staleness(config, source or Numbers(size), group_size=1)
        self.tasks: dict[int, Task] = {}
        self.admitted: list[int] = []
        self.batch: list[int] = []

    def admit(self) -> list[int]:
        tasks = self.state.admit(epoch=0)
        self.tasks.update((task.index, task) for task in tasks)
        self.admitted += [task.index for task in tasks]
        return [task.index for task in tasks]

    def finish(self, index: int, *, dropped: str | None = None) -> None:
        lengths = () if dropped else (3,)
        self.state.collect(Outcome(index=index, lengths=lengths, dropped=dropped, rewards=(1.0,)))

    def stop(self, index: int, num_tokens: int = 1) -> None:
        progress = Progress(answers={f"g{index}/0#0": answer(num_tokens)})
        self.state.collect(Outcome(index=index, stopped=progress))

    def choose(self) -> bool:
        """Whether the batch is full."""
        if not self.batch and not self.state.num(State.BATCHED):
            self.state.open_batch()
        self.batch += [outcome.index for outcome in self.state.choose()]
        return self.state.is_full

    def take(self) -> tuple[list[int], dict[str, float]]:
        assert self.choose()
        batch, self.batch = self.batch, []
        return batch, self.state.since_last_batch()

    def step(self) -> list[int]:
        batch, _ = self.take()
        self.state.trained()
        return sorted(batch)


def answer(num_tokens: int) -> Completion:
    return Completion(
        request_id="r",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.ones(num_tokens, np.int32),
        stop_reason=StopReason.ABORTED,
    )


def test_a_dropped_group_is_replaced_and_told_with_the_next_batch() -> None:
    bench = Bench()
    assert bench.admit() == [0, 1]
    bench.finish(0, dropped="equal_rewards")
    bench.finish(1)
    assert bench.admit() == [2]
    bench.finish(2)
    batch, since = bench.take()
    assert batch == [1, 2]
    assert since == {"groups/dropped": 1, "groups/dropped_equal_rewards": 1, "groups/resumed": 0}


def test_in_admission_order_a_batch_waits_for_its_oldest_group() -> None:
    bench = Bench(max_lag=1, in_order=True)
    bench.admit()
    for index in (3, 2, 1):
        bench.finish(index)
    assert not bench.choose()
    assert "3 of 2 groups" in bench.state.describe()
    bench.finish(0)
    assert bench.step() == [0, 1]


def test_by_completion_the_first_to_finish_make_the_batch() -> None:
    bench = Bench(max_lag=1)
    bench.admit()
    bench.finish(3)
    bench.finish(1)
    assert bench.step() == [1, 3]


def test_a_resumed_run_does_what_was_begun_again_under_the_same_names() -> None:
    first = Bench(max_lag=1)
    first.admit()
    first.finish(0, dropped="equal_rewards")
    first.admit()
    first.finish(3)
    first.finish(1)
    first.step()
    first.admit()
    first.finish(4)
    state, untrained = first.state.state(), first.state.untrained()
    begun = sorted(set(first.admitted) - {0, 1, 3})
    assert 4 in begun, "what was finished is done again too: the token log has its tokens"
    assert [task.index for task in untrained] == begun
    second = Bench(max_lag=1)
    second.state.load_state(state, untrained)
    assert second.admit()[: len(begun)] == begun
    assert [second.tasks[index] for index in begun] == [first.tasks[index] for index in begun]
    fresh = [second.tasks[index] for index in second.admitted[len(begun) :]]
    assert all(task.index > max(first.admitted) and task.prompt.id == f"p{task.index}" for task in fresh)


def test_a_group_that_was_kept_at_a_checkpoint_teaches_the_curriculum_once_though_it_is_done_again() -> None:
    def bench() -> Bench:
        rows = [Prompt(id=f"p{n}", text=f"{n}?", difficulty=0.0) for n in range(20)]
        return Bench(max_lag=1, source=Curriculum(rows, CurriculumConfig(pools=1)))

    def num_reports(bench: Bench) -> int:
        reports: int = bench.state.state()["source"]["pools"][0]["num_reports"]
        return reports

    first = bench()
    first.admit()
    for index in (0, 1, 2):
        first.finish(index)
    first.step()
    assert num_reports(first) == 3, "what waits for a batch has been learnt from"
    state, untrained = first.state.state(), first.state.untrained()
    for _ in range(2):  # killed once more before anything was finished
        second = bench()
        second.state.load_state(json.loads(json.dumps(state)), untrained)
        second.admit()
        state, untrained = second.state.state(), second.state.untrained()
    second.finish(2)
    assert num_reports(second) == 3
    second.finish(3, dropped="equal_rewards")
    assert num_reports(second) == 4


def test_a_batch_that_was_chosen_before_is_chosen_again_in_its_order() -> None:
    bench = Bench(max_lag=1)
    bench.state.chosen_before = {0: [2, 0]}
    bench.admit()
    for index in (0, 1):
        bench.finish(index)
        assert not bench.choose(), "though it is finished first"
    bench.finish(2)
    assert bench.choose() and bench.batch == [2, 0]
    assert bench.step() == [0, 2]
    bench.admit()
    bench.finish(3)
    assert bench.choose() and sorted(bench.batch) == [1, 3], "and then as ever"


def test_a_batch_that_cannot_be_chosen_again_is_given_up_and_not_waited_for() -> None:
    bench = Bench(max_lag=1)
    bench.state.chosen_before = {0: [2, 0], 1: [1, 3]}
    bench.admit()
    bench.finish(0)
    bench.finish(2, dropped="equal_rewards")  # a reward that answers otherwise the second time
    bench.finish(1)
    assert bench.choose() and sorted(bench.batch) == [0, 1]
    assert bench.state.chosen_before == {}


def test_a_source_that_runs_dry_is_an_error_in_words() -> None:
    bench = Bench(size=2)
    bench.admit()
    bench.finish(1, dropped="too_hard")
    with pytest.raises(RunError, match="no more prompts"):
        bench.admit()


def test_what_was_stopped_is_begun_first_with_what_was_said() -> None:
    bench = Bench(extra=1)
    assert bench.admit() == [0, 1, 2]
    bench.finish(1)
    bench.finish(2)
    assert bench.take()[0] == [1, 2]
    bench.stop(0, num_tokens=5)
    bench.state.trained()
    assert bench.admit() == [0, 3, 4]
    (kept,) = bench.tasks[0].progress.answers.values()
    assert (len(kept.token_ids), bench.tasks[0].num_resumes) == (5, 1)


def test_what_was_stopped_survives_a_checkpoint_with_its_tokens() -> None:
    first = Bench(extra=1)
    first.admit()
    first.finish(1)
    first.finish(2)
    first.take()
    first.stop(0, num_tokens=7)
    first.state.trained()
    second = Bench(extra=1)
    second.state.load_state(first.state.state(), first.state.untrained())
    assert second.admit() == [0, 3, 4]
    (kept,) = second.tasks[0].progress.answers.values()
    assert len(kept.token_ids) == 7


def test_a_group_that_was_stopped_too_often_is_waited_for() -> None:
    bench = Bench(extra=1, max_resumes=2)
    for step in range(2):
        bench.admit()
        fresh = [index for index in bench.admitted if index > 0][-2:]
        for index in fresh:
            bench.finish(index)
        assert bench.choose(), f"step {step}"
        bench.take()
        bench.stop(0)
        bench.state.trained()
    bench.admit()
    for index in bench.admitted[-2:]:
        bench.finish(index)
    assert not bench.choose()
    bench.finish(0)
    assert 0 in bench.step(), "and goes first, for its tokens are the oldest"


@settings(max_examples=30)
@given(
    batch=st.integers(1, 5),
    share=st.floats(0, 1),
    max_resumes=st.integers(1, 4),
    steps=st.integers(1, 8),
    seed=st.integers(0, 9999),
)
def test_every_group_begun_is_trained_on_or_dropped_once_however_often_it_was_stopped(
    batch: int, share: float, max_resumes: int, steps: int, seed: int
) -> None:
    rng = random.Random(seed)
    extra = int(share * batch)
    bench = Bench(batch=batch, extra=extra, max_resumes=max_resumes, steps=steps)
    trained: list[int] = []
    dropped: set[int] = set()
    running: set[int] = set()
    for _ in range(steps):
        running |= set(bench.admit())
        while not bench.choose():
            index = rng.choice(sorted(running))
            running.discard(index)
            if rng.random() < 0.2:
                bench.finish(index, dropped="equal")
                dropped.add(index)
                running |= set(bench.admit())
            else:
                bench.finish(index)
        taken, _ = bench.take()
        assert len(taken) == batch
        trained += taken
        for index in sorted(running):  # some finish after all, the others are stopped
            if rng.random() < 0.3:
                bench.finish(index)
            else:
                assert bench.tasks[index].num_resumes < max_resumes
                bench.stop(index)
        running.clear()
        bench.state.trained()
    assert len(set(trained)) == len(trained) == steps * batch
    assert set(bench.admitted) == {*trained, *dropped}, "nothing begun is left over at the end"


def test_a_batch_that_filters_never_let_come_together_is_an_error_with_the_reasons() -> None:
    bench = Bench(batch=2, max_refills=3)
    first, _ = bench.admit()
    bench.finish(first)
    with pytest.raises(
        RunError, match=r"dropped 6 groups \(too_hard: 4, equal_rewards: 2\) and kept 1 of the 2"
    ) as end:
        for number in range(10):
            index = max(bench.tasks) if number == 0 else bench.admit()[0]
            bench.finish(index, dropped="equal_rewards" if number < 2 else "too_hard")
    assert "loop.max_refills" in str(end.value)


def test_lag_zero_admits_one_batch_and_no_more_until_it_is_trained() -> None:
    bench = Bench(batch=4)
    assert len(bench.admit()) == 4 and bench.state.room == 0
    for index in range(4):
        bench.finish(index)
    bench.take()
    assert bench.state.room == 0, "a batch is not yet trained on"
    bench.state.trained()
    assert bench.state.room == 4


def test_groups_join_the_batch_as_they_come_and_are_announced_once() -> None:
    bench = Bench(batch=3)
    bench.admit()
    assert not bench.choose()
    bench.finish(2)
    assert not bench.choose() and bench.batch == [2]
    bench.finish(0)
    bench.finish(1)
    assert bench.choose() and bench.batch == [2, 0, 1]
    assert bench.state.choose() == []


@pytest.mark.parametrize("batch", [2, 6])
def test_a_run_resumed_with_another_batch_size_goes_on(batch: int) -> None:
    first = Bench(batch=4, max_lag=1)
    first.admit()
    for index in range(7):
        first.finish(index)
    first.step()
    second = Bench(batch=batch, max_lag=1)
    second.state.load_state(first.state.state(), first.state.untrained())
    seen: list[int] = []
    for _ in range(3):
        while not second.choose():
            for index in second.admit() or [min(set(second.admitted) - set(seen) - set(second.batch))]:
                second.finish(index)
        assert second.state.room <= 2 * batch
        seen += second.step()
    assert len(seen) == len(set(seen)) == 3 * batch


@settings(max_examples=30)
@given(batch=st.integers(1, 6), lag=st.integers(0, 4), seed=st.integers(0, 999))
def test_consumed_in_order_of_admission_no_group_is_older_than_the_allowed_lag(
    batch: int, lag: int, seed: int
) -> None:
    rng = random.Random(seed)
    bench = Bench(batch=batch, max_lag=lag, in_order=True)
    born: dict[int, int] = {}
    running: list[int] = []
    for _ in range(100):
        if rng.random() < 0.5:
            fresh = bench.admit()
            born |= dict.fromkeys(fresh, bench.state.version)
            running += fresh
        if running and rng.random() < 0.8:
            bench.finish(running.pop(rng.randrange(len(running))))
        if bench.choose():
            assert all(bench.state.version - born[index] <= lag for index in bench.batch)
            bench.step()
