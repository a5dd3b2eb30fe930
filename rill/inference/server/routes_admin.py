"""Administration: weights, pause and resume, memory, caches; and what operators watch: models, health, metrics.

The paths are prime-rl's and vLLM's, so that their trainers can drive this server. Engine calls that may block run in a
thread, one at a time. Weight transports live in rill.weights; this file ends in Engine.update_weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from rill.errors import WeightSyncError
from rill.inference.base import MemoryLevel, PauseMode
from rill.inference.checkpoint import Checkpoint
from rill.inference.server.errors import ApiError, bad_request
from rill.inference.server.schemas import InitBroadcasterBody, PauseBody, SleepBody, UpdateWeightsBody
from rill.inference.server.state import ServerState, json_response, state_of
from rill.types import PolicyVersion

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


@routes.post("/pause")
async def pause(request: Request, body: PauseBody | None = None) -> Response:
    """Stop between two steps and keep the tokens (interrupt), or let what runs end (finish)."""
    state = _admin(request)
    mode = (body or PauseBody()).mode

    def act() -> None:
        state.engine.pause(_PAUSE_MODES[mode], state.config.admin_timeout_s)
        if mode == "abort":
            state.engine.abort()

    async with state.admin_lock:
        await asyncio.to_thread(act)
        state.is_paused = True
    return json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: Request) -> Response:
    state = _admin(request)
    async with state.admin_lock:
        if state.is_asleep:
            raise ApiError(409, "the engine sleeps: call /wake first")
        await asyncio.to_thread(state.engine.resume)
        state.is_paused = False
    return json_response({"status": "resumed"})


@routes.post("/sleep")
async def sleep(request: Request, body: SleepBody | None = None) -> Response:
    """Give device memory back. The engine must be paused or idle."""
    state = _admin(request)
    level = MemoryLevel((body or SleepBody()).level)
    async with state.admin_lock:
        await asyncio.to_thread(state.engine.release, level)
        state.is_asleep = True
    return json_response({"status": "asleep", "level": level.value})


@routes.post("/wake")
@routes.post("/wake_up")
async def wake(request: Request) -> Response:
    state = _admin(request)
    async with state.admin_lock:
        await asyncio.to_thread(state.engine.restore)
        state.is_asleep = False
    return json_response({"status": "awake"})


@routes.post("/flush_cache")
@routes.post("/reset_prefix_cache")
async def flush_cache(request: Request) -> Response:
    state = _admin(request)
    async with state.admin_lock:
        await asyncio.to_thread(state.engine.flush)
    return json_response({"status": "flushed"})


@routes.post("/init_broadcaster")
async def init_broadcaster(body: InitBroadcasterBody, request: Request) -> Response:
    """prime-rl's NCCL setup. Orchestrators that find no broadcaster send folders instead (see /update_weights)."""
    _admin(request)
    raise ApiError(
        404,
        "this server takes weights from folders: send `weight_dir` to /update_weights"
        " (prime-rl: weight_broadcast.type = filesystem)",
        code="unsupported",
    )


@routes.post("/update_weights")
async def update_weights(body: UpdateWeightsBody, request: Request) -> Response:
    state = _admin(request)
    if body.weight_dir is None:
        raise bad_request("weight_dir is needed: no broadcast is set up", "weight_dir")
    return await _update(state, Path(body.weight_dir), body.version, body.partial)


@routes.post("/reload_weights")
async def reload_weights(request: Request) -> Response:
    """The weights that the server started with, under a new version: a version never goes down."""
    state = _admin(request)
    if state.model_path is None:
        raise ApiError(409, "the model was not loaded from a folder, so there is nothing to reload")
    return await _update(state, state.model_path, None, partial=False)


async def _update(state: ServerState, folder: Path, version: int | None, partial: bool) -> Response:
    checkpoint = Checkpoint.from_folder(folder)

    def act() -> PolicyVersion:
        new = PolicyVersion(state.engine.version + 1 if version is None else version)
        state.engine.update_weights(checkpoint, new, partial=partial)
        return new

    async with state.admin_lock:
        try:
            new = await asyncio.to_thread(act)
        except WeightSyncError as error:
            state.update_failed = str(error)
            raise
        state.update_failed = None
    return json_response({"status": "ok", "version": int(new)})


def _admin(request: Request) -> ServerState:
    state = state_of(request)
    state.keys.check_admin(request)
    return state


def _status(state: ServerState) -> str:
    if state.admission.is_draining:
        return "draining"
    if state.update_failed is not None:
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
