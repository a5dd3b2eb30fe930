from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rill.envs.mcp import McpEnvironment, ServerConfig, _Connection
from rill.types import Episode, Failure, Message, Prompt
from tests.data.templates import HERMES, tokenizer_for
from tests.envs.scripted import Scripted, play

pytest.importorskip("mcp")

TASK = Prompt(id="p", messages=(Message(role="user", content="What is tea?"),), answer="42")
OBJECT = {"object": "tests.envs.mcp_server:server"}
STDIO = {"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]}


def call(name: str = "price", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def played(server: dict[str, Any], *replies: str, **settings: Any) -> Episode:
    config = McpEnvironment.Config.model_validate({"servers": {"shop": server}, **settings})
    tokenizer = tokenizer_for(HERMES)
    env = McpEnvironment(config, tokenizer)
    return await play(env, Scripted(*replies, tokenizer=tokenizer, ends="<|im_end|>"), TASK)


def told(episode: Episode) -> list[str]:
    return [turn.text for turn in episode.samples[0].turns if turn.role == "tool"]


@pytest.mark.parametrize("server", [OBJECT, STDIO], ids=["object", "stdio"])
async def test_a_servers_tools_are_offered_and_called(server: dict[str, Any]) -> None:
    episode = await played(server, call(item="tea"), "42")
    assert told(episode) == ["42"] and episode.reward == 1.0
    shown = tokenizer_for(HERMES).decode(episode.samples[0].token_ids.tolist())
    assert '"name": "price"' in shown and "What an item costs." in shown


async def test_a_tool_that_fails_is_told_to_the_model() -> None:
    episode = await played(OBJECT, call(item="milk"), call(price="tea"), "none")
    assert all(text.startswith("error: RuntimeError") for text in told(episode)) and len(told(episode)) == 2
    assert episode.failure is None


async def test_a_server_that_dies_costs_its_call_and_is_started_again() -> None:
    episode = await played(STDIO, call("die"), call(item="tea"), "42")
    first, second = told(episode)
    assert "the MCP server shop is gone" in first and second == "42" and episode.reward == 1.0


async def test_a_server_that_does_not_start_fails_the_episode_and_says_why() -> None:
    episode = await played({"command": ["/no/such/program"]}, "x")
    assert episode.failure is Failure.ENVIRONMENT
    assert "the MCP server shop does not start" in str(episode.error)


async def test_a_tool_that_hangs_costs_its_call_and_not_the_server() -> None:
    limits = {"tool_timeout_s": 0.2}
    episode = await played(OBJECT, call("hang", seconds=60), call(item="tea"), "42", limits=limits)
    assert told(episode) == ["error: hang took longer than 0.2 s", "42"] and episode.reward == 1.0


async def test_two_servers_with_a_tool_of_one_name_are_told_of() -> None:
    episode = await played(OBJECT, "42", servers={"shop": OBJECT, "other": OBJECT})
    assert episode.failure is Failure.ENVIRONMENT and "no two the same: die, hang, price" in str(
        episode.error
    )


def test_a_server_has_one_place() -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        ServerConfig()
    with pytest.raises(ValueError, match="exactly one of"):
        ServerConfig(url="http://x", object="y:z")


class Client:
    """Of a connection that can be broken, told by its number."""

    opened: ClassVar[list[Client]]

    def __init__(self) -> None:
        self.is_broken = self.is_closed = False
        self.failing = asyncio.Event()
        self.opened.append(self)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True

    async def list_tools(self) -> Any:
        if self.is_broken:
            raise OSError("broken pipe")
        return SimpleNamespace(tools=[f"of {self.opened.index(self)}"])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "slow":
            await self.failing.wait()
        await self.list_tools()
        return name


async def test_calls_that_fail_late_do_not_cost_the_connection_that_came_since() -> None:
    Client.opened = []
    connection = _Connection(Client, "shop", 5.0)
    slow = asyncio.ensure_future(connection.call("slow", {}))
    assert await connection.call("quick", {}) == "quick"
    first = Client.opened[0]
    first.is_broken = True
    with pytest.raises(ConnectionError, match="the MCP server shop is gone"):
        await connection.call("quick", {})
    assert await connection.call("quick", {}) == "quick" and len(Client.opened) == 2
    first.failing.set()
    with pytest.raises(ConnectionError, match="is gone"):
        await slow
    assert await connection.call("quick", {}) == "quick"
    assert len(Client.opened) == 2 and not Client.opened[1].is_closed


async def test_a_server_that_dies_before_it_lists_its_tools_is_started_again() -> None:
    Client.opened = []
    connection = _Connection(Client, "shop", 5.0)
    await connection.call("quick", {})
    Client.opened[0].is_broken = True
    with pytest.raises(ConnectionError, match="is gone"):
        await connection.list_tools()
    assert await connection.list_tools() == ["of 1"]


async def test_a_server_that_lists_its_tools_never_is_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(Client):
        async def list_tools(self) -> Any:
            await asyncio.sleep(3600)

    monkeypatch.setattr("rill.envs.mcp.ALIVE_S", 0.05)
    Client.opened = []
    with pytest.raises(ConnectionError, match="the MCP server shop is gone"):
        await _Connection(Silent, "shop", 0.05).list_tools()
