"""HTTP to an inference server: requests, streams of events, and a server's refusals as rill's errors.

Used by the HTTP adapters (remote.py and its subclasses), on their event loop. A 4xx is the request's mistake
(RequestError), everything else that is not success an EngineError; what the network does is a PeerDiedError.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from rill.errors import AccessError, EngineError, PeerDiedError, RequestError


class ServerHttp:
    def __init__(
        self,
        name: str,
        url: str,
        *,
        headers: dict[str, str],
        max_concurrent: int,
        connect_timeout_s: float,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            transport=transport,
            # Generation may take as long as it takes; only connecting has a limit of its own.
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent),
        )

    async def get(self, path: str) -> Any | None:
        """The JSON there, or None where the server has no such route."""
        with self._reached():
            response = await self._client.get(path)
        return response.json() if response.status_code == 200 else None

    async def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        """The JSON that comes back, or the text where it is none. `headers` go over the client's own."""
        with self._reached():
            response = await self._client.post(path, json=body, headers=headers)
        self._raise_for_status(path, response.status_code, response.text)
        with suppress(ValueError):
            return response.json()
        return response.text

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a POST, decoded, up to [DONE]."""
        with self._reached():
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    self._raise_for_status(path, response.status_code, text)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event and "choices" not in event:
                        raise self._event_error(event["error"])
                    yield event

    async def close(self) -> None:
        await self._client.aclose()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise PeerDiedError(f"{self.name} at {self.url}: {type(error).__name__}: {error}") from error

    def _event_error(self, error: Any) -> Exception:
        """A stream has its status line behind it: vLLM, SGLang and rill put the reason into an event."""
        message = f"{self.name}: {json.dumps(error)[:500]}"
        code = error.get("code") if isinstance(error, dict) else None
        is_ours = isinstance(code, int) and 400 <= code < 500 and code != 429
        is_ours |= isinstance(error, dict) and error.get("type") == "invalid_request_error"
        return RequestError(message) if is_ours else EngineError(message)

    def _raise_for_status(self, path: str, status: int, text: str) -> None:
        if status < 400:
            return
        message = f"{self.name}: {path} answered {status}: {text[:500]}"
        if status in (401, 403):
            raise AccessError(message)
        raise RequestError(message) if status < 500 and status != 429 else EngineError(message)
