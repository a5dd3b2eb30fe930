"""Which groups are begun, awaited, trained on and begun again: bookkeeping alone, without channels or threads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rill.errors import RunError
from rill.inference.base import Completion
from rill.types import Prompt, StopReason
from rill.workflows.admission import Admission
from rill.workflows.group_buffer import GroupBuffer
from rill.workflows.jobs import GroupJob, Outcome


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
        max_returns: int = 8,
        max_dropped: int = 0,
        in_order: bool = False,
        size: int = 10_000,
        steps: int = 1000,
    ) -> None:
        self.admission = Admission(
            batch_groups=batch, max_lag=max_lag, max_concurrent=100, extra_groups=extra, num_steps=steps
        )
        self.buffer = GroupBuffer(
            self.admission,
            Numbers(size),
            group_size=1,
            in_admission_order=in_order,
            max_returns=max_returns,
            max_dropped=max_dropped,
        )
        self.jobs: dict[int, GroupJob] = {}
        self.admitted: list[int] = []

    def admit(self) -> list[int]:
        jobs = self.buffer.admit()
        self.jobs.update((job.index, job) for job in jobs)
        self.admitted += [job.index for job in jobs]
        return [job.index for job in jobs]

    def finish(self, index: int, *, dropped: str | None = None, maker: str = "a") -> bool:
        return self.buffer.collect(
            Outcome(index=index, lengths=() if dropped else (3,), dropped=dropped, maker=maker)
        )

    def put_back(self, index: int, num_tokens: int = 1) -> bool:
        answers = {f"g{index}/0#0": answer(num_tokens)}
        return self.buffer.collect(Outcome(index=index, returned=answers))

    def step(self) -> list[int]:
        assert self.buffer.is_ready
        batch, _, _ = self.buffer.take_batch()
        self.buffer.trained()
        return sorted(outcome.index for outcome in batch)


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
    batch, dropped, _ = bench.buffer.take_batch()
    assert [o.index for o in batch] == [1, 2]
    assert [o.dropped for o in dropped] == ["equal_rewards"]


def test_a_group_done_a_second_time_is_not_counted() -> None:
    bench = Bench()
    bench.admit()
    assert bench.finish(0, maker="a")
    assert not bench.finish(0, maker="b")
    bench.finish(1)
    assert bench.step() == [0, 1]
    assert not bench.finish(1, maker="b")
    bench.admit()
    assert (bench.admission.accepted, bench.admission.running) == (2, 2)


def test_in_admission_order_a_batch_waits_for_its_oldest_group() -> None:
    bench = Bench(max_lag=1, in_order=True)
    bench.admit()
    for index in (3, 2, 1):
        bench.finish(index)
    assert not bench.buffer.is_ready
    assert "3 of 2 groups" in bench.buffer.describe()
    bench.finish(0)
    assert bench.step() == [0, 1]


def test_by_completion_the_first_to_finish_make_the_batch() -> None:
    bench = Bench(max_lag=1)
    bench.admit()
    bench.finish(3)
    bench.finish(1)
    assert bench.step() == [1, 3]


def test_a_resumed_run_keeps_what_was_finished_and_repeats_what_was_begun_under_the_same_names() -> None:
    first = Bench(max_lag=1)
    first.admit()
    first.finish(0, dropped="equal_rewards")
    first.admit()
    first.finish(3)
    first.finish(1)
    first.step()
    first.admit()
    first.finish(4)
    state, untrained = first.buffer.state()
    assert [outcome.index for _, outcome in untrained.kept] == [4]
    begun = sorted(set(first.admitted) - {0, 1, 3, 4})
    assert [job.index for job in untrained.begun] == begun
    second = Bench(max_lag=1)
    second.buffer.load_state(state, untrained)
    assert second.admit()[: len(begun)] == begun
    assert [second.jobs[index] for index in begun] == [first.jobs[index] for index in begun]
    fresh = [second.jobs[index] for index in second.admitted[len(begun) :]]
    assert all(job.index > max(first.admitted) and job.prompt.id == f"p{job.index}" for job in fresh)
    assert len(second.admitted) == 3
    second.finish(begun[0])
    assert second.step() == [*begun[:1], 4], "what was finished before is in the next batch"


def test_a_source_that_runs_dry_is_an_error_in_words() -> None:
    bench = Bench(size=2)
    bench.admit()
    bench.finish(1, dropped="too_hard")
    with pytest.raises(RunError, match="no more prompts"):
        bench.admit()


def test_what_was_put_back_is_begun_first_with_what_was_said() -> None:
    bench = Bench(extra=1)
    assert bench.admit() == [0, 1, 2]
    bench.finish(1)
    bench.finish(2)
    batch, _, _ = bench.buffer.take_batch()
    assert [o.index for o in batch] == [1, 2]
    assert bench.put_back(0, num_tokens=5)
    bench.buffer.trained()
    assert bench.admit() == [0, 3, 4]
    (kept,) = bench.jobs[0].answers.values()
    assert (len(kept.token_ids), bench.jobs[0].num_returns) == (5, 1)


def test_what_was_put_back_survives_a_checkpoint_with_its_tokens() -> None:
    first = Bench(extra=1)
    first.admit()
    first.finish(1)
    first.finish(2)
    first.buffer.take_batch()
    first.put_back(0, num_tokens=7)
    first.buffer.trained()
    second = Bench(extra=1)
    second.buffer.load_state(*first.buffer.state())
    assert second.admit() == [0, 3, 4]
    (kept,) = second.jobs[0].answers.values()
    assert len(kept.token_ids) == 7


def test_a_group_that_was_put_back_too_often_is_waited_for() -> None:
    bench = Bench(extra=1, max_returns=2)
    for step in range(2):
        bench.admit()
        fresh = [index for index in bench.admitted if index > 0][-2:]
        for index in fresh:
            bench.finish(index)
        assert bench.buffer.is_ready, f"step {step}"
        bench.buffer.take_batch()
        bench.put_back(0)
        bench.buffer.trained()
    bench.admit()
    for index in bench.admitted[-2:]:
        bench.finish(index)
    assert not bench.buffer.is_ready
    bench.finish(0)
    assert 0 in bench.step(), "and goes first, for its tokens are the oldest"


@given(
    batch=st.integers(1, 5),
    share=st.floats(0, 1),
    max_returns=st.integers(1, 4),
    steps=st.integers(1, 8),
    seed=st.integers(0, 9999),
)
def test_every_group_begun_is_trained_on_or_dropped_once_however_often_it_was_put_back(
    batch: int, share: float, max_returns: int, steps: int, seed: int
) -> None:
    rng = random.Random(seed)
    extra = int(share * batch)
    bench = Bench(batch=batch, extra=extra, max_returns=max_returns, steps=steps)
    trained: list[int] = []
    dropped: set[int] = set()
    running: set[int] = set()
    for _ in range(steps):
        running |= set(bench.admit())
        while not bench.buffer.is_ready:
            index = rng.choice(sorted(running))
            running.discard(index)
            if rng.random() < 0.2:
                bench.finish(index, dropped="equal")
                dropped.add(index)
                running |= set(bench.admit())
            else:
                bench.finish(index)
        taken, _, _ = bench.buffer.take_batch()
        assert len(taken) == batch
        trained += [outcome.index for outcome in taken]
        for index in sorted(running):  # some finish after all, the others are put back
            if rng.random() < 0.3:
                bench.finish(index)
            else:
                assert bench.jobs[index].num_returns < max_returns
                bench.put_back(index)
        running.clear()
        bench.buffer.trained()
    assert len(set(trained)) == len(trained) == steps * batch
    assert set(bench.admitted) == {*trained, *dropped}, "nothing begun is left over at the end"


def test_a_batch_that_filters_never_let_come_together_is_an_error_with_the_reasons() -> None:
    bench = Bench(batch=2, max_dropped=6)
    first, _ = bench.admit()
    bench.finish(first)
    with pytest.raises(
        RunError, match=r"dropped 6 groups \(too_hard: 4, equal_rewards: 2\) and kept 1 of the 2"
    ) as end:
        for number in range(10):
            index = max(bench.jobs) if number == 0 else bench.admit()[0]
            bench.finish(index, dropped="equal_rewards" if number < 2 else "too_hard")
    assert "loop.max_refills" in str(end.value)
