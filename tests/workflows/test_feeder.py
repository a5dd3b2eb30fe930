"""The feeder alone, over channels that are lists."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from rill.errors import RunError, StuckError
from rill.types import Prompt
from rill.workflows.admission import Admission
from rill.workflows.feeder import Feeder
from rill.workflows.jobs import GroupJob, Outcome


class Line:
    """A channel of one process."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def put_many(self, items: Sequence[Any]) -> None:
        self.items += items

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


class Numbers:
    """A source of prompts."""

    def __init__(self, size: int = 1000) -> None:
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
    def __init__(self, *, batch: int = 2, max_lag: int = 0, in_order: bool = False, size: int = 1000) -> None:
        self.jobs, self.outcomes, self.discarded = Line(), Line(), []
        self.admission = Admission(batch_groups=batch, max_lag=max_lag, max_concurrent=100)
        self.feeder = Feeder(
            self.admission,
            source=Numbers(size),
            group_size=1,
            jobs=self.jobs,  # type: ignore[arg-type]
            outcomes=self.outcomes,  # type: ignore[arg-type]
            in_admission_order=in_order,
            discard=self.discarded.append,
        )

    def __enter__(self) -> Bench:
        self.feeder.start()
        self.feeder.open_epoch()
        return self

    def __exit__(self, *_: object) -> None:
        self.feeder.stop()

    def finish(self, index: int, *, dropped: str | None = None, maker: str = "a") -> None:
        lengths = () if dropped else (3,)
        self.outcomes.put(
            Outcome(
                group_id=f"g{index:08d}",
                index=index,
                prompt_id="",
                lengths=lengths,
                dropped=dropped,
                maker=maker,
            )
        )

    @property
    def admitted(self) -> list[int]:
        return [job.index for job in self.jobs.items]

    def step(self) -> list[int]:
        indices = [outcome.index for outcome in self.feeder.take_batch(5.0).outcomes]
        self.feeder.trained()
        return indices


def test_a_dropped_group_is_replaced_and_counted_under_its_reason() -> None:
    with Bench() as bench:
        bench.finish(0, dropped="equal_rewards")
        bench.finish(1)
        bench.finish(2)
        collected = bench.feeder.take_batch(5.0)
        assert [o.index for o in collected.outcomes] == [1, 2]
        assert dict(collected.drop_reasons) == {"equal_rewards": 1}
        assert bench.admitted == [0, 1, 2]


def test_a_group_done_a_second_time_is_not_counted_and_its_samples_are_discarded() -> None:
    with Bench(batch=2) as bench:
        bench.finish(0, maker="a")
        bench.finish(0, maker="b")
        bench.finish(1)
        assert bench.step() == [0, 1]
        bench.finish(1, maker="b")
        bench.finish(2)
        bench.finish(3)
        assert bench.step() == [2, 3]
        assert [(o.index, o.maker) for o in bench.discarded] == [(0, "b"), (1, "b")]
        assert (bench.admission.accepted, bench.admission.running) == (4, 2)


def test_in_admission_order_a_batch_waits_for_its_oldest_group() -> None:
    with Bench(max_lag=1, in_order=True) as bench:
        for index in (3, 2, 1):
            bench.finish(index)
        with pytest.raises(StuckError, match="3 of 2 groups"):
            bench.feeder.take_batch(0.2)
        bench.finish(0)
        assert bench.step() == [0, 1]


def test_by_completion_the_first_to_finish_make_the_batch() -> None:
    with Bench(max_lag=1) as bench:
        bench.finish(3)
        bench.finish(1)
        assert bench.step() == [1, 3]


def test_a_resumed_run_repeats_what_was_begun_and_not_trained_on_under_the_same_names() -> None:
    with Bench(max_lag=1) as first:
        first.finish(0, dropped="equal_rewards")
        first.finish(3)
        first.finish(1)
        first.step()
        first.finish(4)
        first.feeder.close_epoch()
        state = first.feeder.state()
        begun: dict[int, GroupJob] = {job.index: job for job in first.jobs.items}
    untrained = sorted(set(begun) - {0, 1, 3})
    second = Bench(max_lag=1)
    second.feeder.load_state(state)
    with second:
        assert second.admitted[: len(untrained)] == untrained
        assert second.jobs.items[: len(untrained)] == [begun[index] for index in untrained]
        fresh = second.jobs.items[len(untrained) :]
        assert all(job.index > max(begun) and job.prompt.id == f"p{job.index}" for job in fresh)
        assert len(second.admitted) == 4


def test_a_source_that_runs_dry_is_reported_to_whoever_waits_for_a_batch() -> None:
    with Bench(size=2) as bench:
        bench.finish(0)
        bench.finish(1, dropped="too_hard")
        with pytest.raises(RunError, match="no more prompts"):
            bench.feeder.take_batch(5.0)
