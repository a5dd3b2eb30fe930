"""The application as uvicorn calls it: finds the route, checks the caller, reads the body, sends the answer.

    scope ─▶ route ───▶ key ─────▶ body: size, JSON, its model ─▶ handler(call, body) ─▶ Response
             404, 405   401, 403   413, 400                       whatever it raises ─▶ errors.py

No web framework does it: resolving a handler's arguments, middlewares and a task group around every stream took longer
than everything that an answer needs. Handlers are listed in `Routes`, by module; `describe` tells of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial, partialmethod
from typing import Any, get_args, get_type_hints

import msgspec
from pydantic import BaseModel
from pydantic import ValidationError as PydanticError
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rill import __version__
from rill.inference.server.errors import (
    ERRORS,
    ApiError,
    Tell,
    bad_request,
    describe_validation,
    error_response,
    to_api_error,
)
from rill.inference.server.state import ServerState

log = logging.getLogger(__name__)

encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode

NAME = "{name}"
"""The end of a path that a client chooses."""

PAGE = """<!doctype html><title>rill</title><meta charset="utf-8">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui"})</script>
"""


class Access(Enum):
    OPEN = auto()  # load balancers have no key
    CLIENT = auto()
    ADMIN = auto()


@dataclass(slots=True, kw_only=True)
class Call:
    """One request, whose caller may make it."""

    state: ServerState
    receive: Receive
    caller: str
    """A short digest of its key."""
    name: str = ""
    """What stands in the path in place of NAME."""


Handler = Callable[..., Any]
"""Gives what is told as JSON, or a Response. For administration it is a plain function: see `ServerState.act`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    method: str
    path: str
    access: Access
    handler: Handler
    body: type[BaseModel] | None
    """What the handler takes, by its parameter `body`; None: nothing."""
    needs_body: bool
    tell: Tell | None
    """How its errors are told. None: as OpenAI does."""


class Routes(list[Endpoint]):
    """The handlers of one module: `async def handler(call[, body])`; administration: `def handler(state[, body])`."""

    def _add(
        self, method: str, path: str, access: Access, tell: Tell | None = None
    ) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            wanted = get_type_hints(handler).get("body")
            kinds = get_args(wanted) or (wanted,)
            endpoint = Endpoint(
                method=method,
                path=path,
                access=access,
                handler=handler,
                body=kinds[0],
                needs_body=wanted is not None and type(None) not in kinds,
                tell=tell,
            )
            self.append(endpoint)
            return handler

        return add

    get = partialmethod(_add, "GET")
    post = partialmethod(_add, "POST")


