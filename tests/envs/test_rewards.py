"""Each reward on answers that are right, wrong and strange."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.rewards.base import REWARDS
from rill.envs.rewards.code import check_tests, extract_code
from rill.envs.rewards.format import Shape, has_shape
from rill.envs.rewards.runner import RewardRunner, Score, ScoringConfig
from rill.envs.sandbox import missing
from rill.types import Prompt, Trajectory
from tests.envs.test_runner import answered, config, score_all


def value(reward: dict[str, Any], text: str, answer: Any = "4", **prompt: Any) -> float:
    """The score of an inline reward."""
    part = REWARDS.load(reward["type"])(config(reward))
    return float(part.score(Prompt(id="p", text="q", answer=answer, **prompt), text, answered(text)))


def run(reward: dict[str, Any], pairs: list[tuple[Prompt, Trajectory]], **scoring: Any) -> list[Score]:
    runner = RewardRunner(config(reward), ScoringConfig(**{"timeout_s": 30.0, **scoring}))
    try:
        return score_all(runner, pairs)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("whole", " 42 \n", "42"),
        ("last_line", "so\n\n42 \n", "42"),
        ("last_number", "27+58=(7+8=15)85", "85"),
        ("last_number", "it is 1,234.5, I think", "1,234.5"),
        ("last_number", "-3", "-3"),
        ("last_number", "none", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("tag", "<answer> 7 </answer>", "7"),
        ("tag", "<answer>7", None),
        ("hashes", "thus #### 18", "18"),
    ],
)
def test_answers_are_found_where_they_stand(form: str, text: str, found: str | None) -> None:
    assert extract_answer(text, AnswerForm(form)) == found


def test_exact_match() -> None:
    assert value({"type": "exact"}, "4\n") == 1.0
    assert value({"type": "exact"}, "4 apples") == 0.0
    assert value({"type": "exact", "ignore_case": True}, "Yes", answer="yes") == 1.0
    assert value({"type": "exact", "ignore_space": True}, "1 2", answer="12") == 1.0
    assert value({"type": "exact"}, "b", answer=["a", "b"]) == 1.0
    assert value({"type": "exact", "answer": "boxed", "wrong": -1.0}, "4") == -1.0


def test_numeric_match() -> None:
    assert value({"type": "numeric"}, "about 4.0000001") == 1.0
    assert value({"type": "numeric"}, "5") == 0.0
    assert value({"type": "numeric"}, "1,000", answer="1000") == 1.0
    assert value({"type": "numeric", "answer": "whole"}, "50%", answer="0.5") == 1.0
    assert value({"type": "numeric", "partial": 0.5}, "6") == pytest.approx(0.5 / 1.5)
    assert value({"type": "numeric"}, "nothing") == 0.0
    assert value({"type": "numeric"}, "123456789", answer="123456788") == 0.0, (
        "the next whole number is wrong"
    )
    assert value({"type": "numeric", "relative_tolerance": 0.01}, "101", answer="100") == 1.0
    with pytest.raises(ValueError, match="not a number"):
        value({"type": "numeric"}, "4", answer="four")


@pytest.mark.parametrize(
    ("shape", "text", "matches"),
    [
        ("think", "<think>a</think> b", True),
        ("think", "a</think> b", True),
        ("think", "<think>a</think>", False),
        ("think_answer", "<think>a</think>\n<answer>b</answer>", True),
        ("think_answer", "<think>a</think><answer>b</answer> and", False),
        ("think_answer", "<think>a</think><think>a</think><answer>b</answer>", False),
        ("number", " 12 ", True),
        ("number", "12a", False),
        ("boxed", r"so \boxed{2}", True),
        ("hashes", "####", False),
    ],
)
def test_shapes(shape: str, text: str, matches: bool) -> None:
    assert has_shape(text, Shape(shape)) is matches


def test_mathematical_equivalence() -> None:
    pytest.importorskip("math_verify")
    cases = [
        ("0.5", r"so \boxed{\frac{1}{2}}", 1.0),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        ("3", r"\boxed{4}", 0.0),
        ("3", "no idea", 0.0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1.0),
    ]
    pairs = [(Prompt(id=str(i), text="q", answer=a), answered(t)) for i, (a, t, _) in enumerate(cases)]
    scored = run({"type": "math"}, pairs, timeout_s=60.0, num_processes=1)
    assert [t.value for t in scored] == [v for _, _, v in cases]
    assert all(t.error is None for t in scored)


needs_sandbox = pytest.mark.skipif(missing() is not None, reason=f"no sandbox here: {missing()}")


@needs_sandbox
def test_code_is_judged_by_its_tests() -> None:
    asserts = Prompt(id="a", text="q", metadata={"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]})
    pairs_prompt = Prompt(id="b", text="q", answer={"inputs": ["1 2\n", "5 5\n"], "outputs": ["3", "10\n"]})
    good, half = "```python\ndef add(a, b):\n    return a + b\n```", "```\ndef add(a, b):\n    return 0\n```"
    program = "Here:\n```python\nprint(sum(map(int, input().split())))\n```"
    scored = run(
        {"type": "code", "partial": True},
        [
            (asserts, answered(good)),
            (asserts, answered(half)),
            (pairs_prompt, answered(program)),
            (asserts, answered("```py")),
        ],
    )
    assert [t.value for t in scored] == [1.0, 0.5, 1.0, 0.0]
    all_or_nothing = run(
        {"type": "code"}, [(asserts, answered(half)), (Prompt(id="c", text="q"), answered(good))]
    )
    assert all_or_nothing[0].value == 0.0 and all_or_nothing[0].error is None
    assert "no tests" in (all_or_nothing[1].error or "")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("501", "asserts nothing"),
        (["add(1, 2) == 3"], "asserts nothing"),
        (["assert add("], "is not Python"),
        ({"inputs": ["1"], "outputs": []}, "do not pair"),
        ([], "no tests"),
        (None, "no tests"),
    ],
)
def test_tests_that_test_nothing_are_no_score(tests: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_tests("p", tests)


@needs_sandbox
def test_programs_wait_for_one_another_without_losing_their_time() -> None:
    prompt = Prompt(id="a", text="q", metadata={"tests": ["assert True"]})
    slow = answered("import time; time.sleep(0.5)")
    scored = run({"type": "code", "timeout_s": 5.0, "max_concurrent": 2}, [(prompt, slow)] * 24)
    assert [t.error for t in scored] == [None] * 24


def test_a_prompt_without_an_answer_is_no_match_but_a_failure() -> None:
    scored = run({"type": "exact"}, [(Prompt(id="p", text="q"), answered("None"))])[0]
    assert scored.value == 0.0 and "has no answer" in (scored.error or "")
    with pytest.raises(ValueError, match="has no answer"):
        value({"type": "regex", "pattern": "None", "compare": True}, "None", answer=None)


def test_code_is_taken_from_the_last_whole_block() -> None:
    assert extract_code("```python\na\n```\nthen\n```python\nb\n```") == "b\n"
    assert extract_code("print(1)") == "print(1)"
    assert extract_code("```python\nnever closed") is None


@pytest.fixture
def judge() -> Iterator[tuple[str, list[dict[str, Any]], list[Any]]]:
    """An endpoint that answers from a list: a status, or words."""
    asked: list[dict[str, Any]] = []
    answers: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            status = answer if isinstance(answer, int) else 200
            body = (
                json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
                if status == 200
                else b"busy"
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked, answers
    server.shutdown()
    server.server_close()


def test_a_judge_scores_after_a_busy_server_and_words_without_a_score(judge: Any) -> None:
    url, asked, answers = judge
    answers[:] = [503, "I cannot say", "Fine. Score: 3\nNo: Score: 8"]
    prompt = Prompt(id="p", text="2+2?", answer="4")
    scored = run({"type": "judge", "url": url, "model": "m"}, [(prompt, answered("it is {reference} 4"))])[0]
    assert scored.value == pytest.approx(0.8) and scored.error is None and len(asked) == 3
    content = asked[0]["messages"][0]["content"]
    assert "2+2?" in content and "it is {reference} 4" in content


def test_a_judge_that_refuses_is_data(judge: Any) -> None:
    url, asked, answers = judge
    answers[:] = [401]
    scored = run({"type": "judge", "url": url, "model": "m"}, [(Prompt(id="p", text="q"), answered("x"))])[0]
    assert scored.value == 0.0 and "401" in (scored.error or "") and len(asked) == 1


def test_a_judge_needs_a_scale() -> None:
    with pytest.raises(ValueError, match="must lie below"):
        REWARDS.load("judge").Config(url="http://x", model="m", lowest=5, highest=5)


async def one_after_the_other(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    await asyncio.sleep(0.005)
    return float(len(text))


def test_two_event_loops_can_share_one_runner() -> None:
    reward = {
        "type": "function",
        "function": "tests.envs.test_rewards:one_after_the_other",
        "max_concurrent": 2,
    }
    runner = RewardRunner(config(reward))
    pairs = [(Prompt(id="p", text="q"), answered("x" * n)) for n in range(8)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: score_all(runner, pairs), range(2)))
    runner.close()
    assert [[t.value for t in scored] for scored in both] == [[float(n) for n in range(8)]] * 2


def test_reasoning_gym_scores_its_own_tasks() -> None:
    pytest.importorskip("reasoning_gym")
    from rill.data.base import DATASETS, open_indexed

    prompt = open_indexed(DATASETS.load("reasoning_gym").Config(name="leg_counting", size=3))[0]
    right, wrong = answered(f"<answer>{prompt.answer}</answer>"), answered("<answer>-1</answer>")
    scored = run({"type": "reasoning_gym"}, [(prompt, right), (prompt, wrong)], num_processes=1, timeout_s=60)
    assert scored[0].value == 1.0 and scored[1].value < 0.5
