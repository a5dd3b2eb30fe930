"""A verifiers 0.4 environment and one run of it, in the Python that has verifiers (its openai clashes with ours).

    python verifiers_rollout.py train|eval URL MODEL TOKENIZER_FOLDER     prints one JSON line per rollout

Two turns of conversation, scored by verifiers. The harness runs in this process: verifiers' own ones start a program
for each rollout with `uv`, which wants a network. Every model call goes through verifiers' interception server and its
client, as any harness's would: `eval` proxies to /v1/chat/completions, `train` renders tokens for
/inference/v1/generate.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import DefaultRendererConfig

__all__ = ["GreetingHarness", "GreetingTaskset"]

NUM_ROLLOUTS = 4
EXPECTED = "Hello!"


class GreetingData(vf.TaskData):  # type: ignore[misc]
    expected: str


class GreetingTask(vf.Task[GreetingData]):  # type: ignore[misc]
    @vf.reward
    async def greets(self, trace: vf.Trace) -> float:
        first = next(m for m in trace.branches[0].messages if m.role == "assistant")
        return float(first.content == self.data.expected)


class GreetingTaskset(vf.Taskset[GreetingTask]):  # type: ignore[misc]
    def load(self) -> Iterator[GreetingTask]:
        yield GreetingTask(GreetingData(prompt="hi", expected=EXPECTED))


class GreetingHarness(vf.Harness):  # type: ignore[misc]
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for follow_up in ("go on", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                if follow_up is not None:
                    messages.append({"role": "user", "content": follow_up})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def rollouts(kind: str, url: str, model: str, folder: str) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key_var": "RILL_KEY"}
    client: Any = vf.EvalClientConfig(**settings)
    if kind == "train":
        renderer = {"renderer": DefaultRendererConfig(), "renderer_model_name": folder}
        client = vf.TrainClientConfig(**settings, **renderer)
    sampling = vf.SamplingConfig(temperature=0.0 if kind == "eval" else 1.0, top_p=1.0, max_tokens=16, seed=1)
    context = vf.ModelContext(model=model, client=client, sampling=sampling)
    name = Path(__file__).stem
    agent = {"harness": {"id": name}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, "agent": agent}))
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, NUM_ROLLOUTS)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    return [_row(episode) for episode in episodes]


def _row(episode: Any) -> dict[str, Any]:
    (trace,) = episode.traces or [None]
    errors = [str(e.message) for e in [*episode.errors, *(trace.errors if trace else [])]]
    if trace is None or not trace.branches:
        return {"ok": False, "errors": errors}
    (branch,) = trace.branches
    return {
        "ok": episode.ok,
        "errors": errors,
        "reward": trace.reward,
        "contents": [m.content for m in branch.messages if m.role == "assistant"],
        "token_ids": branch.token_ids,
        "sampled_mask": branch.sampled_mask,
        "logprobs": branch.logprobs,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for row in asyncio.run(rollouts(*sys.argv[1:5])):
        print(json.dumps(row), flush=True)
