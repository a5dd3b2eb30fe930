"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}` and the right status.

The one place where exceptions become HTTP answers. A client's mistake is a 4xx; an engine that cannot answer now
is a 503; what reaches the last handler is our own bug, and a 500.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from rill.errors import EngineError, PeerDiedError, StuckError, UnsupportedError, UserError, WeightSyncError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    429: "rate_limit_error", 502: "bad_source_error", 503: "service_unavailable_error",
}  # fmt: skip

_NAME = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NAME, "code": _NAME}
_BODY = {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}
_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": _BODY}}
ERRORS = {
    str(status): {"description": kind, "content": {"application/json": {"schema": _SCHEMA}}}
    for status, kind in _TYPES.items()
    if status != 405
}
"""For the API's own description."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success, decided by a route."""

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """What a client sees of an exception from below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return bad_request(str(error), code="unsupported" if isinstance(error, UnsupportedError) else None)
    if isinstance(error, WeightSyncError):
        return ApiError(409, str(error))
    if isinstance(error, PeerDiedError | StuckError | EngineError):
        return ApiError(503, str(error))
    return ApiError(500, "the server met an internal error; its log has the details")


def error_fields(error: ApiError) -> dict[str, Any]:
    return {
        # Clients send lone surrogates; echoing one would break the encoding of the answer.
        "message": error.message.encode("utf-8", "replace").decode(),
        "type": _TYPES.get(error.status, "server_error"),
        "param": error.param,
        "code": error.code,
    }


Tell = Callable[[str, str], dict[str, Any]]
"""The body of an error in another dialect, from its message and its type."""


def error_response(error: ApiError, tell: Tell | None = None) -> Response:
    fields = error_fields(error)
    headers = error.headers | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    body = {"error": fields} if tell is None else tell(fields["message"], fields["type"])
    content = msgspec.json.encode(body)
    return Response(content, status_code=error.status, media_type="application/json", headers=headers)


def describe_validation(error: ValidationError) -> ApiError:
    """The first mistake, by the name of the field, as OpenAI reports it."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where}: there is no such field", param=where, code="unknown_field")
    return bad_request(f"{where or 'body'}: {first['msg']}", param=where or None, code=first["type"])
