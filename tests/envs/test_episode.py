"""From task to samples, whatever the environment does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.events import EventLog
from rill.envs.rewards.base import Isolation
from rill.envs.rewards.runner import Score
from rill.envs.sandbox.base import SandboxError
from rill.errors import EngineError, TooLongError
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Failure, Message, Prompt, SamplingParams, StopReason
from tests.envs.scripted import QUESTION, Scripted, environment, play, playing


async def test_an_answer_is_rewarded_and_masked_token_by_token() -> None:
    policy = Scripted("85")
    episode = await play(environment(), policy)
    (sample,) = episode.samples
    assert episode.reward == sample.reward == 1.0 and sample.reward_parts == {"exact": 1.0}
    assert episode.failure is None and sample.error is None
    assert policy.seen == [sample.token_ids[:6].tolist()]
    assert sample.loss_mask.tolist() == [False] * 6 + [True] * 3
    assert sample.versions.tolist() == [-1] * 6 + [3] * 3
    assert sample.logprobs.tolist() == [0.0] * 6 + [-0.5] * 3
    assert sample.turn_ids.tolist() == [0] * 6 + [1] * 3
    assert sample.stop_reason is StopReason.EOS
    assert (sample.prompt_id, sample.group_id, sample.id, sample.episode_id) == ("p", "g", "e", "e")
    assert episode.metrics["turns"] == 1


async def test_chat_prompts_use_the_template() -> None:
    policy = Scripted("4")
    prompt = Prompt(id="p", messages=(Message(role="user", content="2+2?"),), answer="4")
    episode = await play(environment(), policy, prompt)
    assert policy.tokenizer.decode(policy.seen[0]) == "<user>2+2?<assistant>"
    assert episode.reward == 1.0


class TestFailures:
    """Data, with every token that was sampled, and never a sample to be trained on."""

    async def fails(self, env: Environment, policy: Any = None) -> Any:
        episode = await play(env, policy or Scripted("85"))
        (sample,) = episode.samples
        assert not sample.loss_mask.any() and sample.error == episode.error
        assert sample.stop_reason is StopReason.ERROR and episode.rewards == {}
        return episode

    async def test_what_an_environment_raises_keeps_the_tokens_and_says_where(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            await agents.policy.generate(task)
            raise ConnectionError("the tool server said 503")

        episode = await self.fails(playing(run))
        assert episode.failure is Failure.ENVIRONMENT
        assert "ConnectionError: the tool server said 503" in episode.error
        assert f"test_episode.py:{run.__code__.co_firstlineno + 2} in run" in episode.error
        assert episode.samples[0].num_sampled == 3

    async def test_before_anything_was_asked_the_prompt_is_there(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            raise ValueError("at once")

        episode = await self.fails(playing(run))
        assert episode.samples[0].num_tokens == 6 and episode.samples[0].num_sampled == 0

    async def test_a_hanging_environment_is_ended_and_its_place_named(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            await agents.policy.generate(task)
            await asyncio.sleep(3600)

        episode = await self.fails(playing(run, limits={"episode_timeout_s": 0.1}))
        assert episode.failure is Failure.TIMEOUT
        assert f"test_episode.py:{run.__code__.co_firstlineno + 2} in run" in episode.error
        assert episode.samples[0].num_sampled == 3

    async def test_one_that_does_not_heed_its_cancellation_is_left_behind(self) -> None:
        going_on = asyncio.Event()

        async def run(task: Prompt, agents: Agents) -> None:
            while not going_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.02)

        episode = await self.fails(
            playing(run, limits={"episode_timeout_s": 0.05, "teardown_timeout_s": 0.05})
        )
        going_on.set()
        assert episode.failure is Failure.TIMEOUT

    async def test_a_policy_that_does_not_answer_costs_the_turn(self) -> None:
        class Silent(Scripted):
            async def generate(self, *_: Any, **__: Any) -> Any:
                await asyncio.sleep(3600)

        episode = await self.fails(environment(limits={"turn_timeout_s": 0.05}), Silent())
        assert episode.failure is Failure.TIMEOUT and "no answer within 0.05 s" in episode.error

    async def test_a_prompt_that_does_not_fit_costs_its_episode(self) -> None:
        class Full(Scripted):
            async def generate(self, *_: Any, **__: Any) -> Any:
                raise TooLongError("407 tokens, and at most 127 fit here")

        episode = await self.fails(environment(), Full())
        assert episode.failure is Failure.TOO_LONG and "at most 127" in episode.error

    @pytest.mark.parametrize("answer", ["not a number", "nan", "inf", None])
    async def test_a_reward_that_fails_is_no_zero(self, answer: str | None) -> None:
        env = environment(reward={"type": "numeric"})
        episode = await play(env, Scripted("4"), Prompt(id="p", text="q", answer=answer))
        assert episode.failure is Failure.REWARD and "reward numeric" in str(episode.error)
        assert not episode.samples[0].loss_mask.any() and episode.samples[0].num_sampled == 2

    async def test_a_weighted_reward_beyond_all_numbers_fails_the_episode(self) -> None:
        terms = [{"reward": {"type": "exact", "correct": 1e300}, "weight": 1e300}]
        episode = await self.fails(environment(reward={"type": "mix", "terms": terms}))
        assert episode.failure is Failure.REWARD and "must be a number" in episode.error

    async def test_an_environment_without_a_reward_says_so(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            await agents.policy.generate(task)

        episode = await self.fails(playing(run))
        assert episode.failure is Failure.NO_REWARD and "return a number" in episode.error

    @pytest.mark.parametrize("value", ["much", float("nan"), object()])
    async def test_a_reward_that_is_no_number_is_told(self, value: object) -> None:
        async def run(task: Prompt, agents: Agents) -> Any:
            await agents.policy.generate(task)
            return value

        episode = await self.fails(playing(run))
        assert episode.failure is Failure.REWARD

    async def test_a_failed_engine_passes(self) -> None:
        async def broken(task: Prompt, agents: Agents) -> None:
            raise EngineError("out of memory")

        with pytest.raises(EngineError):
            await play(playing(broken), Scripted())

    @pytest.mark.parametrize("error", [asyncio.CancelledError("stopped"), EngineError("out of memory")])
    @pytest.mark.parametrize("how", ["asks", "swallows", "in a group", "in a tool"])
    async def test_a_stopped_or_failed_engine_ends_the_episode_whatever_is_made_of_it(
        self, error: BaseException, how: str
    ) -> None:
        class Gone(Scripted):
            async def generate(self, *_: Any, **__: Any) -> Any:
                raise error

        async def run(task: Prompt, agents: Agents) -> float:
            async def ask() -> str:
                return (await agents.policy.generate(task)).text

            match how:
                case "asks":
                    await ask()
                case "swallows":
                    with contextlib.suppress(BaseException):
                        await ask()
                case "in a group":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(ask())
                        group.create_task(asyncio.sleep(60))
                case _:
                    first = await agents["first"].generate(task, max_new_tokens=1)
                    await first.call(ask)
            return 1.0

        class Late(Gone):
            async def generate(self, *given: Any, **named: Any) -> Any:
                is_first = named["name"].startswith("first")
                return await (Scripted.generate if is_first else Gone.generate)(self, *given, **named)

        log = EventLog()
        with pytest.raises(type(error)):
            await play(playing(run), Late("x"), log=log)
        assert log.events == {}, "what a tool said of it is no result"

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("x"), asyncio.CancelledError("mine")])
    @pytest.mark.parametrize("place", ["run", "setup", "reward"])
    async def test_what_ends_a_program_ends_the_episode_alone(self, error: BaseException, place: str) -> None:
        async def quits(*_: Any) -> float:
            raise error

        async def run(task: Prompt, agents: Agents) -> float:
            await agents.policy.generate(task)
            return await quits()

        match place:
            case "setup":
                env: Environment = Session(setup=quits)
            case "reward":
                env = environment()
                env.rewards.rewards[0] = SimpleNamespace(isolation=Isolation.ASYNC, score=quits)  # type: ignore
            case _:
                env = playing(run)
        episode = await self.fails(env)
        assert type(error).__name__ in episode.error and str(error) in episode.error
        assert f"test_episode.py:{quits.__code__.co_firstlineno + 1} in quits" in episode.error

    async def test_an_episode_that_is_cancelled_from_outside_is_cancelled(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            await asyncio.sleep(60)

        episode = asyncio.ensure_future(play(playing(run), Scripted()))
        await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    async def test_an_exception_that_cannot_be_written_is_named(self) -> None:
        class Broken(Exception):
            def __str__(self) -> str:
                raise AttributeError("response")

        async def run(task: Prompt, agents: Agents) -> None:
            raise Broken

        assert "Broken" in (await self.fails(playing(run))).error

    async def test_a_sandbox_that_breaks_costs_its_episode(self) -> None:
        async def run(task: Prompt, agents: Agents) -> None:
            raise SandboxError("the session has ended")

        assert (await self.fails(playing(run))).failure is Failure.ENVIRONMENT

    @pytest.mark.parametrize("value", [10**400, 1e39, np.zeros(2), "0.5"], ids=str)
    async def test_a_number_that_is_none_fails_the_episode(self, value: object) -> None:
        async def run(task: Prompt, agents: Agents) -> Any:
            await agents.policy.generate(task)
            return value

        assert (await self.fails(playing(run))).failure is Failure.REWARD

    @pytest.mark.parametrize("is_broken", [False, True])
    async def test_a_metric_that_is_no_number_fails_the_episode(self, is_broken: bool) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            await agents.policy.generate(task)
            given: dict[str, Any] = {"bad": None, "good": np.float32(2.0)}
            agents.metrics.update(given)
            if is_broken:
                raise ValueError
            return 1.0

        episode = await self.fails(playing(run))
        assert "agents.metrics['bad']" in episode.error
        assert episode.metrics["good"] == 2.0 and "bad" not in episode.metrics

    async def test_a_prompt_that_the_template_refuses_costs_its_episode(self) -> None:
        prompt = Prompt(id="row 7", messages=(Message(role="user", content="?"),))
        episode = await play(environment(chat_template="{{ raise_exception('no') }}"), Scripted(), prompt)
        assert episode.failure is Failure.ENVIRONMENT and "template refuses" in str(episode.error)
        assert episode.samples[0].num_tokens > 0 and not episode.samples[0].loss_mask.any()

    async def test_a_run_that_is_no_coroutine_costs_its_episode(self) -> None:
        class Plain(Environment):
            def run(self, task: Prompt, agents: Agents) -> float:  # type: ignore[override]
                return 1.0

        env = Plain(Environment.Config.model_validate({"type": "x:Plain"}), build_char_tokenizer())
        assert (await self.fails(env)).failure is Failure.ENVIRONMENT


class TestBudgets:
    """Running out of a budget is no failure: the episode is cut off, scored, and can be left out by its stop reason."""

    async def forever(self, task: Prompt, agents: Agents) -> float:
        reply = await agents.policy.generate(task)
        while True:
            reply = await agents.policy.generate(reply.then("again"))

    async def test_of_turns(self) -> None:
        policy = Scripted(*["x"] * 9)
        episode = await play(playing(self.forever, limits={"max_turns": 3}), policy)
        assert episode.failure is None and episode.reward == 0.0 and len(policy.seen) == 3
        assert episode.samples[0].is_truncated and episode.samples[0].loss_mask.sum() == 6

    async def test_of_agents_that_talk_side_by_side(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            async with asyncio.TaskGroup() as group:
                for name in "ab":
                    group.create_task(agents[name].generate(task))
            return 1.0

        episode = await play(playing(run, limits={"max_turns": 1}), Scripted(*["x"] * 9))
        assert episode.failure is None and episode.samples[0].is_truncated

    async def test_of_tokens(self) -> None:
        policy = Scripted(*["x"] * 9)
        episode = await play(playing(self.forever, limits={"max_tokens": 20}), policy)
        assert episode.samples[0].is_truncated and episode.samples[0].num_tokens <= 20
        assert policy.sampling[-1].max_new_tokens <= 20

    async def test_of_the_engines_context(self) -> None:
        class Small(Scripted):
            async def generate(self, token_ids: Any, *args: Any, **named: Any) -> Any:
                if len(token_ids) > 10:
                    raise TooLongError("10 fit")
                return await super().generate(token_ids, *args, **named)

        episode = await play(playing(self.forever), Small(*["x"] * 9))
        assert episode.failure is None and episode.samples[0].is_truncated


class Session(Environment):
    """Notes what becomes of its sessions."""

    def __init__(self, **how: Any) -> None:
        limits = {"setup_timeout_s": 0.1, "teardown_timeout_s": 0.1}
        super().__init__(
            self.Config.model_validate({"type": "x:Session", "limits": limits}), build_char_tokenizer()
        )
        self.how = how
        self.events: list[str] = []

    @asynccontextmanager
    async def session(self, task: Prompt) -> AsyncIterator[str]:
        if "setup" in self.how:
            await self.how["setup"]()
        self.events.append("open")
        try:
            yield "a sandbox"
        finally:
            self.events.append("close")
            if "teardown" in self.how:
                await self.how["teardown"]()

    async def run(self, task: Prompt, agents: Agents) -> float:
        assert agents.session == "a sandbox"
        await agents.policy.generate(task)
        if "run" in self.how:
            await self.how["run"]()
        return 1.0


class TestSessions:
    async def test_is_there_while_the_episode_runs(self) -> None:
        env = Session()
        assert (await play(env, Scripted("85"))).reward == 1.0
        assert env.events == ["open", "close"]

    async def test_is_given_back_also_after_a_failure(self) -> None:
        async def raises() -> None:
            raise ValueError("in run")

        env = Session(run=raises)
        assert (await play(env, Scripted("85"))).failure is Failure.ENVIRONMENT
        assert env.events == ["open", "close"]

    async def test_that_cannot_be_made_fails_the_episode(self) -> None:
        async def hangs() -> None:
            await asyncio.sleep(3600)

        episode = await play(Session(setup=hangs), Scripted())
        assert episode.failure is Failure.SETUP and "not finished within 0.1 s" in str(episode.error)

    async def test_that_hangs_when_it_is_given_back_costs_nothing(self) -> None:
        async def hangs() -> None:
            await asyncio.sleep(3600)

        episode = await play(Session(teardown=hangs), Scripted("85"))
        assert episode.failure is None and episode.reward == 1.0


class TestSeveralSamples:
    async def test_two_agents_are_two_samples_with_rewards_of_their_own(self) -> None:
        async def debate(task: Prompt, agents: Agents) -> None:
            await asyncio.gather(agents["pro"].generate(task), agents["contra"].generate(task))
            agents["pro"].reward(1.0)
            agents["contra"].reward(-1.0)

        episode = await play(playing(debate), Scripted(lambda _: "so"))
        pro, contra = episode.samples
        assert (pro.agent, pro.reward, contra.agent, contra.reward) == ("pro", 1.0, "contra", -1.0)
        assert dict(episode.rewards) == {"pro": 1.0, "contra": -1.0}
        assert pro.id != contra.id and pro.episode_id == contra.episode_id == "e"

    async def test_the_policy_comes_first_whoever_spoke_first(self) -> None:
        async def asked(task: Prompt, agents: Agents) -> float:
            await agents["helper"].generate(task)
            agents["helper"].reward(0.25)
            await agents.policy.generate(task)
            return 1.0

        episode = await play(playing(asked), Scripted("hint", "85"))
        assert [(s.agent, s.reward) for s in episode.samples] == [("policy", 1.0), ("helper", 0.25)]
        assert list(episode.rewards) == ["policy", "helper"] and episode.reward == 1.0

    @pytest.mark.parametrize("mentioned", ["policy", "helper"])
    async def test_the_reward_is_for_who_was_asked_and_not_for_who_was_only_mentioned(
        self, mentioned: str
    ) -> None:
        async def asked(task: Prompt, agents: Agents) -> float:
            assert agents[mentioned].is_trained
            await agents["solver"].generate(task)
            return 0.5

        episode = await play(playing(asked, reward={"type": "exact"}), Scripted("85"))
        assert [(s.agent, s.reward) for s in episode.samples] == [("solver", 1.5)]
        assert dict(episode.rewards) == {"solver": 1.5}

    async def test_an_agent_that_is_not_trained_has_its_model_and_no_sample(self) -> None:
        async def asked(task: Prompt, agents: Agents) -> float:
            hint = await agents["helper"].generate(task)
            await agents.policy.generate(task)
            return float(hint.text == "hint")

        policy = Scripted("hint", "85")
        agents = {"helper": {"model": "big", "is_trained": False, "temperature": 0.0}}
        episode = await play(playing(asked, agents=agents), policy)
        assert [sample.agent for sample in episode.samples] == ["policy"] and episode.reward == 1.0
        assert policy.models == ["big", None] and policy.sampling[0].temperature == 0.0

    async def test_parallel_calls_are_named_by_what_they_continue(self) -> None:
        async def run(task: Prompt, agents: Agents) -> float:
            first = await agents.policy.generate(task)
            await asyncio.gather(*(agents.policy.generate(first.then(tail)) for tail in tails))
            return 1.0

        tails: list[str] = []
        names = []
        for order in ("aab", "baa"):
            tails[:] = order
            policy = Scripted(lambda _: "x")
            episode = await play(playing(run), policy)
            assert len(episode.samples) == 3 and sum(s.loss_mask.sum() for s in episode.samples) == 8
            names.append(dict(zip(policy.names, policy.seen, strict=True)))
        assert names[0] == names[1], "whatever their order, the same name means the same tokens"
        assert len(names[0]) == 4


async def test_rewards_by_turn_reach_the_tokens() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        reply = await agents.policy.generate(task)
        agents.policy.reward(0.5)
        await agents.policy.generate(reply.then("ok"))
        return 1.0

    episode = await play(playing(run), Scripted("1", "2"))
    (sample,) = episode.samples
    assert sample.reward == 1.5 and sample.rewards is not None
    assert np.flatnonzero(sample.rewards).tolist() == [7, 11] and sample.rewards.sum() == 1.5


async def test_an_episode_that_is_over_is_freed_at_once() -> None:
    kept: list[weakref.ref[Any]] = []

    async def run(task: Prompt, agents: Agents) -> float:
        reply = await agents.policy.say([Message(role="user", content="?")])
        kept.extend((weakref.ref(agents), weakref.ref(agents.policy), weakref.ref(reply)))
        return 1.0

    env, was_enabled = playing(run), gc.isenabled()
    gc.disable()
    try:
        await play(env, Scripted("1"))
        await asyncio.sleep(0)
        assert [alive() for alive in kept] == [None, None, None]
    finally:
        if was_enabled:
            gc.enable()


async def test_a_function_is_an_environment() -> None:
    env = environment("function", function="examples.own_environment:second_try")
    episode = await play(env, Scripted("84", "85"))
    assert episode.reward == 0.5 and "wrong, again" in episode.samples[0].turns[2].text


def test_a_function_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ValueError, match="not an `async def`"):
        environment("function", function="rill.envs.tools:shown")
    with pytest.raises(ValueError, match=r"cannot be called with \(task, agents\)"):
        environment("function", function="tests.envs.test_episode:takes_one")


async def test_sampling_can_be_changed_but_not_beyond_the_runs_length() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents.policy.generate(task, stop=["</a>"], temperature=0.5, max_new_tokens=999)
        await agents.policy.generate(task, stop="</a>")
        return 1.0

    policy = Scripted("x", "y")
    await play(playing(run), policy, QUESTION, sampling=SamplingParams(max_new_tokens=7, stop=("!",)))
    assert policy.sampling[0].stop == ("!", "</a>") and policy.sampling[0].max_new_tokens == 7
    assert policy.sampling[1].stop == ("!", "</a>"), "one may be given by itself"
    assert policy.sampling[0].temperature == 0.5


@pytest.mark.parametrize(
    ("changes", "is_trained"),
    [
        ({}, True),
        ({"stop": ["!"], "max_new_tokens": 9, "seed": 3}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.0}, False),
        ({"top_p": 0.9}, False),
        ({"min_new_tokens": 2}, False),
    ],
)
async def test_what_is_drawn_from_another_distribution_than_the_trainers_is_not_trained_on(
    changes: dict[str, Any], is_trained: bool
) -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        reply = await agents.policy.generate(task, **changes)
        await agents.policy.generate(reply.then("so"))
        return 1.0

    episode = await play(
        playing(run), Scripted("x", "yy"), QUESTION, sampling=SamplingParams(temperature=0.7)
    )
    (sample,) = episode.samples
    first, second = (turn for turn in sample.turns if turn.role == "assistant")
    assert sample.loss_mask[first.start : first.end].all() == is_trained
    assert sample.loss_mask[second.start : second.end].all()


async def test_what_another_model_says_is_not_trained_on_as_the_policys() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents["helper"].generate(task)
        await agents.policy.generate(task)
        return 1.0

    episode = await play(playing(run, agents={"helper": {"model": "big"}}), Scripted("hint", "85"))
    assert [(s.agent, bool(s.loss_mask.any())) for s in episode.samples] == [
        ("policy", True),
        ("helper", False),
    ]


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_failed_episode_is_trained_on_where_asked_and_then_only_what_would_be(is_asked: bool) -> None:
    async def run(task: Prompt, agents: Agents) -> None:
        shown = await agents.policy.generate(task, is_trained=False)
        first = await agents.policy.generate(shown.then("so"))
        await agents.policy.generate(first.then("or"))
        await agents.policy.generate(first.then("and"))
        raise ValueError("broken")

    episode = await play(playing(run), Scripted("a", "bb", "c", "d"), train_failed=is_asked)
    assert episode.failure is Failure.ENVIRONMENT and len(episode.samples) == 2
    trained = [
        turn.text
        for sample in episode.samples
        for turn in sample.turns
        if sample.loss_mask[turn.start : turn.end].any()
    ]
    assert trained == (["bb", "c", "d"] if is_asked else [])


async def takes_one(task: Prompt) -> float:
    return 0.0


async def test_an_answer_that_comes_when_the_episode_is_over_changes_nothing_of_it() -> None:
    """The environment took the first of two; the other one is said while the answer is being scored."""
    is_scored = asyncio.Event()

    class Racing(Scripted):
        async def generate(self, *asked: Any, **how: Any) -> Any:
            is_late = len(self.seen) == 1
            completion = await super().generate(*asked, **how)
            if is_late:
                await is_scored.wait()
            return completion

    async def run(task: Prompt, agents: Agents) -> None:
        await agents.policy.generate(task)
        late.append(asyncio.ensure_future(agents.policy.generate(task)))
        await asyncio.sleep(0)

    async def score(*_: Any) -> Score:
        is_scored.set()
        await late[0]
        return Score(value=1.0, parts={})

    late: list[asyncio.Future[Any]] = []
    env = playing(run, reward={"type": "exact"})
    assert env.rewards is not None
    env.rewards.score = score  # type: ignore[method-assign]
    episode = await play(env, Racing("85", "6"))
    (sample,) = episode.samples
    assert episode.reward == 1.0 and [turn.text for turn in sample.turns if turn.role == "assistant"] == [
        "85"
    ]
