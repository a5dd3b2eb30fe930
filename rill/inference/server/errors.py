"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}` and the right status.

The one place where exceptions become HTTP answers. A client's mistake is a 4xx; an engine that cannot answer now
is a 503; what reaches the last handler is our own bug, and a 500.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rill.errors import (
    EngineError,
    PeerDiedError,
    RequestError,
    RillError,
    StuckError,
    UnsupportedError,
    UserError,
    WeightSyncError,
)

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    429: "rate_limit_error", 502: "bad_source_error", 503: "service_unavailable_error",
}  # fmt: skip

_NAME = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NAME, "code": _NAME}
_BODY = {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}
_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": _BODY}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": kind, "content": {"application/json": {"schema": _SCHEMA}}}
    for status, kind in _TYPES.items()
    if status != 405
}
"""For the API's own description."""

_STATUS: tuple[tuple[type[RillError], int], ...] = (
    (RequestError, 400),
    (UnsupportedError, 400),
    (WeightSyncError, 409),
    (UserError, 400),
    (PeerDiedError, 503),
    (StuckError, 503),
    (EngineError, 503),
)
"""First match wins."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success, decided by a route."""

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    retry_after_s: int | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """What a client sees of an exception from below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _describe_validation(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error), code="unsupported" if kind is UnsupportedError else None)
    return ApiError(500, "the server met an internal error; its log has the details")


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            # Clients send lone surrogates; echoing one would break the encoding of the answer.
            "message": error.message.encode("utf-8", "replace").decode(),
            "type": _TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )


def install_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        response = error_response(to_api_error(error))
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        if response.status_code == 500:
            log.error("unhandled error in %s %s", request.method, request.url.path, exc_info=error)
        return response

    for kind in (ApiError, RillError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _describe_validation(error: RequestValidationError) -> ApiError:
    """The first mistake, by the name of the field, as OpenAI reports it."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    if first["type"] == "json_invalid":
        return bad_request("the request body is not valid JSON", code="invalid_json")
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where}: there is no such field", param=where, code="unknown_field")
    return bad_request(f"{where or 'body'}: {first['msg']}", param=where or None, code=first["type"])
