"""The server fuzzed from its own OpenAPI schema: whatever arrives, never a 500, and errors keep OpenAI's shape."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.inference.server.run import ROUTES
from rill.inference.server.schemas import Body
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http

schemathesis = pytest.importorskip("schemathesis")

GENERATION = [
    "/v1/chat/completions",
    "/v1/chat/completions/tokens",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/abort_requests",
]
DIALECTS = ["/v1/responses", "/v1/messages"]
"""Have bodies and errors of their own; see test_server_dialects.py."""
TEXT = ["/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}", "/health", "/ping", "/liveness", "/metrics",
        "/version"]  # fmt: skip
ADMIN = ["/pause", "/resume", "/sleep", "/wake", "/wake_up", "/flush_cache", "/reset_prefix_cache",
         "/update_weights", "/reload_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
         "/load_lora_adapter", "/unload_lora_adapter"]  # fmt: skip

_CONFIG = ServerConfig(port=0, request_timeout_s=5.0, max_samples=8)


def _schema() -> Any:
    engine = FakeEngine()
    try:
        return schemathesis.openapi.from_dict(create_app(engine, engine.tokenizer, _CONFIG).openapi())
    finally:
        engine.close()


_SCHEMA = _schema()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngine(FakeEngine.Config(max_context=48))
    with BackgroundServer(create_app(engine, engine.tokenizer, _CONFIG), _CONFIG) as server:
        yield server.url
    engine.close()


def check(case: Any, url: str) -> bool:
    """Whether it was answered, and not refused."""
    response = case.call(base_url=url, timeout=20)
    allowed = (502, 503) if case.path == "/update_weights" else (503,)
    assert response.status_code < 500 or response.status_code in allowed, response.text
    if response.status_code >= 400 and case.method != "HEAD":
        keys = response.json()["error"].keys()
        is_anthropic = case.path == "/v1/messages" and keys == {"message", "type"}
        assert is_anthropic or keys == {"message", "type", "param", "code"}
    return bool(response.status_code < 400)


def bounded(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def answered() -> Iterator[Counter[tuple[str, bool]]]:
    """(path, was it answered) of all that one test sends; a route that can do both must have done both."""
    seen: Counter[tuple[str, bool]] = Counter()
    yield seen
    both = {"/tokenize", "/detokenize", *GENERATION} - {"/v1/embeddings"}
    for path in both & {path for path, _ in seen}:
        assert seen[path, True] and seen[path, False], seen


@_SCHEMA.parametrize()
@bounded(100)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_route_at_length(case: Any, url: str, answered: Counter[tuple[str, bool]]) -> None:
    answered[case.path, check(case, url)] += 1


@_SCHEMA.include(path=GENERATION).parametrize()
@bounded(3)
def test_generation_routes_refuse_or_answer(case: Any, url: str) -> None:
    check(case, url)


@_SCHEMA.include(path=TEXT).parametrize()
@bounded(3)
def test_text_routes_refuse_or_answer(case: Any, url: str) -> None:
    check(case, url)


@_SCHEMA.include(path=ADMIN).parametrize()
@bounded(3)
def test_administration_refuses_or_answers(case: Any, url: str) -> None:
    check(case, url)


def _bodies() -> list[tuple[str, bool, dict[str, Any]]]:
    """(path, is it administration, its body's schema) of every route that has one."""
    document = _SCHEMA.raw_schema
    found = []
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        if content and path not in DIALECTS:
            schema = content["application/json"]["schema"]
            names = [part["$ref"] for part in schema.get("anyOf", [schema]) if "$ref" in part]
            found.append((path, path in ADMIN, document["components"]["schemas"][names[0].split("/")[-1]]))
    return found


_KEYS = {"api_keys": ["client"], "admin_key": "admin"}


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    engine = FakeEngine()
    config = ServerConfig(port=0, max_body_bytes=4096, **_KEYS)  # type: ignore[arg-type]
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        yield server.url
    engine.close()


@pytest.mark.parametrize(("path", "is_admin", "schema"), _bodies(), ids=lambda value: str(value)[:40])
def test_every_route_refuses_the_same_mistakes_in_the_same_way(
    locked_url: str, path: str, is_admin: bool, schema: dict[str, Any]
) -> None:
    key, other = ("admin", "client") if is_admin else ("client", "admin")

    def send(content: bytes, key: str | None = key) -> tuple[int, str | None]:
        headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )
        response = http.post(locked_url + path, content=content, headers=headers, timeout=20)
        assert response.status_code >= 400, (content[:80], response.text)
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]
        return response.status_code, error["param"]

    fields = schema["properties"]
    valid = {name: _VALID[name] for name in schema.get("required", [])}
    for no_json in (b"{", b"\xff", b'{"a": NaN}x', b"[" * 4000):
        assert send(no_json) == (400, None), no_json
    for no_object in (b"[]", b"1", b'"text"'):
        assert send(no_object)[0] == 400
    assert send(b" " * 5000)[0] == 413
    for name in schema.get("required", []):
        assert send(json.dumps({k: v for k, v in valid.items() if k != name}).encode()) == (400, name)
    for name, declared in fields.items():
        if declared != {"title": declared.get("title")} and name not in ("features",):
            wrong = json.dumps(valid | {name: [[{"no": "such type"}]]}).encode()
            status, param = send(wrong)
            assert status == 400 and (param or "").split(".")[0] == name, (name, status, param)
    if "model" in fields:
        assert send(json.dumps(valid | {"model": "other"}).encode()) == (404, "model")
    body = json.dumps(valid).encode()
    assert send(body, None)[0] == 401 and send(body, "wrong")[0] == 401
    assert send(body, other)[0] == (403 if is_admin else 401)


_VALID = {
    "prompt": "a", "messages": [{"role": "user", "content": "hi"}], "tokens": [40], "token_ids": [40],
    "lora_name": "a", "lora_path": "nowhere", "input": "a", "request_ids": ["a"], "weight_dir": "nowhere",
}  # fmt: skip


def test_null_asks_for_nothing() -> None:
    bodies = {endpoint.body for module in ROUTES for endpoint in module.routes} - {None}
    for body in (each for each in bodies if issubclass(each, Body)):
        required = {name: _VALID[name] for name, field in body.model_fields.items() if field.is_required()}
        others = body.model_fields.keys() - required.keys() - {"max_tokens"}  # where it is "no limit"
        assert body.model_validate(required | dict.fromkeys(others)) == body.model_validate(required), body


def test_every_route_is_fuzzed() -> None:
    paths = {operation.ok().path for operation in _SCHEMA.get_all_operations()}
    assert paths == set(GENERATION + TEXT + ADMIN)
