"""What an episode costs besides the model: tool episodes on an engine that answers at once.

    python benchmarks/agents.py [--episodes 1000] [--turns 5]

Prints JSON lines: episodes per second with all of them at once on one event loop, and the time of a turn by the length
of the context, which should be flat. `text` appends observations as text (generate), `chat` has conversations with a
tool in the Hermes format (act).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy as np

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.episode import run_episode
from rill.inference.base import Completion
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Message, Prompt, SamplingParams, StopReason, TokenIds

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Instant:
    """Answers with a call until the last turn."""

    def __init__(self, tokenizer: Any, turns: int) -> None:
        call = '<tool_call>{"name": "look", "arguments": {"at": 7}}</tool_call>'
        self.call = self._completion(tokenizer.encode(call) + [tokenizer.eos_token_id])
        self.turns = turns

    async def generate(
        self, token_ids: TokenIds, sampling: SamplingParams, *, name: str, model: str | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        return self.call

    def _completion(self, ids: list[int]) -> Completion:
        return Completion(
            request_id="r",
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            stop_reason=StopReason.EOS,
        )


class Load(Environment):
    class Config(Environment.Config):
        type: str = "benchmark"
        kind: str = "text"
        turns: int = 5

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> float:
        if self.config.kind == "chat":
            await agents.policy.act(task.messages, [look], max_turns=self.config.turns)
            return 1.0
        reply = await agents.policy.generate(task)
        for _ in range(self.config.turns - 1):
            result = await reply.call(look, at=7)
            reply = await agents.policy.generate(reply.then(result))
        return 1.0


async def look(at: int) -> str:
    """What lies there."""
    return str(at + 1)


async def measure(kind: str, episodes: int, turns: int, context: int) -> dict[str, Any]:
    tokenizer = build_char_tokenizer()
    if kind == "chat":
        tokenizer.chat_template = TEMPLATE
    environment = Load(Load.Config(kind=kind, turns=turns), tokenizer)
    text = "x" * context
    prompt = (
        Prompt(id="p", messages=(Message(role="user", content=text),))
        if kind == "chat"
        else Prompt(id="p", text=text)
    )
    policy = Instant(tokenizer, turns)
    names = [f"g/{n}" for n in range(episodes)]
    started = time.perf_counter()
    done = await asyncio.gather(
        *(
            run_episode(environment, prompt, policy, episode_id=n, group_id="g", sampling=SamplingParams())
            for n in names
        )
    )
    seconds = time.perf_counter() - started
    assert all(episode.failure is None and episode.metrics["turns"] == turns for episode in done)
    return {
        "kind": kind,
        "episodes": episodes,
        "turns": turns,
        "context_tokens": context,
        "episodes_per_s": round(episodes / seconds, 1),
        "us_per_turn": round(seconds / episodes / turns * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    for kind in ("text", "chat"):
        asyncio.run(measure(kind, 20, options.turns, 32))  # templates and schemas are compiled once
        print(json.dumps(asyncio.run(measure(kind, options.episodes, options.turns, 32))))
        for context in (128, 1024, 8192):
            print(json.dumps(asyncio.run(measure(kind, 100, options.turns, context))))


if __name__ == "__main__":
    main()
