from __future__ import annotations

import re

from rill.data.base import DATASETS, open_indexed
from rill.data.tasks.vault import look_up
from rill.types import Prompt
from tests.envs.scripted import Scripted, environment, play


def task(worked: float = 1.0) -> Prompt:
    return open_indexed(DATASETS.load("vault").Config(worked=worked, size=4))[0]


async def test_asking_for_every_key_gives_the_answer_by_the_same_tokens_through_http_and_mcp() -> None:
    prompt = task()
    vault, first = re.fullmatch(r"(\w+):(\w+)\?", prompt.text or "").groups()  # type: ignore[union-attr]

    def solver(seen: str) -> str:
        found = re.findall(r"\[(\w+)\]", seen)
        if len(found) == 2:
            return f"={found[-1]}"
        return f">{'<get>'}{found[-1] if found else first}</get>"

    first_policy = Scripted(solver)
    episode = await play(environment("vault"), first_policy, prompt)
    assert episode.reward == 1.0 and episode.metrics["tool_calls"] == 2 and episode.metrics["turns"] == 3
    told = [turn.text for turn in episode.samples[0].turns if turn.role == "tool"]
    assert told[0] == f"[{look_up(vault, first, is_last=False)}]" and told[1] == f"[{prompt.answer}]"
    ways = {
        "examples.own_agent:run": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        "examples.own_mcp:run": {},
    }
    for function, settings in ways.items():
        policy = Scripted(solver)
        other = await play(environment("function", function=function, **settings), policy, prompt)
        assert other.reward == 1.0, other.error
        assert other.samples[0].token_ids.tolist() == episode.samples[0].token_ids.tolist(), function
        assert policy.names == first_policy.names, "the same requests get the same answers: equal curves"
    (blind,) = (await play(environment("vault", max_calls=0), Scripted(solver), prompt)).samples
    assert blind.reward == 0.0


async def test_a_guess_is_one_turn_and_what_the_warm_up_shows_is_what_the_tool_says() -> None:
    prompt = task()
    guess = await play(environment("vault"), Scripted(">=99"), prompt)
    assert guess.reward in (0.0, 1.0) and guess.metrics["no_tool_call"] == 1.0
    assert (
        "no_tool_call" not in (await play(environment("vault", max_calls=0), Scripted(">=9"), prompt)).metrics
    )
    assert task(worked=0.0).metadata["solution"] == f">={prompt.answer}"
    said = prompt.metadata["solution"]
    assert re.fullmatch(r"><get>\w\d</get>\[\w\d\]<get>\w\d</get>\[\d\d\]=\d\d", said), said
    assert said.endswith(f"[{prompt.answer}]={prompt.answer}")
