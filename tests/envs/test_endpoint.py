"""A program that knows nothing of rill is trained through its base_url, token by token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from rill.envs.agent import Agents
from rill.errors import EngineError
from rill.types import Episode, Failure, Message, Prompt
from tests.data.templates import HERMES, tokenizer_for
from tests.envs.scripted import Scripted, play, playing

TASK = Prompt(id="p", messages=(Message(role="user", content="What is tea?"),), answer="42")
PRICE = {
    "type": "function",
    "function": {"name": "price", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "tea", "n": 1}}\n</tool_call>'


def hermes(*replies: Any) -> Scripted:
    return Scripted(*replies, tokenizer=tokenizer_for(HERMES), ends="<|im_end|>")


async def episode_of(run: Any, policy: Scripted, **settings: Any) -> Episode:
    return await play(playing(run, policy.tokenizer, **settings), policy, TASK)


async def post(url: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        return await client.post(f"{url}/chat/completions", json=body)


async def test_openais_own_client_plays_a_tool_task_with_exact_tokens() -> None:
    openai = pytest.importorskip("openai")

    async def agent_program(base_url: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages: list[Any] = [{"role": "user", "content": "What is tea?"}]
            answer = await client.chat.completions.create(model="x", messages=messages, tools=[PRICE])
            said = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            arguments = json.loads(said.tool_calls[0].function.arguments)
            again = {"name": "price", "arguments": json.dumps(dict(reversed(arguments.items())))}
            call = {"id": said.tool_calls[0].id, "type": "function", "function": again}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "42", "tool_call_id": call["id"]},
            ]
            stream = await client.chat.completions.create(
                model="x", messages=messages, tools=[PRICE], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run(task: Prompt, agents: Agents) -> float:
        return float("42" in await agent_program(agents.policy.base_url))

    policy = hermes(CALL, "It costs 42.")
    episode = await episode_of(run, policy)
    (sample,) = episode.samples
    assert episode.reward == 1.0, episode.error
    assert policy.seen[1] == sample.token_ids[: len(policy.seen[1])].tolist(), "nothing is encoded again"
    assert sample.loss_mask.sum() == sum(t.end - t.start for t in sample.turns if t.role == "assistant")


async def test_openais_responses_are_one_exact_sample_whether_sent_whole_or_by_the_last_id() -> None:
    openai = pytest.importorskip("openai")
    tools = [{"type": "function", **PRICE["function"]}]

    async def run(task: Prompt, agents: Agents) -> float:
        async with openai.AsyncOpenAI(
            base_url=agents.policy.base_url, api_key="none", max_retries=0
        ) as client:
            items: list[Any] = [{"role": "user", "content": "What is tea?"}]
            first = await client.responses.create(model="x", instructions="Ask.", input=items, tools=tools)
            (call,) = first.output
            items += [
                call.model_dump(exclude_none=True),
                {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
            ]
            stream = await client.responses.create(
                model="x", instructions="Ask.", input=items, tools=tools, stream=True
            )
            *_, last = [event async for event in stream]
            assert last.type == "response.completed" and last.response.output_text == "It costs 42."
            again = await client.responses.create(
                model="x",
                instructions="Ask.",
                input="Sure?",
                tools=tools,
                previous_response_id=last.response.id,
            )
            return float(again.output_text == "Yes.")

    policy = hermes(CALL, "It costs 42.", "Yes.")
    episode = await episode_of(run, policy)
    (sample,) = episode.samples
    assert episode.reward == 1.0, episode.error
    assert policy.seen[2] == sample.token_ids[: len(policy.seen[2])].tolist(), "nothing is encoded again"
    assert episode.metrics["rewritten"] == 0 and episode.metrics["tool_calls"] == 1


async def test_anthropics_own_client_plays_a_tool_task_with_exact_tokens() -> None:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": "price", "input_schema": {"type": "object", "properties": {}}}]

    async def run(task: Prompt, agents: Agents) -> float:
        async with anthropic.AsyncAnthropic(
            base_url=agents.policy.base_url, api_key="none", max_retries=0
        ) as client:
            asked: dict[str, Any] = {"model": "x", "max_tokens": 99, "system": "Ask.", "tools": tools}
            messages: list[Any] = [{"role": "user", "content": "What is tea?"}]
            first = await client.messages.create(messages=messages, **asked)
            assert first.stop_reason == "tool_use" and first.content[0].input == {"item": "tea", "n": 1}
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "42"}
            messages += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            async with client.messages.stream(messages=messages, **asked) as stream:
                final = await stream.get_final_message()
            return float(final.content[0].text == "It costs 42." and final.stop_reason == "end_turn")

    policy = hermes(CALL, "It costs 42.")
    episode = await episode_of(run, policy)
    (sample,) = episode.samples
    assert episode.reward == 1.0, episode.error
    assert policy.seen[1] == sample.token_ids[: len(policy.seen[1])].tolist(), "nothing is encoded again"


async def test_a_program_with_several_agents_asks_for_them_as_models() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        for model in ("judge", "whatever"):
            await post(agents.policy.base_url, model=model, messages=[{"role": "user", "content": "a"}])
        agents["judge"].reward(0.5)
        return 1.0

    episode = await episode_of(run, hermes("x", "yy"), agents={"judge": {"temperature": 0.5}})
    assert {s.agent: s.num_sampled for s in episode.samples} == {"judge": 2, "policy": 3}
    assert episode.rewards == {"policy": 1.0, "judge": 0.5}


async def test_whoever_waits_long_for_a_stream_is_kept_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rill.envs.endpoint.PATIENCE_S", 0.05)

    class Slow(Scripted):
        async def generate(self, *args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().generate(*args, **options)

    async def run(task: Prompt, agents: Agents) -> float:
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        answer = await post(agents.policy.base_url, **ask)
        assert answer.text.startswith(": ") and answer.text.endswith("data: [DONE]\n\n")
        late = await post(agents.policy.base_url, **ask)
        return float("context_length_exceeded" in late.text and late.status_code == 400)

    policy = Slow("x", tokenizer=tokenizer_for(HERMES), ends="<|im_end|>")
    assert (await episode_of(run, policy, limits={"max_turns": 1})).reward == 1.0


async def test_two_episodes_do_not_meet_and_an_address_ends_with_its_episode() -> None:
    urls: list[str] = []

    async def run(task: Prompt, agents: Agents) -> float:
        urls.append(agents.policy.base_url)
        answer = await post(agents.policy.base_url, messages=[{"role": "user", "content": "a"}], max_tokens=5)
        assert answer.json()["usage"]["completion_tokens"] == 2
        return 1.0

    policy = hermes("x", "x")
    both = await asyncio.gather(episode_of(run, policy), episode_of(run, policy))
    assert [len(episode.samples) for episode in both] == [1, 1] and urls[0] != urls[1]
    assert policy.sampling[0].max_new_tokens == 5
    late = await post(urls[0], messages=[{"role": "user", "content": "a"}])
    assert late.status_code == 404 and "is over" in late.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "one answer at a time"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is not supported"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [PRICE, PRICE]}, "no two the same"),
    ],
)
async def test_a_wrong_request_is_told_and_costs_nothing(body: dict[str, Any], said: str) -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        answer = await post(agents.policy.base_url, **body)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
        await agents.policy.generate(task)
        return 1.0

    assert (await episode_of(run, hermes("x"))).failure is None


async def test_a_used_up_budget_is_an_error_that_clients_know() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        ask = {"messages": [{"role": "user", "content": "a"}]}
        assert (await post(agents.policy.base_url, **ask)).status_code == 200
        answer = await post(agents.policy.base_url, **ask)
        return float(answer.json()["error"]["code"] == "context_length_exceeded")

    episode = await episode_of(run, hermes("x", "x"), limits={"max_turns": 1})
    assert episode.reward == 1.0 and episode.samples[0].is_truncated


async def test_an_episode_that_is_put_back_or_loses_its_engine_ends_as_such() -> None:
    class Stopped(Scripted):
        def __init__(self, error: BaseException) -> None:
            super().__init__(tokenizer=tokenizer_for(HERMES))
            self.error = error

        async def generate(self, *_: Any, **__: Any) -> Any:
            raise self.error

    async def run(task: Prompt, agents: Agents) -> float:
        answer = await post(agents.policy.base_url, messages=[{"role": "user", "content": "a"}])
        raise ConnectionError(f"the model answered {answer.status_code}")

    with pytest.raises(asyncio.CancelledError):
        await episode_of(run, Stopped(asyncio.CancelledError()))
    with pytest.raises(EngineError, match="out of memory"):
        await episode_of(run, Stopped(EngineError("out of memory")))


async def test_a_program_that_fails_keeps_its_tokens() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await post(agents.policy.base_url, messages=[{"role": "user", "content": "a"}])
        raise ValueError("the program crashed")

    episode = await episode_of(run, hermes("x"))
    assert episode.failure is Failure.ENVIRONMENT and episode.samples[0].num_sampled == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [5]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "\ud800", "content": "x"}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\ud800"}}]},
                {"role": "user", "content": "x"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "What is tea?"},
                {"role": "assistant", "tool_calls": ["f"]},
            ]
        },
        {"messages": [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "tool_calls": 5}]},
        {"tools": ["price"]},
        {"tools": [{"function": 5}]},
        {"tools": [{"type": "function", "function": {"name": "price", "parameters": [5]}}]},
        {"max_tokens": -5},
        {"stream": True, "stream_options": 5},
        {"stop": [5]},
    ],
    ids=str,
)
async def test_a_request_that_makes_no_sense_is_refused_and_the_next_one_answered(wrong: Any) -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What is tea?"}]}
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
            url = f"{agents.policy.base_url}/chat/completions"
            refused = await client.post(url, content=json.dumps(asked | wrong))
            assert refused.status_code == 400, refused.text
            return float((await client.post(url, json=asked)).status_code == 200)

    assert (await episode_of(run, hermes("So."))).reward == 1.0
