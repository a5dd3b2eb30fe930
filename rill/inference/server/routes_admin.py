"""Administration: weights, adapters, pause and resume, memory, caches; and what is watched: models, health, metrics.

Paths and fields are prime-rl's and vLLM's, so that their trainers can drive this server. What new weights go through
on their way to the engine is in weights.py. Adapters need the admin key: a path names a folder on this machine.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse, Response

from rill import __version__
from rill.errors import RillError
from rill.inference.base import AdapterEngine, Feature, MemoryLevel, PauseMode
from rill.inference.server.errors import ApiError, bad_request
from rill.inference.server.http import Access, Call, Routes, json_response
from rill.inference.server.schemas import (
    AbortBody,
    LoadAdapterBody,
    PauseBody,
    SleepBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from rill.inference.server.state import ServerState
from rill.models.card import read_card

_LIVENESS_S = 5.0
_PROBES = ThreadPoolExecutor(2, thread_name_prefix="server-probe")
"""Probes wait for nothing but the engine."""

routes = Routes()


@routes.get("/health", Access.OPEN)
@routes.get("/ping", Access.OPEN)
async def health(call: Call) -> Response:
    """200 while requests are served; 503 with the reason otherwise. Needs no key: load balancers have none."""
    state = call.state
    stats = await asyncio.to_thread(state.engine.stats)
    num_replicas = stats.extra.get("replicas", 1.0)
    status = _status(state) if num_replicas else "no replica"
    body = {"status": status, "version": int(state.engine.version), "replicas": num_replicas}
    return json_response(body, 200 if status in ("ok", "paused") else 503)


@routes.get("/metrics", Access.OPEN)
async def metrics(call: Call) -> Response:
    state = call.state
    stats = await asyncio.to_thread(state.engine.stats)
    text = state.metrics.render(stats, state.admission.num_in_flight)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@routes.get("/liveness", Access.OPEN)
async def liveness(call: Call) -> Response:
    """Whether the engine answers at all (prime-rl's probe): 503 where it does not within five seconds."""
    state = call.state
    try:
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.run_in_executor(_PROBES, state.engine.stats), _LIVENESS_S)
    except (TimeoutError, RillError):
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})


@routes.get("/version", Access.OPEN)
async def version(call: Call) -> dict[str, Any]:
    return {"version": __version__}


@routes.post("/abort_requests", Access.CLIENT)
async def abort_requests(call: Call, body: AbortBody) -> dict[str, Any]:
    """End the caller's own requests, by the name it gave them (`request_id`) or by their answers' ids. They are
    answered with what they have, and finish_reason "abort"."""
    num_aborted = await call.state.generation.abort([(call.caller, name) for name in body.request_ids])
    return {"status": "ok", "aborted": num_aborted}


@routes.post("/pause", Access.ADMIN)
def pause(state: ServerState, body: PauseBody | None) -> dict[str, Any]:
    """Stop between two steps and keep the tokens (interrupt), or let what runs end (finish)."""
    mode = (body or PauseBody()).mode
    kind = PauseMode.FINISH if mode in ("finish", "wait") else PauseMode.INTERRUPT
    state.engine.pause(kind, state.config.admin_timeout_s)
    if mode == "abort":
        state.engine.abort()
    state.is_paused = True
    return {"status": "paused"}


@routes.post("/resume", Access.ADMIN)
def resume(state: ServerState) -> dict[str, Any]:
    if state.is_asleep:
        raise ApiError(409, "the engine sleeps: call /wake first")
    state.engine.resume()
    state.is_paused = False
    return {"status": "resumed"}


@routes.post("/sleep", Access.ADMIN)
def sleep(state: ServerState, body: SleepBody | None) -> dict[str, Any]:
    """Give device memory back. The engine must be paused or idle."""
    level = MemoryLevel((body or SleepBody()).level)
    state.engine.release(level)
    state.is_asleep = True
    return {"status": "asleep", "level": level.value}


@routes.post("/wake", Access.ADMIN)
@routes.post("/wake_up", Access.ADMIN)
def wake(state: ServerState) -> dict[str, Any]:
    state.engine.restore()
    state.is_asleep = False
    return {"status": "awake"}


