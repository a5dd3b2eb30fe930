"""The agents of one episode: what an environment calls.

    agent.generate(task | reply.then(text) | ids)   token-in, token-out
    agent.say(messages, tools)                      a conversation; tool calls come back parsed
    agent.act(messages, tools)                      the same, with the tools called until the model answers
    agent.reward(value)                             now, for a turn, or at the end
    agent.base_url                                  the same agent for a program that speaks HTTP

Every token lands in the agent's tree (tokens.py), so any mixture of these gives exact samples. Calls of one agent may
run beside one another: requests are named by the tokens that they continue, not by their order.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rill.data.tool_calls import ToolCallStream
from rill.envs.base import AgentConfig, Environment, Policy
from rill.envs.conversation import Heard, Messages, Offer, Talk, Tools, as_message, key_of
from rill.envs.deadline import Deadline, is_own
from rill.envs.events import EventLog
from rill.envs.reply import Context, Reply
from rill.envs.tokens import Node, TokenTree
from rill.errors import DataError, RunError, TooLongError
from rill.types import Message, Prompt, SamplingParams, StopReason, TokenIds

if TYPE_CHECKING:
    from rill.envs.endpoint import Server
    from rill.inference.base import Completion


class EpisodeOver(Exception):
    """A budget is used up: ends `run`, and the episode counts as cut off, not as failed."""


class TurnTimeout(Exception):
    """The policy gave no answer in time."""


@dataclass(slots=True)
class Counts:
    """What became of an episode so far."""

    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    malformed_calls: int = 0
    tools_offered: int = 0
    is_cut_off: bool = False


@dataclass(slots=True, kw_only=True)
class Setting:
    """What the agents of one episode share."""

    environment: Environment
    policy: Policy
    sampling: SamplingParams
    log: EventLog
    episode_id: str
    group_id: str
    counts: Counts = field(default_factory=Counts)
    running: asyncio.Task[Any] | None = None
    """The environment's run()."""
    agents: Agents | None = None
    interrupted: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """End the episode with this, whatever its run() makes of it: there it is raised, or cancels."""
        if self.interrupted is None:
            self.interrupted = error
            if self.running is not None and self.running is not asyncio.current_task():
                self.running.cancel()

    def check(self) -> None:
        """Raise what has ended the episode."""
        if self.interrupted is not None:
            raise self.interrupted


class Agents(Mapping[str, "Agent"]):
    """By name; an agent exists from its first mention on. `policy` is the one that most environments have."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        setting.agents = self
        self._agents: dict[str, Agent] = {}
        self.session: Any = None
        """What Environment.session gave."""
        self.metrics: dict[str, float] = {}
        """What the environment counts for itself; shown as rollout/<name>."""
        self.route: Callable[[str, Mapping[str, str]], Agent | None] | None = None
        """Who answers a request to a base_url, by its `model` and its headers; None: the agent whose address it is.
        Unset: the agent that is called like the model."""

    @property
    def episode_id(self) -> str:
        return self.setting.episode_id

    @property
    def group_id(self) -> str:
        """Episodes of one task share it: what they must have in common is seeded by it."""
        return self.setting.group_id

    @property
    def policy(self) -> Agent:
        return self["policy"]

    @property
    def first(self) -> Agent:
        """Whom the reward of the episode is meant for: of those who were asked, the policy or else the first."""
        asked = {name: agent for name, agent in self._agents.items() if agent.tree.nodes}
        found = asked or self._agents
        return self.policy if "policy" in found or not found else next(iter(found.values()))

    def known(self, name: str) -> Agent | None:
        """An agent that was mentioned before."""
        return self._agents.get(name)

    def routed(self, model: str, headers: Mapping[str, str]) -> Agent | None:
        """Whom a request means: a program may have several agents behind one address, and ask for them as models."""
        if self.route is not None:
            return self.route(model, headers)
        is_named = model in self._agents or model in self.setting.environment.config.agents
        return self[model] if is_named else None

    def close(self) -> None:
        """The episode is over. Nothing here refers to itself any more: it is freed at once, not by the collector."""
        for agent in self._agents.values():
            agent.close()
        self.route = self.setting.agents = self.setting.running = None

    def __getitem__(self, name: str) -> Agent:
        agent = self._agents.get(name)
        if agent is None:
            config = self.setting.environment.config.agents.get(name, _PLAIN)
            agent = self._agents[name] = Agent(name, config, self.setting)
        return agent

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


_PLAIN = AgentConfig()
MAX_REWARD = 1e18
"""Of an agent in an episode: the squares of what is above are not finite in single precision."""
_ENDS = ("max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "seed")
"""Sampling settings that leave each token's distribution as it is."""
_ORDINALS = string.digits + string.ascii_letters
"""Of the calls in one answer: some templates want ids of nine letters and digits."""


