"""Plain functions as tools: the schema from the signature, the call with its deadline, the result as a model reads it.

    async def weather(city: str, days: int = 1) -> str:
        "The forecast for a city."

An argument that does not fit the signature, a call that raises or takes too long: each is told to the model as a
result that begins with "error:". What a tool returns is shown as text: other values as JSON, bytes decoded, terminal
colours removed, cut where it is too long.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rill.envs.deadline import Deadline, is_own
from rill.envs.threads import in_thread
from rill.errors import ConfigError, in_words

ERROR = "error: "
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema."""
    call: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """With arguments as the model wrote them."""
    is_once: bool = False
    """A call that was begun and whose result is not known is never repeated: the model is told that it was lost."""

    def schema(self) -> dict[str, Any]:
        """As the OpenAI API has it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def as_tool(function: Tool | Callable[..., Any], *, once: bool = False) -> Tool:
    """A tool from a function, plain or async. Its docstring is what the model is told of it."""
    if isinstance(function, Tool):
        return function
    if not callable(function):
        raise ConfigError(f"a tool must be a function or its schema, got {function!r:.80}")
    name = getattr(_written(function), "__name__", type(function).__name__)
    arguments, schema, description, is_async = _signature(function, name)

    async def call(given: Mapping[str, Any]) -> Any:
        checked = arguments.__pydantic_validator__.validate_python(given)
        values = {field: checked.__dict__[field] for field in checked.__pydantic_fields_set__}
        result = function(**values) if is_async else await in_thread(function, **values)
        return await result if inspect.isawaitable(result) else result

    return Tool(name=name, description=description, parameters=schema, call=call, is_once=once)


async def run_tool(
    tool: Tool | None, name: str, arguments: str | Mapping[str, Any], *, timeout_s: float, max_chars: int
) -> tuple[str, bool]:
    """The result as the model reads it, and whether the call succeeded. `arguments`: as the model wrote them, in JSON,
    or as values."""
    if tool is None:
        return shown(f"{ERROR}there is no tool {name!r}", max_chars), False
    try:
        given: Any = arguments
        if isinstance(arguments, str):
            given = msgspec.json.decode(arguments) if arguments.strip() else {}
        if type(given) is not dict and not isinstance(given, Mapping):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        return shown(f"{ERROR}the arguments of {name} are not valid JSON: {error}", max_chars), False
    deadline = Deadline(timeout_s)
    try:
        with deadline:
            return shown(await tool.call(given), max_chars), True
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return shown(f"{ERROR}{name}: {wrong}", max_chars), False
    except BaseException as error:
        if not is_own(error, deadline.num_cancels):
            raise
        if deadline.is_expired:
            return f"{ERROR}{name} took longer than {timeout_s:g} s", False
        return shown(f"{ERROR}{in_words(error)}", max_chars), False


def shown(value: Any, max_chars: int) -> str:
    """What the model reads of a value."""
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value).decode("utf-8", "replace")
    elif not isinstance(value, str):
        try:
            value = _as_json(value)
        except (TypeError, ValueError, RecursionError):
            value = repr(value)
    length = len(value)
    if length <= max_chars and value.isprintable():
        return str(value)
    text = _CONTROL.sub("", _ANSI.sub("", value[: 2 * max_chars]))
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) > max_chars or length > 2 * max_chars:
        text = f"{text[:max_chars]}… (cut: {length} characters)"
    return text


_as_json = json.JSONEncoder(ensure_ascii=False, default=str).encode
_Signature = tuple[type[BaseModel], dict[str, Any], str, bool]
_known: dict[Any, tuple[Any, _Signature]] = {}
"""By code: a function that is written inside `run` is a new object in every episode, mostly with the same signature."""
_deciding = attrgetter("__name__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__")
"""Beside the code."""


def _signature(function: Callable[..., Any], name: str) -> _Signature:
    """What checks the arguments, their JSON schema, what the model is told of the tool, and whether it is async."""
    inner = inspect.unwrap(function) if hasattr(function, "__wrapped__") else function
    code = (getattr(function, "__code__", None), getattr(inner, "__code__", None))
    facts = None if None in code else (inspect.ismethod(function), _deciding(inner))
    known = _known.get(code)
    if known is not None and known[0] == facts:
        return known[1]
    model = _make_arguments_model(function, name)
    schema = model.model_json_schema()
    for part in (schema, *schema.get("properties", {}).values()):
        part.pop("title", None)
    schema = {**schema, "properties": schema.get("properties", {})}
    about = inspect.cleandoc(_written(function).__doc__ or "")
    signature = (model, schema, about, inspect.iscoroutinefunction(function))
    if facts is not None:
        _known[code] = (facts, signature)
    return signature


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _make_arguments_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    written = _written(function)
    if not inspect.isroutine(written) and not isinstance(written, type):
        written = type(written).__call__
    try:
        hints = get_type_hints(written, include_extras=True)
    except NameError:  # names that exist only where the function was written
        hints = {}
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name}: *{parameter.name} has no schema: name the arguments one by one")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    model: type[BaseModel] = create_model(
        f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields
    )
    return model
