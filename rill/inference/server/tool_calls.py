"""The server's tools in the form that the parsers take; the parsers are in rill.data.tool_calls."""

from __future__ import annotations

from collections.abc import Sequence

from rill.data import tool_calls
from rill.data.tool_calls import SYNTAXES, ParsedCall, ToolSyntax, detect_syntax
from rill.inference.server.schemas import Tool

__all__ = ["SYNTAXES", "ParsedCall", "ToolCallStream", "ToolSyntax", "detect_syntax"]


class ToolCallStream(tool_calls.ToolCallStream):
    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool = True) -> None:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        super().__init__(syntax, schemas, parallel=parallel)
