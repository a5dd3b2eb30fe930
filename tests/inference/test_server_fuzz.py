"""The server fuzzed from its own OpenAPI schema: whatever arrives, never a 500, and errors keep OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from rill.inference.server import ServerConfig, create_app, serve_in_thread
from tests.inference.fake_engine import FakeEngine

schemathesis = pytest.importorskip("schemathesis")

GENERATION = [
    "/v1/chat/completions",
    "/v1/chat/completions/tokens",
    "/v1/completions",
    "/inference/v1/generate",
]
TEXT = ["/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}", "/health", "/liveness", "/metrics"]
ADMIN = ["/pause", "/resume", "/sleep", "/wake", "/wake_up", "/flush_cache", "/reset_prefix_cache",
         "/init_broadcaster", "/update_weights", "/reload_weights"]  # fmt: skip

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
    with serve_in_thread(create_app(engine, engine.tokenizer, _CONFIG), _CONFIG) as server:
        yield server.url
    engine.close()


def check(case: Any, url: str) -> None:
    response = case.call(base_url=url, timeout=20)
    allowed = (502, 503) if case.path == "/update_weights" else (503,)
    assert response.status_code < 500 or response.status_code in allowed, response.text
    if response.status_code >= 400 and case.method != "HEAD":
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def bounded(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@_SCHEMA.parametrize()
@bounded(100)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_route_at_length(case: Any, url: str) -> None:
    check(case, url)


@_SCHEMA.include(path=GENERATION).parametrize()
@bounded(6)
def test_generation_routes_refuse_or_answer(case: Any, url: str) -> None:
    check(case, url)


@_SCHEMA.include(path=TEXT).parametrize()
@bounded(6)
def test_text_routes_refuse_or_answer(case: Any, url: str) -> None:
    check(case, url)


@_SCHEMA.include(path=ADMIN).parametrize()
@bounded(3)
def test_administration_refuses_or_answers(case: Any, url: str) -> None:
    check(case, url)


def test_every_route_is_fuzzed() -> None:
    paths = {operation.ok().path for operation in _SCHEMA.get_all_operations()}
    assert paths == set(GENERATION + TEXT + ADMIN)
