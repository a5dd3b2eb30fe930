"""The curriculum asks where the policy learns, filters what teaches nothing, and resumes exactly."""

from __future__ import annotations

from collections import Counter

import pytest

from rill.data.curriculum import Curriculum, CurriculumConfig
from rill.errors import CheckpointError
from rill.types import Prompt


class Graded:
    """Problem i has difficulty i mod levels."""

    def __init__(self, size: int = 400, levels: int = 4) -> None:
        self.size, self.levels = size, levels

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{index}?", difficulty=float(index % self.levels))


def drawn(curriculum: Curriculum, count: int) -> Counter[float | None]:
    return Counter(prompt.difficulty for prompt in curriculum.next(count))


def test_pools_are_by_difficulty_and_drawn_alike_at_first() -> None:
    curriculum = Curriculum(Graded(), CurriculumConfig(pools=4))
    counts = drawn(curriculum, 800)
    assert set(counts) == {0.0, 1.0, 2.0, 3.0} and min(counts.values()) > 130


def test_draws_move_to_where_half_of_the_answers_are_right() -> None:
    curriculum = Curriculum(Graded(), CurriculumConfig(pools=4, patience=0))
    success = {0.0: 1.0, 1.0: 0.5, 2.0: 0.05, 3.0: 0.0}
    for _ in range(60):
        for prompt in curriculum.next(8):
            curriculum.learn(0, prompt, success[prompt.difficulty or 0.0])
    chances = curriculum.chances()
    assert chances[1] == max(chances) and chances[1] > 0.6
    assert min(chances) >= 0.05 / 4 - 1e-9 and sum(chances) == pytest.approx(1.0)
    assert drawn(curriculum, 400)[1.0] > 220
    # When the policy has learned that pool, the next one takes its place.
    for _ in range(400):
        for prompt in curriculum.next(4):
            curriculum.learn(0, prompt, {0.0: 1.0, 1.0: 1.0, 2.0: 0.5, 3.0: 0.0}[prompt.difficulty or 0.0])
    assert curriculum.chances()[2] == max(curriculum.chances())


def test_a_prompt_that_is_always_right_is_set_aside_and_comes_back() -> None:
    curriculum = Curriculum(Graded(size=6, levels=1), CurriculumConfig(pools=1, patience=2, rest=30))
    easy = curriculum.dataset[0]
    for _ in range(2):
        curriculum.learn(0, easy, 1.0)
    assert "0" not in {p.id for p in curriculum.next(25)}
    assert curriculum.metrics()["curriculum/set_aside"] > 0
    assert "0" in {p.id for p in curriculum.next(30)}


def test_a_pool_of_which_all_prompts_rest_is_still_asked() -> None:
    curriculum = Curriculum(Graded(size=3, levels=1), CurriculumConfig(pools=1, patience=1))
    for index in range(3):
        curriculum.learn(index, curriculum.dataset[index], 0.0)
    assert len(curriculum.next(5)) == 5


def test_it_resumes_with_the_very_next_draw() -> None:
    def run(curriculum: Curriculum, count: int) -> list[str]:
        ids = []
        for _ in range(count):
            prompt = curriculum.next(1)[0]
            ids.append(prompt.id)
            curriculum.learn(0, prompt, (len(prompt.id) + int(prompt.id)) % 3 / 2)
        return ids

    straight = Curriculum(Graded(), CurriculumConfig(pools=4, seed=7))
    run(straight, 100)
    resumed = Curriculum(Graded(), CurriculumConfig(pools=4, seed=7))
    resumed.load_state(straight.state())
    assert run(resumed, 100) == run(straight, 100)
    with pytest.raises(CheckpointError, match="other pools"):
        Curriculum(Graded(levels=2), CurriculumConfig(pools=4)).load_state(straight.state())


def test_what_groups_teach_counts_in_the_order_of_admission_whichever_finished_first() -> None:
    def draws(order: list[int]) -> list[str]:
        curriculum = Curriculum(Graded(), CurriculumConfig(pools=4, memory=0.5))
        prompts = curriculum.next(8)
        for index in order:
            curriculum.learn(index, prompts[index], (index % 3) / 2)
        return [prompt.id for prompt in curriculum.next(50)]

    assert draws([0, 1, 2, 3, 4, 5, 6, 7]) == draws([5, 2, 7, 0, 1, 6, 3, 4])


def test_prompts_without_difficulty_make_one_pool() -> None:
    class Plain(Graded):
        def __getitem__(self, index: int) -> Prompt:
            return Prompt(id=str(index), text=str(index))

    assert Curriculum(Plain()).chances() == [1.0]


def test_what_is_remembered_of_prompts_is_short_and_only_of_those_it_matters_for() -> None:
    long = [Prompt(id=str(n), text=f"{n}?" + "x" * 5_000, difficulty=0.0) for n in range(3)]
    curriculum = Curriculum(long, CurriculumConfig(pools=1))
    for prompt, success in zip(long, (1.0, 0.5, 0.0), strict=True):
        curriculum.learn(0, prompt, success)
    records = curriculum.state()["records"]
    assert len(records) == 2 and all(len(key) == 16 for key in records)
    curriculum.learn(0, long[0], 0.5)
    assert len(curriculum.state()["records"]) == 1
