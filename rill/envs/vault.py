"""The smallest task that needs a tool: keys lead to keys in a vault that differs from task to task (data.tasks.vault).

abc:k7? │ "><get>k7</get>" │ "[q2]" │ "<get>q2</get>" │ "[42]" │ "=42"
          sampled            told     sampled           told     sampled; the reward is the answer's alone
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rill.data.tasks.vault import CLOSE, OPEN, look_up
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.types import Prompt


class Vault(Environment):
    class Config(Environment.Config):
        type: Literal["vault"] = "vault"
        max_calls: int = Field(default=4, ge=0)
        """Look-ups of one episode. 0: the tool is there for nobody, to see that it is needed."""

    config: Config

    @property
    def offers_tools(self) -> bool:
        return self.config.max_calls > 0

    async def run(self, task: Prompt, agents: Agents) -> float:
        vault = (task.text or "").partition(":")[0]
        num_hops = int(task.metadata["level"])

        async def get(key: str) -> str:
            """What lies under a key."""
            return look_up(vault, key, is_last=hop >= num_hops)

        reply = await agents.policy.generate(task, stop=[CLOSE])
        for hop in range(1, self.config.max_calls + 1):  # noqa: B007  read by `get`
            _, mark, key = reply.text.rpartition(OPEN)
            if not mark or not key.endswith(CLOSE):
                break
            found = await reply.call(get, key=key.removesuffix(CLOSE))
            reply = await agents.policy.generate(reply.then(f"[{found}]"), stop=[CLOSE])
        return float(reply.text.rpartition("=")[2].strip() == task.answer)
