"""Administration: weights, pause and resume, memory, caches; and what operators watch: models, health, metrics.

The paths are prime-rl's and vLLM's, so that their trainers can drive this server. Engine calls that may block run in a
thread, one at a time. What new weights go through on their way to the engine is in weights.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from rill.errors import RillError
from rill.inference.base import MemoryLevel, PauseMode
from rill.inference.server.errors import ApiError
from rill.inference.server.schemas import InitBroadcasterBody, PauseBody, SleepBody, UpdateWeightsBody
from rill.inference.server.state import ServerState, json_response, state_of

if TYPE_CHECKING:
    from rill.inference.server.weights import WeightInbox

log = logging.getLogger(__name__)

T = TypeVar("T")

_LIVENESS_S = 5.0

routes = APIRouter()

_PAUSE_MODES = {
    "interrupt": PauseMode.INTERRUPT,
    "keep": PauseMode.INTERRUPT,
    "abort": PauseMode.INTERRUPT,
    "finish": PauseMode.FINISH,
    "wait": PauseMode.FINISH,
}


@routes.get("/v1/models")
async def list_models(request: Request) -> Response:
    state = state_of(request)
    state.keys.check_client(request)
    return json_response(
        {
            "object": "list",
            "data": [_card(state, n) for n in (state.config.model_name, *state.config.adapters)],
        }
    )


@routes.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    state = state_of(request)
    state.keys.check_client(request)
    if name not in (state.config.model_name, *state.config.adapters):
        raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
    return json_response(_card(state, name))


@routes.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are served; 503 with the reason otherwise. Needs no key: load balancers have none."""
    state = state_of(request)
    status = _status(state)
    stats = await asyncio.to_thread(state.engine.stats)
    body = {
        "status": status,
        "version": int(state.engine.version),
        "replicas": stats.extra.get("replicas", 1.0),
    }
    return json_response(body, 200 if status in ("ok", "paused") else 503)


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    stats = await asyncio.to_thread(state.engine.stats)
    text = state.metrics.render(stats, state.admission.num_in_flight)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@routes.get("/liveness")
async def liveness(request: Request) -> Response:
    """Whether the engine answers at all (prime-rl's probe): 503 where it does not within five seconds."""
    state = state_of(request)
    try:
        await asyncio.wait_for(asyncio.to_thread(state.engine.stats), _LIVENESS_S)
    except (TimeoutError, RillError):
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})


@routes.post("/pause")
async def pause(request: Request, body: PauseBody | None = None) -> Response:
    """Stop between two steps and keep the tokens (interrupt), or let what runs end (finish)."""
    state = _admin(request)
    mode = (body or PauseBody()).mode

    def act() -> None:
        state.engine.pause(_PAUSE_MODES[mode], state.config.admin_timeout_s)
        if mode == "abort":
            state.engine.abort()
        state.is_paused = True

    await _act(state, "pause", act)
    return json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: Request) -> Response:
    state = _admin(request)

    def act() -> None:
        if state.is_asleep:
            raise ApiError(409, "the engine sleeps: call /wake first")
        state.engine.resume()
        state.is_paused = False

    await _act(state, "resume", act)
    return json_response({"status": "resumed"})


@routes.post("/sleep")
async def sleep(request: Request, body: SleepBody | None = None) -> Response:
    """Give device memory back. The engine must be paused or idle."""
    state = _admin(request)
    level = MemoryLevel((body or SleepBody()).level)

    def act() -> None:
        state.engine.release(level)
        state.is_asleep = True

    await _act(state, "sleep", act)
    return json_response({"status": "asleep", "level": level.value})


@routes.post("/wake")
@routes.post("/wake_up")
async def wake(request: Request) -> Response:
    state = _admin(request)

    def act() -> None:
        state.engine.restore()
        state.is_asleep = False

    await _act(state, "wake", act)
    return json_response({"status": "awake"})


@routes.post("/flush_cache")
@routes.post("/reset_prefix_cache")
async def flush_cache(request: Request) -> Response:
    state = _admin(request)
    await _act(state, "flush_cache", state.engine.flush)
    return json_response({"status": "flushed"})


@routes.post("/init_broadcaster")
async def init_broadcaster(body: InitBroadcasterBody, request: Request) -> Response:
    """Where weights will be published. prime-rl's NCCL address gets 404, and its orchestrator goes on without."""
    state = _admin(request)
    transport = body.transport
    if transport is None:
        raise ApiError(
            404,
            "this server takes no weights over NCCL: give `transport` (disk, shm or http) and `location`, or send"
            " `weight_dir` to /update_weights (prime-rl: weight_broadcast.type = filesystem)",
            code="unsupported",
        )

    def act() -> None:
        _inbox(state).listen(transport, body.location, body.verify)

    await _act(state, "init_broadcaster", act)
    return json_response({"status": "ok", "transport": transport, "location": body.location})


@routes.post("/update_weights")
async def update_weights(body: UpdateWeightsBody, request: Request) -> Response:
    """Weights from a manifest, from a folder, or from the place that /init_broadcaster named; see weights.py."""
    state = _admin(request)
    version = await _act(state, "update_weights", lambda: _inbox(state).update(body))
    return json_response({"status": "ok", "version": int(version)})


@routes.post("/reload_weights")
async def reload_weights(request: Request) -> Response:
    """The weights that the server started with, under a new version."""
    state = _admin(request)
    version = await _act(state, "reload_weights", lambda: _inbox(state).reload())
    return json_response({"status": "ok", "version": int(version)})


async def _act(state: ServerState, what: str, act: Callable[[], T]) -> T:
    """In a thread, one at a time, within the deadline. What has begun is never left half done: a caller that leaves or
    a deadline that passes ends the waiting, not the work, and the next one waits for its end."""

    async def alone() -> T:
        async with state.admin_lock:
            return await asyncio.to_thread(act)

    work = asyncio.ensure_future(alone())
    try:
        return await asyncio.wait_for(asyncio.shield(work), state.config.admin_timeout_s)
    except TimeoutError:
        work.add_done_callback(
            lambda done: log.warning("%s ended late: %s", what, done.exception() or "done")
        )
        raise ApiError(
            503, f"{what} did not end within {state.config.admin_timeout_s:g} s and goes on: see /health"
        ) from None


def _inbox(state: ServerState) -> WeightInbox:
    if state.inbox is None:
        from rill.inference.server.weights import WeightInbox

        state.inbox = WeightInbox(state.engine, state.model)
    return state.inbox


def _admin(request: Request) -> ServerState:
    state = state_of(request)
    state.keys.check_admin(request)
    return state


def _status(state: ServerState) -> str:
    if state.admission.is_draining:
        return "draining"
    if state.inbox is not None and state.inbox.failure is not None:
        return "weights incomplete"
    if state.is_asleep:
        return "asleep"
    return "paused" if state.is_paused else "ok"


def _card(state: ServerState, name: str) -> dict[str, Any]:
    is_adapter = name != state.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "rill",
        "root": state.config.model_name,
        "parent": state.config.model_name if is_adapter else None,
        "max_model_len": state.engine.max_context,
        "vocab_size": state.codec.vocab_size,
        "version": int(state.engine.version),
    }
