from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from rill.envs.tools import as_tool, run_tool, shown
from rill.errors import ConfigError


def search(query: str, num: int = 3, kind: Literal["web", "news"] = "web") -> list[str]:
    """Search the web.

    Returns titles.
    """
    return [f"{kind}:{query}:{n}" for n in range(num)]


def test_the_schema_comes_from_the_signature() -> None:
    schema = as_tool(search).schema()
    assert schema["function"]["name"] == "search"
    assert schema["function"]["description"] == "Search the web.\n\nReturns titles."
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {"type": "string"}
    assert parameters["properties"]["num"] == {"type": "integer", "default": 3}
    assert parameters["properties"]["kind"]["enum"] == ["web", "news"]


def test_an_argument_can_be_described() -> None:
    def look(at: Annotated[str, Field(description="a place")]) -> str:
        return at

    properties = as_tool(look).schema()["function"]["parameters"]["properties"]
    assert properties["at"] == {"type": "string", "description": "a place"}


def test_functions_written_in_a_loop_keep_their_own_values() -> None:
    tools = []
    for number in range(2):

        def which(plus: int = number) -> int:
            return plus

        tools.append(as_tool(which))
    defaults = [tool.parameters["properties"]["plus"]["default"] for tool in tools]
    assert defaults == [0, 1]


def test_arguments_without_a_name_are_refused() -> None:
    def any_of(*things: str) -> None: ...

    with pytest.raises(ConfigError, match="name the arguments one by one"):
        as_tool(any_of)


async def called(function: Any, arguments: str, **limits: Any) -> tuple[str, bool]:
    return await run_tool(as_tool(function), "f", arguments, **{"timeout_s": 10, "max_chars": 100, **limits})


async def test_results_are_text() -> None:
    assert await called(search, '{"query": "a", "num": "2"}') == ('["web:a:0", "web:a:1"]', True)
    assert await called(search, "") == ("error: f: query: Field required", False)
    assert (await called(search, "{"))[0].startswith("error: the arguments of f are not valid JSON")
    for wrong in ("[1]", "[" * 100_000, '{"query": "\ud800', '{"query": "a"} and'):
        assert (await called(search, wrong))[0].startswith("error: the arguments of f are not valid JSON")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x00", "red x"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ({"a": None}, '{"a": null}'),
        (None, "null"),
        ("x" * 10_000_000, "x" * 100 + "… (cut: 10000000 characters)"),
        ("\ud800", "?"),
    ],
)
def test_what_a_model_reads_is_clean_and_short(value: object, text: str) -> None:
    assert shown(value, 100) == text


async def test_a_tool_that_stops_iterating_or_times_out_by_itself_is_only_an_error() -> None:
    def stops() -> None:
        raise StopIteration("x")

    async def late() -> None:
        raise TimeoutError("the shop is closed")

    assert await called(stops, "{}") == ("error: RuntimeError: StopIteration: x", False)
    assert await called(late, "{}") == ("error: TimeoutError: the shop is closed", False)
