"""Who may call what: client keys open generation, the admin key opens administration, neither opens the other.

Keys come as `Authorization: Bearer KEY` (or `X-API-Key`). They are compared as digests in constant time, and every
comparison runs over all keys, so that timing tells nothing about a key or its place.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.requests import HTTPConnection
from starlette.types import Scope

from rill.inference.server.config import ServerConfig
from rill.inference.server.errors import ApiError

ANONYMOUS = "anonymous"


class KeyRing:
    """The digests of the configured keys. Plain keys are not kept."""

    def __init__(self, config: ServerConfig) -> None:
        self._clients = [_digest(key.get_secret_value()) for key in config.api_keys]
        self._admin = None if config.admin_key is None else _digest(config.admin_key.get_secret_value())

    def check_client(self, scope: Scope) -> str:
        """The caller's name for limits and logs: a short digest of its key, never the key."""
        if not self._clients:
            return ANONYMOUS
        digest = _given_digest(HTTPConnection(scope), "send `Authorization: Bearer KEY`")
        if not _matches(digest, self._clients):
            raise ApiError(401, "incorrect API key", code="invalid_api_key")
        return digest.hex()[:12]

    def check_admin(self, scope: Scope) -> None:
        request = HTTPConnection(scope)
        if self._admin is None:
            if _is_local(request):
                return
            who = "administration from other machines, through a proxy or from a web page"
            raise ApiError(403, f"{who} needs an admin key: start the server with one")
        digest = _given_digest(request, "this route needs the admin key")
        is_client, is_admin = _matches(digest, self._clients), _matches(digest, [self._admin])
        if not is_admin and is_client:
            raise ApiError(403, "a client key does not open administration routes", code="admin_key_required")
        if not is_admin:
            raise ApiError(401, "incorrect API key", code="invalid_api_key")


def _given_digest(request: HTTPConnection, advice: str) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    given = given or request.headers.get("x-api-key", "")
    if not given:
        raise ApiError(401, f"no API key: {advice}", code="missing_api_key")
    return _digest(given)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _matches(digest: bytes, keys: list[bytes]) -> bool:
    return any([hmac.compare_digest(digest, key) for key in keys])  # noqa: C419 a list: all are compared


_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def _is_local(request: HTTPConnection) -> bool:
    """A program on this machine that speaks to us directly.

    A proxy on this machine has a local address, and speaks for anybody; a web page reaches a local server through
    its reader's browser, which says so (Origin, Sec-Fetch-Site), or, where a name was made to point here, names another
    host.
    """
    headers = request.headers
    if any(name in headers for name in _FORWARDED):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return False
    if request.client is None:  # a Unix socket
        return True
    return _is_loopback(request.client.host) and _is_loopback(_host_name(headers.get("host", "")))


def _host_name(host: str) -> str:
    """Without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
