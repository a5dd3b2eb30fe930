"""What is served, by name: the model, and the LoRA adapters beside it, loaded and unloaded while the server runs.

The paths and fields of the adapter routes are vLLM's. They need the admin key: a path names a folder on this machine.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rill.inference.base import AdapterEngine, Feature
from rill.inference.server.errors import ApiError, bad_request
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.schemas import LoadAdapterBody, UnloadAdapterBody
from rill.inference.server.state import ServerState
from rill.models.card import read_card

routes = Routes()


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
