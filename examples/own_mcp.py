"""Tools from an MCP server, in an environment with a format of its own: the vault of recipes/vault.toml.

    rill train vault rollout.env.type=function rollout.env.function=examples.own_mcp:run

Models that were taught a format for tool calls need no code at all: rollout.env.type = "mcp".
"""

from mcp.server.mcpserver import MCPServer

from rill.data.tasks.vault import CLOSE, OPEN, look_up
from rill.envs.agent import Agents
from rill.envs.mcp import McpServer, ServerConfig
from rill.types import Prompt

server = MCPServer("vault")


@server.tool()
def get(vault: str, key: str, is_last: bool) -> str:
    """What lies in a vault under a key."""
    return look_up(vault, key, is_last=is_last)


CLIENT = McpServer(ServerConfig(object="examples.own_mcp:server"), "vault")
"""One connection for all episodes of a worker."""


async def run(task: Prompt, agents: Agents) -> float:
    (tool,) = await CLIENT.tools()
    vault, num_hops = str(task.text).partition(":")[0], int(task.metadata["level"])
    reply = await agents.policy.generate(task, stop=[CLOSE])
    for hop in range(1, 5):
        _, mark, key = reply.text.rpartition(OPEN)
        if not mark or not key.endswith(CLOSE):
            break
        found = await reply.call(tool, vault=vault, key=key.removesuffix(CLOSE), is_last=hop >= num_hops)
        reply = await agents.policy.generate(reply.then(f"[{found}]"), stop=[CLOSE])
    return float(reply.text.rpartition("=")[2].strip() == task.answer)
