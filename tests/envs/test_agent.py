"""Conversations and tools through a whole episode: exact tokens, whatever the template and the model do."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from rill.envs.agent import Agents
from rill.envs.events import BEGUN, EventLog
from rill.envs.tools import as_tool
from rill.types import Episode, Failure, Message, Prompt
from tests.data.templates import FORGETFUL, HERMES, tokenizer_for
from tests.envs.scripted import Scripted, play, playing

TASK = Prompt(id="p", messages=(Message(role="user", content="What is tea?"),), answer="42")
PRICES = {"tea": 42}


def hermes(*replies: Any) -> Scripted:
    return Scripted(*replies, tokenizer=tokenizer_for(HERMES), ends="<|im_end|>")


def call(name: str = "price", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def price(item: str) -> int:
    """What an item costs."""
    return PRICES[item]


async def shop(task: Prompt, agents: Agents) -> float:
    reply = await agents.policy.act(task.messages, tools=[price])
    return float(str(task.answer) in reply.text)


async def episode_of(run: Any, policy: Scripted, prompt: Prompt = TASK, **options: Any) -> Episode:
    settings = options.pop("settings", {})
    return await play(playing(run, policy.tokenizer, **settings), policy, prompt, **options)


async def test_a_tool_task_is_played_with_exact_tokens() -> None:
    policy = hermes(call(item="tea"), "It costs 42.")
    episode = await episode_of(shop, policy)
    (sample,) = episode.samples
    assert episode.reward == 1.0 and episode.metrics["tool_calls"] == 1 and episode.metrics["rewritten"] == 0
    text = policy.tokenizer.decode(sample.token_ids.tolist())
    assert text.endswith(
        "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt costs 42.<|im_end|>"
    )
    assert text.count("<|im_start|>") == 5, "the tools, the question, the call, its result, the answer"
    assert policy.seen[1] == sample.token_ids[: len(policy.seen[1])].tolist(), "nothing is encoded again"
    for turn in sample.turns:
        assert sample.loss_mask[turn.start : turn.end].all() == (turn.role == "assistant")
    assert sample.turns[1].metadata["tools"] == [{"name": "price", "ok": True}]


async def test_what_act_is_told_holds_for_every_turn() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents.policy.act(task.messages, [price], stop=["!"], is_trained=False)
        return 1.0

    policy = hermes(call(item="tea"), "It costs 42.")
    (sample,) = (await episode_of(run, policy)).samples
    assert [sampling.stop for sampling in policy.sampling] == [("!",), ("!",)]
    assert not sample.loss_mask.any()


async def test_tools_that_are_offered_and_never_called_are_told() -> None:
    episode = await episode_of(shop, hermes("42, I guess"))
    assert episode.metrics["no_tool_call"] == 1.0 and episode.metrics["tool_calls"] == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("cost", item="tea"), "error: there is no tool 'cost'"),
        (call(thing="tea"), "error: price: item: Field required; thing: Extra inputs are not permitted"),
        (call(item="milk"), "error: KeyError: 'milk'"),
        (call(item=["tea"]), "error: price: item: Input should be a valid string"),
    ],
)
async def test_a_wrong_call_is_answered_with_its_error(said: str, told: str) -> None:
    episode = await episode_of(shop, hermes(said, call(item="tea"), "42"))
    assert episode.samples[0].turns[2].text == told and episode.reward == 1.0
    assert episode.metrics["tool_errors"] == 1 and episode.metrics["tool_calls"] == 2


async def test_a_malformed_call_is_the_answer_and_counted() -> None:
    episode = await episode_of(shop, hermes("<tool_call>price(tea)</tool_call>"))
    assert episode.metrics["malformed_calls"] == 1 and episode.failure is None
    assert "price(tea)" in episode.samples[0].turns[-1].text


async def test_a_tool_that_hangs_is_told_to_the_model_plain_or_async() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        async def waits() -> str:
            await asyncio.sleep(3600)
            return ""

        def sleeps() -> str:
            time.sleep(20)
            return ""

        await agents.policy.act(task.messages, tools=[waits, sleeps])
        return 1.0

    policy = hermes(call("waits"), call("sleeps"), "done")
    episode = await episode_of(run, policy, settings={"limits": {"tool_timeout_s": 0.1}})
    told = [turn.text for turn in episode.samples[0].turns if turn.role == "tool"]
    assert told == ["error: waits took longer than 0.1 s", "error: sleeps took longer than 0.1 s"]


async def test_a_model_that_calls_for_ever_is_cut_off() -> None:
    episode = await episode_of(shop, hermes(lambda _: call(item="tea")))
    assert episode.metrics["turns"] == 16 and episode.samples[0].is_truncated and episode.failure is None


async def test_a_conversation_without_a_turn_is_an_error_that_says_so() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents.policy.act(task.messages, max_turns=0)
        return 1.0

    episode = await episode_of(run, hermes("x"))
    assert episode.failure is Failure.ENVIRONMENT and "not max_turns=0" in str(episode.error)


async def test_two_tools_of_one_name_are_an_error() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents.policy.act(task.messages, tools=[as_tool(print_), as_tool(print_)])
        return 1.0

    episode = await episode_of(run, hermes("x"))
    assert episode.failure is Failure.ENVIRONMENT and "no two the same: print_" in str(episode.error)


def print_(text: str) -> None:
    """Say it."""


class TestHistories:
    """Where a conversation goes on."""

    async def test_it_goes_on_behind_the_reply_also_written_anew(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            reply = await agents.policy.say(task.messages)
            again = {"role": "assistant", "content": [{"type": "text", "text": reply.text}]}
            first = {"role": "user", "content": task.messages[0].content}
            await agents.policy.say([first, again, {"role": "user", "content": "And milk?"}])
            return 1.0

        episode = await episode_of(run, hermes("42.", "43."))
        assert len(episode.samples) == 1 and episode.metrics["rewritten"] == 0

    async def test_thoughts_stay_where_the_template_would_drop_them(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            history: list[Message] = list(task.messages)
            for _ in range(3):
                reply = await agents.policy.say(history)
                history += [reply.message, Message(role="user", content="Sure?")]
            return 1.0

        policy = Scripted(
            *["<think>hm</think>yes"] * 3, tokenizer=tokenizer_for(FORGETFUL), ends="<|im_end|>"
        )
        episode = await episode_of(run, policy)
        assert len(episode.samples) == 1
        assert policy.tokenizer.decode(episode.samples[0].token_ids.tolist()).count("hm") == 3

    async def test_a_rewritten_history_is_a_branch_and_shared_turns_train_once(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            one = await agents.policy.say(task.messages)
            history = [*task.messages, one.message, Message(role="user", content="more")]
            two = await agents.policy.say(history)
            await agents.policy.say([*history, two.message, Message(role="user", content="b")])
            short = Message(role="assistant", content="(a summary)")
            await agents.policy.say([*task.messages, short, Message(role="user", content="c")])
            await agents.policy.say([*history, two.message, Message(role="user", content="d")])
            return 1.0

        episode = await episode_of(run, hermes(*"12345"))
        assert len(episode.samples) == 3 and episode.metrics["rewritten"] == 1
        assert sum(int(s.loss_mask.sum()) for s in episode.samples) == 10, (
            "five answers of two tokens, once each"
        )
        assert {sample.reward for sample in episode.samples} == {1.0}

    async def test_several_answers_to_one_history_are_siblings(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            await asyncio.gather(*(agents.policy.say(task.messages) for _ in range(3)))
            return 1.0

        policy = hermes("1", "2", "3")
        episode = await episode_of(run, policy)
        assert len(episode.samples) == 3 and len(set(policy.names)) == 3

    async def test_nothing_new_is_refused(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            reply = await agents.policy.say(task.messages)
            await agents.policy.say([*task.messages, reply.message])
            return 1.0

        episode = await episode_of(run, hermes("1", "2"))
        assert "the last message is the agent's own reply" in str(episode.error)


class TestReplay:
    """An episode that is run again calls no tool twice."""

    async def test_every_one_of_many_calls_in_one_answer_has_its_own_result(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            async def double(number: int) -> int:
                return 2 * number

            await agents.policy.act(task.messages, tools=[double])
            return 1.0

        said = "".join(call("double", number=n) for n in range(70))
        log = EventLog()
        for _ in range(2):
            episode = await episode_of(run, hermes(said, "done"), log=log)
            results = [turn.text for turn in episode.samples[0].turns if turn.role == "tool"]
            assert results == ["\n".join(str(2 * n) for n in range(70))]

    async def test_results_come_from_the_log(self) -> None:
        called: list[str] = []

        async def run(task: Prompt, agents: Agents) -> float:
            def buy(item: str) -> str:
                """Buy an item."""
                called.append(item)
                return f"receipt {len(called)}"

            await agents.policy.act(task.messages, tools=[buy])
            return 1.0

        log = EventLog()
        texts = []
        for _ in range(2):
            episode = await episode_of(run, hermes(call("buy", item="tea"), "done"), log=log)
            texts.append([turn.text for turn in episode.samples[0].turns])
        assert called == ["tea"] and texts[0] == texts[1]

    async def test_another_history_finds_nothing(self) -> None:
        called: list[str] = []

        async def run(task: Prompt, agents: Agents) -> float:
            reply = await agents.policy.generate(task)
            called.append(await reply.call(print_, text="x"))
            return 1.0

        log = EventLog()
        for said in ("a", "b", "a"):
            await episode_of(run, hermes(said), log=log)
        assert len(log.events) == 2 and len(called) == 3

    async def test_what_was_begun_and_must_not_be_repeated_is_lost(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            reply = await agents.policy.generate(task)
            result = await reply.call(as_tool(print_, once=True), text="x")
            return float("was lost" in result)

        log = EventLog()
        await episode_of(run, hermes("a"), log=log)
        (key,) = log.events
        log.record(key, BEGUN)
        assert (await episode_of(run, hermes("a"), log=log)).reward == 1.0