class Agent:
    def __init__(self, name: str, config: AgentConfig, setting: Setting) -> None:
        self.name = name
        self.config = config
        self.is_trained = config.is_trained
        """Off: what it says is no sample. An environment may decide so until the end."""
        self.tree = TokenTree()
        self.setting = setting
        self._encoder = setting.environment.encoder
        self._num_asked: dict[str, int] = {}
        self._offers: dict[tuple[int, ...], Offer] = {}
        self._heard: dict[bytes, Heard] = {}
        """What was said with the tools of that key on offer."""
        self._base_url: str | None = None

    # --- what an environment calls ------------------------------------------------------------------------

    async def generate(
        self,
        context: Prompt | Context | TokenIds | Sequence[int],
        *,
        is_trained: bool = True,
        **sampling: Any,
    ) -> Reply:
        """Continue a task's prompt, a reply with something behind it (`reply.then(…)`), or any token ids.

        `sampling`: fields of SamplingParams that differ from the run's. Stop strings are added to the run's, and no
        answer gets longer than the run allows. `is_trained`: off, the answer stays out of the loss, as does one that
        another temperature, or whatever else changes the distribution, was asked for.
        """
        if isinstance(context, Prompt):
            ids = self._encoder.encode(context)
            node = self.tree.grow(ids, self._encoder.pictures_in(context.messages, ids))
        elif isinstance(context, Context):
            node = context.node()
        else:
            node = self.tree.grow(context)  # type: ignore[arg-type]  # made an array there
        params = self._sampling(sampling)
        completion = await self._complete(node, params)
        message = Message(role="assistant", content=self._encoder.decode(completion.token_ids))
        return self._reply(node, completion, message, is_trained and self._is_run_like(params))

    async def say(
        self, messages: Messages, tools: Tools = (), *, is_trained: bool = True, **sampling: Any
    ) -> Reply:
        """The next message of a conversation. `messages` is all of it, replies as `reply.message`.

        What is new since a reply of this agent's is appended to the tokens that were sampled; a history that was
        rewritten begins a branch.
        """
        return await self._answer(self._talk(messages, tools), self._sampling(sampling), is_trained)

    async def act(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        max_turns: int = 16,
        is_trained: bool = True,
        **sampling: Any,
    ) -> Reply:
        """Let the model call tools until it answers without a call; its last reply."""
        if max_turns < 1:
            raise ValueError(f"agent {self.name}: act() needs a turn at least, not max_turns={max_turns}")
        talk, params = self._talk(messages, tools), self._sampling(sampling)
        for turn in range(max_turns):
            reply = await self._answer(talk, params, is_trained)
            if not reply.message.tool_calls or turn + 1 == max_turns:
                break
            talk.hear([reply.message])
            talk.hear([await reply.call_tool(call, talk.offer.box) for call in reply.message.tool_calls])
        self.setting.counts.is_cut_off |= bool(reply.message.tool_calls)
        return reply

    def reward(self, value: float, at: Reply | None = None) -> None:
        """Add to this agent's reward: for what it has said so far, or for the turn `at`. Rewards add up."""
        number = float(value)
        if not abs(self.tree.total_reward + number) <= MAX_REWARD or not abs(number) <= MAX_REWARD:
            raise ValueError(
                f"agent {self.name}: a reward must be a number, and all of them no more than {MAX_REWARD:g} in size, "
                f"not {value!r:.80}"
            )
        self.tree.reward(number, None if at is None else at.node)

    @property
    def base_url(self) -> str:
        """Where a program reaches this agent by HTTP, for as long as the episode lasts."""
        if self._base_url is None:
            self._base_url = self._server().open(self)
        return self._base_url

    def close(self) -> None:
        if self._base_url is not None:
            self._server().close(self._base_url)

    def _server(self) -> Server:
        from rill.envs.endpoint import servers  # which imports agents

        return servers()

    # --- asking the policy --------------------------------------------------------------------------------

    async def _complete(self, node: Node, sampling: SamplingParams) -> Completion:
        counts, limits = self.setting.counts, self.setting.environment.config.limits
        self.setting.check()
        if limits.max_turns and counts.turns >= limits.max_turns:
            raise EpisodeOver(f"{limits.max_turns} turns")
        if limits.max_tokens:
            left = limits.max_tokens - node.end
            if left <= 0:
                raise EpisodeOver(f"{limits.max_tokens} tokens")
            if left < sampling.max_new_tokens:
                sampling = replace(sampling, max_new_tokens=left)
        counts.turns += 1
        deadline = Deadline(limits.turn_timeout_s)
        try:
            with deadline:
                return await self.setting.policy.generate(
                    node.all_ids(),
                    sampling,
                    name=self._name(node),
                    model=self.config.model,
                    pictures=node.pictures,
                )
        except TooLongError:
            if self.tree.num_sampled == 0:
                raise
            raise EpisodeOver("the engine's context") from None
        except TimeoutError:
            if deadline.is_expired:
                raise TurnTimeout(
                    f"agent {self.name}: no answer within {limits.turn_timeout_s:g} s"
                ) from None
            raise
        except (asyncio.CancelledError, RunError) as error:
            if is_own(error, deadline.num_cancels):  # a stopped or a failed engine
                self.setting.interrupt(error)
            raise

    def _name(self, node: Node) -> str:
        """By agent and tokens. The same tokens asked a second time are another sample of them."""
        name = f"{self.name}/{node.digest}"
        count = self._num_asked[name] = self._num_asked.get(name, 0) + 1
        return name if count == 1 else f"{name}~{count - 1}"

    def _sampling(self, changes: dict[str, Any]) -> SamplingParams:
        sampling, config = self.setting.sampling, self.config
        if config.temperature is not None:
            changes.setdefault("temperature", config.temperature)
        if config.max_new_tokens is not None:
            changes.setdefault("max_new_tokens", config.max_new_tokens)
        if not changes:
            return sampling
        if "stop" in changes:
            stop = changes["stop"]
            changes["stop"] = (*sampling.stop, *((stop,) if isinstance(stop, str) else stop))
        if "max_new_tokens" in changes:
            changes["max_new_tokens"] = min(changes["max_new_tokens"], sampling.max_new_tokens)
        return replace(sampling, **changes)

    def _is_run_like(self, sampling: SamplingParams) -> bool:
        """Drawn by the policy, from the distribution that the trainer computes again: in any other the loss would be of
        another policy than sampled."""
        run = self.setting.sampling
        return (
            self.config.model is None
            and replace(sampling, **{name: getattr(run, name) for name in _ENDS}) == run
        )

    def _reply(self, node: Node, completion: Completion, message: Message, is_trained: bool) -> Reply:
        sampled = self.tree.sample(node, completion, message.content, is_trained=is_trained)
        return Reply(self.setting, self.name, self.tree, sampled, message)

    # --- conversations ------------------------------------------------------------------------------------

    def _talk(self, messages: Messages, tools: Tools) -> Talk:
        key = tuple(map(id, tools))
        offer = self._offers.get(key)
        if offer is None:
            offer = self._offers[key] = Offer.of(tools)
            offer.start = self._heard.setdefault(offer.key, offer.start)
        talk = Talk(offer)
        talk.hear(map(as_message, messages))
        if not talk.messages:
            raise DataError("say(): no messages; a task in plain text (task.text) is for generate(task)")
        return talk

    async def _answer(self, talk: Talk, sampling: SamplingParams, is_trained: bool) -> Reply:
        heard = talk.heard
        node = heard.asked
        if node is None:
            node = heard.asked = self._place(talk)
        completion = await self._complete(node, sampling)
        if talk.offer.schemas:
            self.setting.counts.tools_offered = 1
            message = self._parse(completion, talk.offer, node)
        else:
            message = Message(role="assistant", content=self._encoder.decode(completion.token_ids))
        reply = self._reply(node, completion, message, is_trained and self._is_run_like(sampling))
        heard.then(message).reply = reply.node
        return reply

    def _place(self, talk: Talk) -> Node:
        """Where the conversation goes on: behind the last reply in it, or as a history of its own."""
        messages, last, offer = talk.messages, talk.last, talk.offer
        if last is not None:
            said, new = messages[talk.num_answered - 1], messages[talk.num_answered :]
            self._encoder.check_roles(new)
            if not new:
                raise DataError(
                    "say(): the last message is the agent's own reply; add one that it can answer"
                )
            assert last.completion is not None
            try:
                ids = self._encoder.encode_following(
                    said,
                    new,
                    tools=offer.schemas,
                    tools_key=offer.key,
                    sampled_ids=last.token_ids,
                    is_cut_off=last.completion.stop_reason in (StopReason.LENGTH, StopReason.ABORTED),
                )
            except DataError:  # the template cannot say what follows by itself
                pass
            else:
                self.tree.num_rewritten += "assistant" in [message.role for message in new]
                text = "\n".join([message.content for message in new])
                pictures = self._encoder.pictures_in(new, ids, last.end)
                return self.tree.observe(last, ids, role=new[-1].role, text=text, pictures=pictures)
        self._encoder.check_roles(messages)
        has_past = any(message.role == "assistant" for message in messages)
        key = (offer.key, *map(key_of, messages))
        ids = self._encoder.encode_messages(messages, offer.schemas, key=key)
        self.tree.num_rewritten += has_past and self.tree.num_sampled > 0
        return self.tree.observe(None, ids, role="prompt", pictures=self._encoder.pictures_in(messages, ids))

    def _parse(self, completion: Completion, offer: Offer, node: Node) -> Message:
        """Content and calls. Ids of calls come from the tokens, so that a resumed episode makes the same ones."""
        syntax = self._encoder.tool_syntax
        raw = self._encoder.decode(completion.token_ids, skip_special=False)
        content, calls = ToolCallStream(syntax, offer.parameters).feed(raw, is_last=True)
        counts = self.setting.counts
        counts.tool_calls += len(calls)
        counts.malformed_calls += not calls and syntax.open in raw
        content = self._encoder.without_special(content)
        made = [
            {
                "id": f"{node.digest[:8]}{_ORDINALS[n] if n < len(_ORDINALS) else n}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(calls)
        ]
        return Message(role="assistant", content=content, tool_calls=tuple(made))