@routes.post("/flush_cache", Access.ADMIN)
@routes.post("/reset_prefix_cache", Access.ADMIN)
def flush_cache(state: ServerState) -> dict[str, Any]:
    state.engine.flush()
    return {"status": "flushed"}


@routes.post("/update_weights", Access.ADMIN)
def update_weights(state: ServerState, body: UpdateWeightsBody) -> dict[str, Any]:
    """Weights from a folder; see weights.py."""
    version = state.inbox.load(Path(body.weight_dir), body.version, partial=body.partial)
    return {"status": "ok", "version": int(version)}


@routes.post("/reload_weights", Access.ADMIN)
def reload_weights(state: ServerState) -> dict[str, Any]:
    """The weights that the server started with, under a new version."""
    return {"status": "ok", "version": int(state.inbox.reload())}


def _status(state: ServerState) -> str:
    if state.admission.is_draining:
        return "draining"
    if state.inbox.failure is not None:
        return "weights incomplete"
    if state.is_asleep:
        return "asleep"
    return "paused" if state.is_paused else "ok"


# --- models, and the LoRA adapters beside them, loaded and unloaded while the server runs --------------------------


@routes.get("/v1/models", Access.CLIENT)
async def list_models(call: Call) -> dict[str, Any]:
    return {"object": "list", "data": [_card(call.state, name) for name in call.state.served_names]}


@routes.get("/v1/models/{name}", Access.CLIENT)
async def get_model(call: Call) -> dict[str, Any]:
    call.state.adapter_of(call.name)
    return _card(call.state, call.name)


@routes.post("/v1/load_lora_adapter", Access.ADMIN)
def load_lora_adapter(state: ServerState, body: LoadAdapterBody) -> dict[str, Any]:
    """Serve the adapter in this folder (PEFT's format) under this name. In place: requests under way go on with it."""
    engine, name = _adapter_engine(state), body.lora_name
    if name == state.config.model_name:
        raise bad_request(f"{name!r} is the base model's name", "lora_name")
    if name in engine.adapters and not body.load_inplace:
        raise bad_request(f"adapter {name!r} is loaded already: set load_inplace to replace it", "lora_name")
    engine.load_adapter(name, body.lora_path)
    return {"status": "ok", "models": state.served_names}


@routes.post("/load_lora_adapter", Access.ADMIN)
def replace_lora_adapter(state: ServerState, body: LoadAdapterBody) -> dict[str, Any]:
    """The same for prime-rl's client, which loads every version under one name."""
    loaded: dict[str, Any] = load_lora_adapter(state, body.model_copy(update={"load_inplace": True}))
    return loaded


@routes.post("/unload_lora_adapter", Access.ADMIN)
@routes.post("/v1/unload_lora_adapter", Access.ADMIN)
def unload_lora_adapter(state: ServerState, body: UnloadAdapterBody) -> dict[str, Any]:
    """Requests that still use it end with finish_reason "abort"."""
    engine, name = _adapter_engine(state), body.lora_name
    if name not in engine.adapters:
        raise ApiError(404, f"there is no adapter {name!r}", param="lora_name", code="not_found")
    engine.unload_adapter(name)
    return {"status": "ok", "models": state.served_names}


def _adapter_engine(state: ServerState) -> AdapterEngine:
    state.require(Feature.LORA, "lora_name", "this engine serves no adapters")
    assert isinstance(state.engine, AdapterEngine)
    return state.engine


def _card(state: ServerState, name: str) -> dict[str, Any]:
    base = state.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "rill",
        "root": base,
        "parent": None if name == base else base,
        "max_model_len": state.engine.max_context,
        "vocab_size": state.engine.vocab_size,
        "version": int(state.engine.version),
        "trained": _training(state) if name == base else None,
    }


def _training(state: ServerState) -> dict[str, Any] | None:
    """How the model was trained, and so wants to be asked: its rill.json. None where it has none."""
    path = state.model.path if state.model is not None else None
    card = read_card(Path(path)) if path else None
    return None if card is None else asdict(card)
