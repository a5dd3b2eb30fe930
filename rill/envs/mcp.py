"""MCP servers as tools: the model may call whatever the servers offer until it answers (`pip install "rill[envs]"`).

    [rollout.env]
    type = "mcp"
    [rollout.env.servers.files]
    command = ["python", "-m", "my_lab.mcp_server"]          # or url = "http://…/mcp", or object = "module:name"

One connection to each server serves all episodes of a worker. A server that dies costs the calls under way, which the
model is told of; the next call starts it again. `McpServer(config).tools()` gives the same tools to an environment of
your own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.per_loop import PerLoop
from rill.envs.rewards.base import REWARDS
from rill.envs.tools import Tool
from rill.registry import import_extra, load_target
from rill.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ALIVE_S = 5.0
"""For a server to show that it lives, where a call has failed."""


class ServerConfig(Config):
    """Where one server is: exactly one of command, url, object."""

    command: tuple[str, ...] = ()
    """Started here, spoken to over its standard input and output."""
    url: str = ""
    """Of a server that runs (streamable HTTP)."""
    object: str = ""
    """An MCPServer in this process, as "module:name"."""
    environment: dict[str, str] = {}
    """Variables for `command`, beside the few that every process needs."""
    start_timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _is_one_place(self) -> ServerConfig:
        if sum(map(bool, (self.command, self.url, self.object))) != 1:
            raise ValueError("an MCP server has exactly one of `command`, `url` and `object`")
        return self


class McpEnvironment(Environment):
    class Config(Environment.Config):
        type: Literal["mcp"] = "mcp"
        servers: dict[str, ServerConfig] = Field(min_length=1)
        """By a name of your choice."""
        max_turns: int = Field(default=16, ge=1)
        """Answers of the model; the last one may not call a tool any more."""
        system: str = ""
        """Said before the task. Empty: nothing."""
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact"}, validate_default=True
        )
        """How the last answer is scored."""

    config: Config

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._servers = [McpServer(server, name) for name, server in config.servers.items()]

    async def run(self, task: Prompt, agents: Agents) -> None:
        tools = [tool for server in self._servers for tool in await server.tools()]
        messages = task.messages or (Message(role="user", content=task.text or ""),)
        if self.config.system:
            messages = (Message(role="system", content=self.config.system), *messages)
        await agents.policy.act(messages, tools, max_turns=self.config.max_turns)


class McpServer:
    """One server; a connection for each event loop, opened when first needed."""

    def __init__(self, config: ServerConfig, name: str = "mcp") -> None:
        self.name = name
        self._config = config
        self._mcp = import_extra("mcp", 'MCP servers need the `mcp` library: pip install "rill[envs]"')
        self._connections = PerLoop(lambda: _Connection(self._open, name, config.start_timeout_s))

    async def tools(self) -> list[Tool]:
        connection = self._connections()
        return [self._tool(described, connection) for described in await connection.list_tools()]

    def _open(self) -> Any:
        mcp, config = self._mcp, self._config
        if config.object:
            return mcp.Client(load_target(config.object))
        if config.url:
            return mcp.Client(config.url)
        program, *arguments = config.command
        return mcp.Client(
            mcp.StdioServerParameters(command=program, args=arguments, env=config.environment or None)
        )

    def _tool(self, described: Any, connection: _Connection) -> Tool:
        async def call(arguments: Mapping[str, Any]) -> str:
            result = await connection.call(described.name, arguments)
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if result.is_error:
                raise RuntimeError(text)
            return text

        return Tool(
            name=described.name,
            description=described.description or "",
            parameters=described.input_schema,
            call=call,
        )


class _Connection:
    """Kept open by a task of its own, which is the one that must close it."""

    def __init__(self, open_client: Any, name: str, start_timeout_s: float) -> None:
        self._open = open_client
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._tools: list[Any] | None = None

    async def list_tools(self) -> list[Any]:
        if self._tools is None:
            listed = await self._asked(lambda client: _listed(client, self._start_timeout_s))
            self._tools = list(listed.tools)
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return await self._asked(lambda client: client.call_tool(name, dict(arguments)))

    async def _asked(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        ready = await self._connected()
        client = ready.result()
        try:
            return await ask(client)
        except Exception as error:  # boundary: says nothing of the connection; it is raised again
            if not await self._is_alive(client):
                self._drop(ready)
                raise ConnectionError(f"the MCP server {self._name} is gone") from error
            raise

    async def _is_alive(self, client: Any) -> bool:
        try:
            await _listed(client, ALIVE_S)
        except Exception:  # noqa: BLE001  boundary: whatever a dead connection raises
            return False
        return True

    async def _connected(self) -> asyncio.Future[Any]:
        """With the client."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.ensure_future(self._keep(self._ready))
        ready = self._ready
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.shield(ready)
        except TimeoutError:
            self._drop(ready)
            raise ConnectionError(
                f"the MCP server {self._name} did not start within {self._start_timeout_s:g} s"
            ) from None
        except ConnectionError:
            self._drop(ready)
            raise
        return ready

    async def _keep(self, ready: asyncio.Future[Any]) -> None:
        try:
            async with self._open() as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001  boundary: told to whoever waits, or asks next
            if not ready.done():
                ready.set_exception(ConnectionError(f"the MCP server {self._name} does not start: {error}"))

    def _drop(self, ready: asyncio.Future[Any]) -> None:
        """Unless another one has replaced it by now."""
        if self._ready is ready and self._keeper is not None:
            self._keeper.cancel()
            self._keeper = self._ready = self._tools = None


async def _listed(client: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await client.list_tools()
