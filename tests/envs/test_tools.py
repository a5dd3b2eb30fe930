from __future__ import annotations

import asyncio
import functools
import sys
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


async def test_a_tool_that_quits_or_is_cancelled_by_itself_is_only_an_error() -> None:
    def quits() -> None:
        sys.exit(3)

    async def quits_too() -> None:
        raise KeyboardInterrupt

    async def cancelled() -> None:
        raise asyncio.CancelledError("by a client")

    assert await called(quits, "{}") == ("error: SystemExit: 3", False)
    assert await called(quits_too, "{}") == ("error: KeyboardInterrupt", False)
    assert await called(cancelled, "{}") == ("error: CancelledError: by a client", False)


async def test_a_call_that_is_cancelled_from_outside_is_cancelled() -> None:
    async def waits() -> None:
        await asyncio.sleep(60)

    call = asyncio.ensure_future(called(waits, "{}"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_an_exception_that_cannot_be_written_is_named() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise AttributeError("response")

    def fails() -> None:
        raise Broken

    assert await called(fails, "{}") == (
        "error: Broken: (its text cannot be had: AttributeError in __str__)",
        False,
    )


async def test_what_the_model_is_told_of_a_wrong_call_is_short_too() -> None:
    assert len((await run_tool(None, "x" * 10_000, "{}", timeout_s=1, max_chars=100))[0]) < 200
    tool = as_tool(search)
    assert len((await run_tool(tool, "x" * 10_000, "{", timeout_s=1, max_chars=100))[0]) < 200


def test_bytes_of_every_kind_are_text_and_their_length_is_told() -> None:
    assert shown(bytearray(b"abc"), 100) == shown(memoryview(b"abc"), 100) == "abc"
    assert shown(b"x" * 1_000, 10) == "x" * 10 + "… (cut: 1000 characters)"


def test_functions_of_one_decorator_have_signatures_of_their_own() -> None:
    def counted(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **named: Any) -> Any:
            return await function(*args, **named)

        return wrapper

    @counted
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @counted
    async def look(query: str) -> str:
        """Look."""
        return query

    assert set(as_tool(add).parameters["properties"]) == {"a", "b"}
    assert set(as_tool(look).parameters["properties"]) == {"query"}
    assert as_tool(look).description == "Look."


def test_what_differs_from_episode_to_episode_is_not_that_of_the_first() -> None:
    tools = []
    for names in (["a"], ["b"]):

        def choose(name: Any, *, best: str = names[0]) -> str:
            return str(name)

        choose.__annotations__["name"] = Literal[tuple(names)]
        choose.__doc__ = f"One of {names}."
        tools.append(as_tool(choose))
    assert [tool.parameters["properties"]["name"]["const"] for tool in tools] == ["a", "b"]
    assert [tool.parameters["properties"]["best"]["default"] for tool in tools] == ["a", "b"]
    assert [tool.description for tool in tools] == ["One of ['a'].", "One of ['b']."]


async def test_an_object_a_partial_and_a_function_that_gives_a_coroutine_are_tools() -> None:
    class Doubling:
        """Twice a number."""

        async def __call__(self, number: int) -> int:
            return 2 * number

    async def power(number: int, exponent: int) -> int:
        return int(number**exponent)

    for tool in (Doubling(), functools.partial(power, exponent=1), lambda number: power(number, 1)):
        result, is_ok = await called(tool, '{"number": 3}')
        assert is_ok and result in ("3", "6")
    assert as_tool(Doubling()).parameters["properties"]["number"] == {"type": "integer"}
    assert as_tool(functools.partial(power, exponent=2)).name == "power"
