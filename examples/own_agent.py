"""An agent that knows nothing of rill, trained without a change: the vault of recipes/vault.toml, through its base_url.

    rill train vault rollout.env.type=function rollout.env.function=examples.own_agent:run \
        'rollout.env.chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"'

`solve` could be any program in any language that is told an address. The template writes messages one behind the
other, so the model reads what it reads in the recipe, and the curve is the recipe's.
"""

import ssl

import httpx

from rill.data.tasks.vault import CLOSE, OPEN, look_up
from rill.envs.agent import Agents
from rill.types import Prompt

TLS = ssl.create_default_context()
"""Read once: a client that reads its certificates for every episode takes longer than the model."""


async def run(task: Prompt, agents: Agents) -> float:
    said = await solve(agents.policy.base_url, str(task.text), num_hops=int(task.metadata["level"]))
    return float(said.rpartition("=")[2].strip() == task.answer)


async def solve(base_url: str, question: str, num_hops: int) -> str:
    """The agent: asks the model, looks up what it wants to know, and asks again."""
    vault = question.partition(":")[0]
    messages = [{"role": "user", "content": question}]
    async with httpx.AsyncClient(base_url=base_url, timeout=600, verify=TLS, trust_env=False) as client:
        for hop in range(1, 6):
            body = {"model": "policy", "messages": messages, "stop": [CLOSE]}
            answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
            said = str(answer["choices"][0]["message"]["content"])
            _, mark, key = said.rpartition(OPEN)
            if not mark or not key.endswith(CLOSE) or hop == 5:
                break
            found = look_up(vault, key.removesuffix(CLOSE), is_last=hop >= num_hops)
            messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": f"[{found}]"}]
    return said
