"""What an episode costs besides the model: tool episodes on an engine that answers at once.

    python benchmarks/agents.py [--episodes 1000] [--turns 5]

Prints JSON lines: episodes per second with all of them at once on one event loop, and the time of a turn by the length
of the context, which should be flat. `us_per_turn` is an episode's time, its prompt and its sample included, by its
turns; `cpu_us_per_further_turn` is what a turn adds to it: episodes of five times as many turns against these. `text`
appends observations as text (generate), `chat` has conversations with a tool in the Hermes format (act). `cpu` figures
count the processor's time of this process alone, which other load on the machine changes less. `sessions`: as many
episodes at once behind their base_url, asked by clients in another process. `sandbox`: commands and programs a second,
one after another in each of as many sessions as there are cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from typing import Any

import numpy as np
from report import report

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.episode import run_episode
from rill.inference.base import Completion
from rill.inference.collector import CollectorHold
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Message, Picture, Prompt, SamplingParams, StopReason, TokenIds

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
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        name: str,
        model: str | None = None,
        pictures: tuple[Picture, ...] = (),
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
    started, started_cpu = time.perf_counter(), time.process_time()
    done = await asyncio.gather(
        *(
            run_episode(environment, prompt, policy, episode_id=n, group_id="g", sampling=SamplingParams())
            for n in names
        )
    )
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    assert all(episode.failure is None and episode.metrics["turns"] == turns for episode in done)
    return {
        "kind": kind,
        "episodes": episodes,
        "turns": turns,
        "context_tokens": context,
        "episodes_per_s": round(episodes / seconds, 1),
        "us_per_turn": round(seconds / episodes / turns * 1e6, 1),
        "episodes_per_cpu_s": round(episodes / cpu_s, 1),
        "cpu_us_per_turn": round(cpu_s / episodes / turns * 1e6, 1),
    }


# --- sessions behind HTTP ----------------------------------------------------------------------------------


class Served(Environment):
    """Gives its address away and waits until the client has had its turns."""

    async def run(self, task: Prompt, agents: Agents) -> float:
        ended = asyncio.get_running_loop().create_future()
        WAITING[agents.policy.base_url] = ended
        await ended
        return 1.0


WAITING: dict[str, asyncio.Future[None]] = {}


async def measure_sessions(episodes: int, turns: int) -> dict[str, Any]:
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    environment = Served(Environment.Config(type="benchmark"), tokenizer)
    policy = Instant(tokenizer, turns)
    prompt = Prompt(id="p", messages=(Message(role="user", content="x"),))
    WAITING.clear()
    playing = [
        asyncio.ensure_future(
            run_episode(
                environment, prompt, policy, episode_id=f"g/{n}", group_id="g", sampling=SamplingParams()
            )
        )
        for n in range(episodes)
    ]
    while len(WAITING) < episodes:
        await asyncio.sleep(0.01)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    clients = context.Process(target=ask_all, args=(list(WAITING), turns, done))
    clients.start()
    await asyncio.to_thread(done.wait)  # they are up: what follows is the server's time
    started, started_cpu = time.perf_counter(), time.process_time()
    await asyncio.to_thread(clients.join)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    for ended in WAITING.values():
        ended.set_result(None)
    assert all(episode.metrics["turns"] == turns for episode in await asyncio.gather(*playing))
    return {
        "kind": "sessions",
        "sessions": episodes,
        "turns": turns,
        "requests_per_s": round(episodes * turns / seconds, 1),
        "requests_per_cpu_s": round(episodes * turns / cpu_s, 1),
    }


def ask_all(urls: list[str], turns: int, ready: Any) -> None:
    async def ask(url: str) -> None:
        _, _, place = url.removeprefix("http://").partition("/")
        host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        for _ in range(turns):
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"messages": messages}).encode()
            head = f"POST /{place}/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            writer.close()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "y"}]

    async def ask_everybody() -> None:
        ready.set()
        await asyncio.gather(*map(ask, urls))

    asyncio.run(ask_everybody())


# --- the sandbox -------------------------------------------------------------------------------------------


async def measure_sandbox(seconds: float = 3.0) -> dict[str, Any]:
    from rill.envs.sandbox import SandboxPool

    pool, counts = SandboxPool(), {"exec": 0, "python": 0}

    async def use(what: str, until: float) -> None:
        async with pool.session() as sandbox:
            while time.perf_counter() < until:
                if what == "exec":
                    await sandbox.exec(["true"])
                else:
                    await sandbox.python("1 + 1")
                counts[what] += 1

    num_sessions = os.cpu_count() or 1
    try:
        for what in counts:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(use(what, until) for _ in range(num_sessions)))
    finally:
        await pool.close()
    rates = {f"{what}_per_s": round(count / seconds, 1) for what, count in counts.items()}
    return {"kind": "sandbox", "sessions": num_sessions, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    CollectorHold().take()  # as every worker does that plays episodes
    for kind in ("text", "chat"):
        asyncio.run(measure(kind, 20, options.turns, 32))  # templates and schemas are compiled once
        report(**asyncio.run(measure(kind, options.episodes, options.turns, 32)))
        for context in (128, 1024, 8192):
            found = asyncio.run(measure(kind, 100, options.turns, context))
            longer = asyncio.run(measure(kind, 100, 5 * options.turns, context))
            further_us = (5 * longer["cpu_us_per_turn"] - found["cpu_us_per_turn"]) / 4
            report(**found, cpu_us_per_further_turn=round(further_us, 1))
    report(**asyncio.run(measure_sessions(options.episodes, options.turns)))
    report(**asyncio.run(measure_sandbox()))


if __name__ == "__main__":
    main()
