"""A group of rollouts of a classic verifiers environment (0.3), in the Python that has it.

    python verifiers_classic_rollout.py URL MODEL        prints one JSON line per rollout

Two turns of conversation. verifiers' token client asks /v1/chat/completions for the first, then stitches: it sends the
tokens it was given, with those of the new message after them (/tokenize), to /v1/chat/completions/tokens, so that what
is trained on is what was sampled.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset

NUM_ROLLOUTS = 4
EXPECTED = "Hello!"


class GreetingEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content="go on")]


def greets(completion: Any, **kwargs: Any) -> float:
    return float(completion[0]["content"] == EXPECTED)


async def rollouts(url: str, model: str) -> list[dict[str, Any]]:
    question = {"prompt": [{"role": "user", "content": "hi"}], "answer": EXPECTED}
    env = GreetingEnv(max_turns=2, dataset=Dataset.from_list([question]), rubric=vf.Rubric(funcs=[greets]))
    client = vf.ClientConfig(
        client_type="openai_chat_completions_token",
        api_key_var="RILL_KEY",
        api_base_url=f"{url}/v1",
        max_retries=0,
    )
    row = dict(env.get_dataset()[0])
    group = await env.run_group(
        [row] * NUM_ROLLOUTS,
        client,
        model,
        {"temperature": 1.0, "max_tokens": 16, "seed": 1},
        state_columns=["trajectory"],
    )
    return [_row(output) for output in group]


def _row(output: Any) -> dict[str, Any]:
    return {
        "error": None if output.get("error") is None else str(output["error"]),
        "reward": output["reward"],
        "steps": [step["tokens"] for step in output["trajectory"]],
    }


if __name__ == "__main__":
    for row in asyncio.run(rollouts(*sys.argv[1:3])):
        print(json.dumps(row), flush=True)
