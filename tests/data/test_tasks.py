"""The built-in tasks: right answers, reproducible, and with sides that never overlap."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from rill.data.base import DATASETS, Dataset, Split, open_dataset, prompts_of
from rill.errors import DataError
from tests.data.disjoint import assert_disjoint

TASKS = ["arithmetic", "vault", "programs"]


def opened(name: str, split: Split = Split.TRAIN, **settings: Any) -> Dataset:
    config = DATASETS.load(name).Config.model_validate({"type": name, **settings})
    dataset = open_dataset(config, split)
    assert isinstance(dataset, Dataset)
    return dataset


@pytest.mark.parametrize("name", TASKS)
def test_problem_i_is_always_the_same_and_seeds_differ(name: str) -> None:
    a, b, c = opened(name, seed=1), opened(name, seed=1), opened(name, seed=2)
    assert [a[i] for i in range(20)] == [b[i] for i in range(20)]
    assert [a[i].text for i in range(20)] != [c[i].text for i in range(20)]


@pytest.mark.parametrize("name", TASKS)
def test_the_sides_of_a_task_never_overlap(name: str) -> None:
    settings = {"held_out": 0.3, "seed": 3}
    train, held = opened(name, **settings), opened(name, Split.HELD_OUT, **settings)
    assert_disjoint(prompts_of(train, 400), prompts_of(held, 200))
    # A generator's seed does not matter either: the side belongs to the problem, not to its number.
    other = opened(name, Split.HELD_OUT, held_out=0.3, seed=99)
    assert_disjoint(prompts_of(train, 400), prompts_of(other, 200))


@pytest.mark.parametrize("name", TASKS)
def test_difficulty_grows_with_the_level(name: str) -> None:
    def mean(level: int) -> float:
        dataset = opened(name, levels=(level, level))
        return sum(dataset[i].difficulty or 0 for i in range(20)) / 20

    assert mean(2) < mean(4) < mean(6)


@pytest.mark.parametrize("name", TASKS)
def test_bare_and_chat_forms_and_templates(name: str) -> None:
    bare, chat = (
        opened(name)[0],
        opened(name, form="chat", system="Be brief.", template="Q: {question} A:")[0],
    )
    assert bare.text and not bare.messages
    assert [m.role for m in chat.messages] == ["system", "user"] and chat.text is None
    assert chat.messages[1].content.startswith("Q: ") and chat.answer == bare.answer


@pytest.mark.parametrize("operators", ["+", "-", "*", "/", "+-*/"])
def test_arithmetic_answers_are_right(operators: str) -> None:
    dataset = opened("arithmetic", operators=operators, terms=(2, 4), digits=(1, 3))
    for prompt in prompts_of(dataset, 150):
        assert prompt.text is not None
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer) >= 0, prompt.text


def test_every_worked_step_of_arithmetic_holds_and_ends_in_the_answer() -> None:
    dataset = opened("arithmetic", operators="+-*/", terms=(2, 3), digits=(1, 3), worked=1.0)
    for prompt in prompts_of(dataset, 200):
        solution = prompt.metadata["solution"]
        steps = re.fullmatch(r"\((.*)\)(-?\d+)", solution)
        assert steps is not None and steps[2] == prompt.answer, solution
        for step in steps[1].split(","):
            left, _, right = step.partition("=")
            plain = re.sub(r"\b0+(?=\d)", "", left)  # Python reads no number that begins with 0
            assert eval(plain) == int(right), (prompt.text, solution)


def test_columns_read_like_on_paper_and_are_equally_wide() -> None:
    from rill.data.tasks.arithmetic import worked_steps

    assert worked_steps([27, 58], ["+"], [(27, "+", 58, 85)]) == ("7+8+0=15", "2+5+1=08")
    assert worked_steps([52, 7], ["-"], [(52, "-", 7, 45)]) == ("12-7-0=5", "05-0-1=4")


def test_digits_and_reversed_answers() -> None:
    dataset = opened("arithmetic", digits=(3, 3), reverse_answer=True)
    for prompt in prompts_of(dataset, 20):
        left, right = re.fullmatch(r"(\d{3})\+(\d{3})=", prompt.text or "").groups()  # type: ignore[union-attr]
        assert prompt.answer == str(int(left) + int(right))[::-1]


def test_a_problem_space_too_small_for_the_side_says_so() -> None:
    with pytest.raises(DataError, match="too small"):
        dataset = opened("arithmetic", Split.HELD_OUT, levels=(1, 1), held_out=0.0001)
        for _ in prompts_of(dataset, 50):
            pass


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in (
        {"operators": "^"},
        {"terms": (1, 2)},
        {"digits": (0, 1)},
        {"template": "no field"},
        {"digit": 3},
    ):
        with pytest.raises(ValidationError):
            opened("arithmetic", **settings)
    for name in TASKS:
        with pytest.raises(ValidationError, match="levels|digits"):
            opened(name, levels=(0, 2))


def test_braces_in_a_template_are_written_twice() -> None:
    prompt = opened("arithmetic", form="chat", template="{question} Answer in \\boxed{{}}.")[0]
    assert prompt.messages[0].content.endswith("? Answer in \\boxed{}.")


def test_the_tests_of_a_program_tell_what_it_computes_and_not_what_is_guessed() -> None:
    for prompt in prompts_of(opened("programs", worked=0.5), 50):
        factor, summand = map(int, re.fullmatch(r"(\d+)n\+(\d+)\?", prompt.text or "").groups())  # type: ignore[union-attr]
        inputs, outputs = prompt.metadata["tests"].values()
        assert [factor * int(n) + summand for n in inputs] == [int(said) for said in outputs]
        solution = prompt.metadata["solution"]
        assert solution == f"print(int(input())*{factor}+{summand})" or re.fullmatch(
            r"print\(\d+\)", solution
        )


@pytest.mark.parametrize("name", ["arithmetic", "vault"])
def test_pairs_prefer_the_worked_solution_to_a_mistake(name: str) -> None:
    dataset = opened(name, pairs=True, seed=1)
    prompts = list(prompts_of(dataset, 200))
    assert prompts == list(prompts_of(opened(name, pairs=True, seed=1), 200))
    for prompt in prompts:
        chosen, rejected = prompt.metadata["chosen"], prompt.metadata["rejected"]
        assert chosen.endswith(prompt.answer) and not rejected.endswith(prompt.answer)
    bare = sum(len(p.metadata["rejected"]) == len(p.answer) for p in prompts)
    if name == "arithmetic":
        assert 60 < bare < 140  # the others show the steps
        assert all(p.metadata["chosen"].startswith("(") for p in prompts)
    assert "chosen" not in opened(name)[0].metadata
