"""POST /v1/embeddings: the hidden state of each text's last token, of length 1."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from rill.inference.base import EmbeddingEngine, Feature
from rill.inference.server.answers import json_response
from rill.inference.server.errors import bad_request
from rill.inference.server.routes_completions import encode_prompts
from rill.inference.server.sampling import resolve_model
from rill.inference.server.schemas import EmbeddingsBody
from rill.inference.server.state import state_of
from rill.types import Floats

routes = APIRouter()


@routes.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingsBody, request: Request) -> Response:
    state = state_of(request)
    caller = state.keys.check_client(request)
    engine = state.engine
    if resolve_model(body.model, engine, state.config) is not None:
        raise bad_request("embeddings come from the base model only", "model", "unsupported")
    if Feature.EMBED not in engine.features or not isinstance(engine, EmbeddingEngine):
        raise bad_request("this engine makes no embeddings", "model", "unsupported")
    if body.dimensions is not None:
        raise bad_request("embeddings have the model's own width", "dimensions", "unsupported")
    prompts = await encode_prompts(
        state.codec, body.input, param="input", add_special_tokens=body.add_special_tokens
    )
    if len(prompts) > state.config.max_samples:
        raise bad_request(f"{len(prompts)} texts are more than {state.config.max_samples}", "input")
    sequences = [np.asarray(ids, dtype=np.int32) for ids in prompts]
    timeout_s = state.config.request_timeout_s or 3600.0
    with state.admission.admit(caller):
        found = await asyncio.to_thread(engine.embed, sequences, timeout_s)
    count = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(values, body.encoding_format)}
        for index, values in enumerate(found)
    ]
    return json_response(
        {
            "object": "list",
            "model": body.model or state.config.model_name,
            "data": data,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def _written(values: Floats, form: str) -> Any:
    unit = (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if form == "base64" else unit.tolist()
