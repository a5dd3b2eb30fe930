"""Which prompts a turn starts while others generate."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from rill.inference.base import Request
from rill.inference.native.block_manager import BlockManager
from rill.inference.native.scheduler import Scheduler, Work
from rill.inference.native.sequence import Sequence


class Turns:
    """A scheduler whose work is done at once."""

    def __init__(self, num_gathered: int, num_slots: int = 64, budget: int = 1024) -> None:
        blocks = BlockManager(2000, 16, enable_prefix_cache=False)
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=num_slots,
            max_batched_tokens=budget,
            root_key=lambda seq: b"",
            num_gathered=num_gathered,
            num_steps=4,
        )
        self._num_made = 0

    def add(self, count: int) -> None:
        for _ in range(count):
            tokens = [5] * 8
            request = Request(id=str(self._num_made), token_ids=np.array(tokens, dtype=np.int32))
            self.scheduler.add(
                Sequence(
                    request=request,
                    seed=0,
                    arrival=self._num_made,
                    tokens=array("i", tokens),
                    num_prompt=8,
                    max_tokens=500,
                )
            )
            self._num_made += 1

    def take(self) -> Work:
        work = self.scheduler.schedule()
        for seq in self.scheduler.running:
            seq.tokens.extend([5] * seq.num_in_flight)
            seq.num_in_flight = 0
        return work

    def num_started(self) -> int:
        return len(self.take().chunks)


def test_a_prompt_that_comes_alone_waits_a_few_steps_for_company_while_many_generate() -> None:
    turns = Turns(num_gathered=5)
    turns.add(20)
    assert turns.num_started() == 20, "nobody is held up by them"
    turns.add(1)
    assert [turns.num_started() for _ in range(3)] == [0, 0, 1]
    turns.add(4)
    assert turns.num_started() == 0
    turns.add(1)
    assert turns.num_started() == 5, "enough have come together"


@pytest.mark.parametrize(("num_running", "num_new"), [(1, 1), (2, 1), (8, 4)])
def test_prompts_start_at_once_where_few_generate(num_running: int, num_new: int) -> None:
    turns = Turns(num_gathered=5)
    turns.add(num_running)
    turns.take()
    turns.add(num_new)
    assert turns.num_started() == num_new


@pytest.mark.parametrize("budget", [8 * 20, 8 * 20 + 4], ids=["between two prompts", "within a prompt"])
def test_prompts_go_on_in_the_next_step_wherever_the_budget_of_one_ends(budget: int) -> None:
    turns = Turns(num_gathered=5, budget=budget)
    turns.add(21)
    assert [turns.num_started(), turns.num_started()] == [20 + (budget > 8 * 20), 1]


def test_turns_of_generation_stay_long_while_prompts_wait() -> None:
    turns = Turns(num_gathered=5)
    turns.add(20)
    turns.take()
    turns.add(1)
    assert turns.take().counts == [4] * 20


def test_a_queue_waits_until_enough_slots_are_free() -> None:
    turns = Turns(num_gathered=5, num_slots=20)
    turns.add(30)
    assert turns.num_started() == 20
    for num_ended in range(1, 5):
        turns.scheduler.finish(turns.scheduler.running[0])
        assert [turns.num_started() for _ in range(4)] == [0] * 4, num_ended
    turns.scheduler.finish(turns.scheduler.running[0])
    assert turns.num_started() == 5


def test_without_gathering_every_prompt_starts_at_once() -> None:
    turns = Turns(num_gathered=0)
    turns.add(20)
    turns.take()
    turns.add(1)
    assert turns.num_started() == 1