class Application:
    def __init__(self, endpoints: Iterable[Endpoint], state: ServerState) -> None:
        self.state = state
        self._described = list(endpoints)
        own = Routes()
        own.get("/openapi.json", Access.OPEN)(self._describe)
        own.get("/docs", Access.OPEN)(self._show)
        self._by_path: dict[str, dict[str, Endpoint]] = {}
        for endpoint in (*self._described, *own):
            self._by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        self._named = [path for path in self._by_path if path.endswith(NAME)]

    def openapi(self) -> dict[str, Any]:
        return describe(self._described)

    async def _describe(self, call: Call) -> dict[str, Any]:
        return self.openapi()

    async def _show(self, call: Call) -> Response:
        return Response(PAGE, media_type="text/html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        try:
            endpoint, name = self._find(scope["method"], scope["path"])
            response = await self._answer(endpoint, name, scope, receive)
        except Exception as error:
            response = error_response(to_api_error(error), None if endpoint is None else endpoint.tell)
            if response.status_code == 500:
                log.error("unhandled error in %s %s", scope["method"], scope["path"], exc_info=error)
        # By route, not by path: a client must not be able to make new time series.
        path = "unknown" if endpoint is None else endpoint.path
        self.state.metrics.responses[path, response.status_code] += 1
        await response(scope, receive, send)

    async def _answer(self, endpoint: Endpoint, name: str, scope: Scope, receive: Receive) -> Response:
        state, caller = self.state, ""
        if endpoint.access is Access.CLIENT:
            caller = state.keys.check_client(scope)
        elif endpoint.access is Access.ADMIN:
            state.keys.check_admin(scope)
        body = () if endpoint.body is None else (await self._body(endpoint, scope, receive),)
        if endpoint.access is Access.ADMIN:
            answer = await state.act(endpoint.path.strip("/"), partial(endpoint.handler, state, *body))
        else:
            call = Call(state=state, receive=receive, caller=caller, name=name)
            answer = await endpoint.handler(call, *body)
        return answer if isinstance(answer, Response) else json_response(answer)

    def _find(self, method: str, path: str) -> tuple[Endpoint, str]:
        by_method, name = self._by_path.get(path), ""
        for named in self._named if by_method is None else ():
            if path.startswith(prefix := named.removesuffix(NAME)):
                by_method, name = self._by_path[named], path[len(prefix) :]
        if by_method is None:
            raise ApiError(404, "Not Found")
        if method not in by_method:
            raise ApiError(405, "Method Not Allowed", headers={"Allow": ", ".join(sorted(by_method))})
        return by_method[method], name

    async def _body(self, endpoint: Endpoint, scope: Scope, receive: Receive) -> BaseModel | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        content = await self._read(receive, headers.get(b"content-length", b"0"))
        if not content and not endpoint.needs_body:
            return None
        # What a web page may send without asking is of no other type.
        if content and b"json" not in headers.get(b"content-type", b"").lower():
            raise bad_request("the body must be JSON: send Content-Type: application/json")
        assert endpoint.body is not None
        try:
            return endpoint.body.model_validate(_decode_json(content))
        except PydanticError as error:
            raise describe_validation(error) from None
        except (ValueError, RecursionError):
            raise bad_request("the request body is not valid JSON", code="invalid_json") from None

    async def _read(self, receive: Receive, declared: bytes) -> bytes:
        """413 before more than the limit is held in memory, whatever was declared."""
        limit = self.state.config.max_body_bytes or math.inf
        num_bytes = int(declared) if declared.isdigit() else 0
        parts: list[bytes] = []
        is_whole = False
        while not is_whole and num_bytes <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client went away")
            parts.append(message.get("body", b""))
            num_bytes = sum(map(len, parts))
            is_whole = not message.get("more_body")
        if num_bytes > limit:
            raise ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
        return b"".join(parts)


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The API, from the handlers' bodies, as OpenAPI has it."""
    bodies = dict.fromkeys(each.body for each in endpoints if each.body is not None)
    refs, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        told: dict[str, Any] = {
            "summary": (each.handler.__doc__ or each.path).strip().partition("\n")[0],
            "responses": {"200": {"description": "OK"}} | ERRORS,
        }
        if "{" in each.path:
            name = each.path.partition("{")[2].removesuffix("}")
            told["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if each.body is not None:
            schema = refs[each.body, "validation"]
            schema = schema if each.needs_body else {"anyOf": [schema, {"type": "null"}]}
            content = {"application/json": {"schema": schema}}
            told["requestBody"] = {"required": each.needs_body, "content": content}
        paths.setdefault(each.path, {})[each.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "rill", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def json_response(body: Any, status: int = 200) -> Response:
    response, content = Response(status_code=status), encode_json(body)
    response.body = content
    response.raw_headers = [(b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")]
    return response


def event(body: Any) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""JSON may hold them as they are; clients that ask Unicode for lines would cut an event there."""


class EventStream(Response):
    """Server-sent events. `next_events` gives some, and whether they are the last. `on_close` runs even when the client
    left before the first."""

    def __init__(
        self, next_events: Callable[[], Awaitable[tuple[bytes, bool]]], on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self._next_events, self._on_close = next_events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_last = False
            while not is_last:
                data, is_last = await self._next_events()
                for end, escaped in () if data.isascii() else _LINE_ENDS.items():
                    data = data.replace(end, escaped)
                if data or is_last:
                    await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        finally:
            self._on_close()
