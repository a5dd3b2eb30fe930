"""Administration: weights, pause and resume, memory, caches; and what operators watch: health and metrics.

The paths are prime-rl's and vLLM's, so that their trainers can drive this server. What new weights go through on their
way to the engine is in weights.py; models and adapters are in routes_models.py.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from rill import __version__
from rill.errors import RillError
from rill.inference.base import MemoryLevel, PauseMode
from rill.inference.server.answers import json_response
from rill.inference.server.errors import ApiError
from rill.inference.server.schemas import AbortBody, PauseBody, SleepBody, UpdateWeightsBody
from rill.inference.server.state import ServerState, admin_state, state_of

if TYPE_CHECKING:
    from rill.inference.server.weights import WeightInbox

_LIVENESS_S = 5.0
_PROBES = ThreadPoolExecutor(2, thread_name_prefix="server-probe")
"""Probes wait for nothing but the engine."""

routes = APIRouter()


@routes.get("/health")
@routes.get("/ping")
async def health(request: Request) -> Response:
    """200 while requests are served; 503 with the reason otherwise. Needs no key: load balancers have none."""
    state = state_of(request)
    stats = await asyncio.to_thread(state.engine.stats)
    num_replicas = stats.extra.get("replicas", 1.0)
    status = _status(state) if num_replicas else "no replica"
    body = {"status": status, "version": int(state.engine.version), "replicas": num_replicas}
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
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.run_in_executor(_PROBES, state.engine.stats), _LIVENESS_S)
    except (TimeoutError, RillError):
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})


@routes.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@routes.post("/abort_requests")
async def abort_requests(body: AbortBody, request: Request) -> Response:
    """End the caller's own requests, by the name it gave them (`request_id`) or by their answers' ids. They are
    answered with what they have, and finish_reason "abort"."""
    state = state_of(request)
    caller = state.keys.check_client(request)
    num_aborted = await state.generation.abort([(caller, name) for name in body.request_ids])
    return json_response({"status": "ok", "aborted": num_aborted})


@routes.post("/pause")
async def pause(request: Request, body: PauseBody | None = None) -> Response:
    """Stop between two steps and keep the tokens (interrupt), or let what runs end (finish)."""
    state = admin_state(request)
    mode = (body or PauseBody()).mode

    def work() -> None:
        lets_end = mode in ("finish", "wait")
        state.engine.pause(
            PauseMode.FINISH if lets_end else PauseMode.INTERRUPT, state.config.admin_timeout_s
        )
        if mode == "abort":
            state.engine.abort()
        state.is_paused = True

    await state.act("pause", work)
    return json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: Request) -> Response:
    state = admin_state(request)

    def work() -> None:
        if state.is_asleep:
            raise ApiError(409, "the engine sleeps: call /wake first")
        state.engine.resume()
        state.is_paused = False

    await state.act("resume", work)
    return json_response({"status": "resumed"})


@routes.post("/sleep")
async def sleep(request: Request, body: SleepBody | None = None) -> Response:
    """Give device memory back. The engine must be paused or idle."""
    state = admin_state(request)
    level = MemoryLevel((body or SleepBody()).level)

    def work() -> None:
        state.engine.release(level)
        state.is_asleep = True

    await state.act("sleep", work)
    return json_response({"status": "asleep", "level": level.value})


@routes.post("/wake")
@routes.post("/wake_up")
async def wake(request: Request) -> Response:
    state = admin_state(request)

    def work() -> None:
        state.engine.restore()
        state.is_asleep = False

    await state.act("wake", work)
    return json_response({"status": "awake"})


@routes.post("/flush_cache")
@routes.post("/reset_prefix_cache")
async def flush_cache(request: Request) -> Response:
    state = admin_state(request)
    await state.act("flush_cache", state.engine.flush)
    return json_response({"status": "flushed"})


@routes.post("/update_weights")
async def update_weights(body: UpdateWeightsBody, request: Request) -> Response:
    """Weights from a manifest or from a folder; see weights.py."""
    state = admin_state(request)
    version = await state.act("update_weights", lambda: _inbox(state).update(body))
    return json_response({"status": "ok", "version": int(version)})


@routes.post("/reload_weights")
async def reload_weights(request: Request) -> Response:
    """The weights that the server started with, under a new version."""
    state = admin_state(request)
    version = await state.act("reload_weights", lambda: _inbox(state).reload())
    return json_response({"status": "ok", "version": int(version)})


def _inbox(state: ServerState) -> WeightInbox:
    if state.inbox is None:
        from rill.inference.server.weights import WeightInbox

        state.inbox = WeightInbox(state.engine, state.model)
    return state.inbox


def _status(state: ServerState) -> str:
    if state.admission.is_draining:
        return "draining"
    if state.inbox is not None and state.inbox.failure is not None:
        return "weights incomplete"
    if state.is_asleep:
        return "asleep"
    return "paused" if state.is_paused else "ok"
