"""An MCP server with a shop's tools: imported as an object, or started as a program (standard input and output)."""

from __future__ import annotations

import asyncio
import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 42}[item]


@server.tool()
async def hang(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "at last"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
