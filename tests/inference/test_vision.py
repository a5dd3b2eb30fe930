"""The native engine looks at pictures as the model's own modules do, and its caches tell them apart."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rill.errors import RequestError
from rill.inference.base import Feature, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.models.loading import load_model
from rill.models.pictures import PictureReader, load_pictures, rope_positions
from rill.types import Picture, PolicyVersion, SamplingParams
from tests.inference.integrity import checked_every_step
from tests.models.tiny_vision import SHAPES, noise, plain, plain_logprobs, shown, tiny

GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)


def reader_of(model_type: str) -> PictureReader:
    reader = load_pictures(tiny(model_type))
    assert reader is not None
    return reader


def engine_of(model_type: str, **settings: Any) -> NativeEngine:
    """Blocks and steps so small that pictures are cut by both."""
    config = {"num_kv_blocks": 64, "max_num_seqs": 8, "block_size": 4, "max_batched_tokens": 16}
    return checked_every_step(
        NativeEngine(NativeEngine.Config(model=tiny(model_type), **{**config, **settings}))
    )


def asked(name: str, ids: Any, pictures: tuple[Picture, ...], **sampling: Any) -> Request:
    return Request(id=name, token_ids=ids, pictures=pictures, sampling=replace(GREEDY, **sampling))


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("model_type", SHAPES)
def test_the_engine_says_what_the_plain_model_says(model_type: str, fast_path: bool) -> None:
    """Greedy tokens and their log-probabilities, beside a prompt without pictures, by decoder and modules."""
    reader = reader_of(model_type)
    ids, pictures = shown(reader, noise(16, 24), noise(32, 16, seed=1))
    words = np.arange(10, 30, dtype=np.int32)
    engine = engine_of(model_type, fast_path=fast_path)
    try:
        assert Feature.PICTURES in engine.features
        found = engine.generate([asked("seen", ids, pictures), asked("read", words, ())])
    finally:
        engine.close()
    model = load_model(tiny(model_type), dtype=torch.float32)
    for completion, prompt, seen in zip(found, (ids, words), (pictures, ()), strict=True):
        whole = np.concatenate([prompt, completion.token_ids])
        with torch.no_grad():
            best = plain(model, reader, whole, seen)[len(prompt) - 1 : -1].max(-1)
        assert completion.token_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(completion.logprobs, best.values.numpy(), atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", SHAPES)
def test_a_gpu_sees_what_the_plain_model_sees(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts at once, through captured steps."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the patches' convolution
    reader = reader_of(model_type)
    prompts = [shown(reader, noise(16, 24, seed=n)) for n in range(5)]
    config = NativeEngine.Config(model=tiny(model_type), device="cuda", dtype="float32", num_kv_blocks=64)
    engine = NativeEngine(config)
    try:
        found = engine.generate([asked(f"{n}", *prompt) for n, prompt in enumerate(prompts)])
    finally:
        engine.close()
    model = load_model(tiny(model_type), dtype=torch.float32)
    for completion, (ids, pictures) in zip(found, prompts, strict=True):
        whole = np.concatenate([ids, completion.token_ids])
        with torch.no_grad():
            wanted = plain_logprobs(model, reader, whole, pictures)[-len(completion.token_ids) :]
        np.testing.assert_allclose(completion.logprobs, wanted.numpy(), atol=5e-3)


@pytest.mark.parametrize("model_type", SHAPES)
def test_positions_are_those_of_transformers(model_type: str) -> None:
    reader = reader_of(model_type)
    ids, pictures = shown(reader, noise(16, 40), noise(32, 16, seed=1))
    found, shift = rope_positions(len(ids), pictures)
    kinds = torch.tensor([[int(any(p.start <= i < p.end for p in pictures)) for i in range(len(ids))]])
    wanted, delta = load_model(tiny(model_type), dtype=torch.float32).base_model.get_rope_index(
        torch.from_numpy(ids.astype(np.int64))[None],
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([reader.patches(p)[1] for p in pictures]),
    )
    assert (wanted[:, 0].numpy() == found).all() and int(delta) == shift


def test_the_prefix_cache_tells_pictures_apart() -> None:
    """The same placeholders: another picture shares nothing of them, the same picture all of it."""
    reader = reader_of("qwen2_5_vl")
    ids, one = shown(reader, noise(16, 24))
    same, other = shown(reader, noise(16, 24, seed=1))
    assert (ids == same).all() and one != other
    engine = engine_of("qwen2_5_vl")
    try:
        (first,) = engine.generate([asked("a", ids, one)])
        (second,) = engine.generate([asked("b", ids, other)])
        (third,) = engine.generate([asked("c", ids, one)])
        assert second.num_cached_tokens < one[0].start
        assert third.num_cached_tokens > one[0].end
        assert (first.token_ids == third.token_ids).all()
        assert np.abs(first.logprobs - second.logprobs).max() > 1e-3
    finally:
        engine.close()


def test_new_weights_are_looked_at_with() -> None:
    """What a tower saw with the old weights is forgotten."""
    reader = reader_of("qwen3_vl")
    ids, pictures = shown(reader, noise(16, 24))
    other = load_model(tiny("qwen3_vl").model_copy(update={"seed": 5}), dtype=torch.float32)
    engine = engine_of("qwen3_vl")
    try:
        (before,) = engine.generate([asked("a", ids, pictures)])
        engine.update_weights(list(other.named_parameters()), PolicyVersion(1))
        (after,) = engine.generate([asked("b", ids, pictures)])
    finally:
        engine.close()
    assert np.abs(before.logprobs - after.logprobs).max() > 1e-3
    whole = np.concatenate([ids, after.token_ids])
    with torch.no_grad():
        wanted = plain_logprobs(other, reader, whole, pictures)[-len(after.token_ids) :]
    np.testing.assert_allclose(after.logprobs, wanted.numpy(), atol=2e-5)


def test_a_picture_without_its_placeholders_is_refused() -> None:
    reader = reader_of("qwen2_5_vl")
    ids, (picture,) = shown(reader, noise(16, 24))
    engine = engine_of("qwen2_5_vl")
    try:
        for wrong in (replace(picture, start=picture.start + 1), replace(picture, start=len(ids) - 2)):
            with pytest.raises(RequestError, match="placeholders"):
                engine.generate([asked("a", ids, (wrong,))])
    finally:
        engine.close()


# --- the server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = engine_of("qwen2_5_vl")
    assert engine.tokenizer is not None
    config = ServerConfig(port=0)
    app = create_app(engine, engine.tokenizer, config, model=tiny("qwen2_5_vl"))
    with BackgroundServer(app, config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    engine.close()


def body(url: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": url}}]
    return {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        **fields,
    }


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_the_server_shows_the_model_a_picture(client: httpx.Client) -> None:
    answers = [
        client.post("/v1/chat/completions", json=body(url_of(noise(16, 24, seed=seed)))) for seed in (0, 1)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    one, other = (answer.json() for answer in answers)
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert one["usage"]["prompt_tokens"] == len(one["prompt_token_ids"]) > 6
    values = [[t["logprob"] for t in a["choices"][0]["logprobs"]["content"]] for a in (one, other)]
    assert np.abs(np.subtract(*values)).max() > 1e-3


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "not fetched"),
        ("data:image/png;base64,%%%%", "base64"),
        (url_of(b"no picture at all"), "no picture"),
        ("data:text/html;base64,aGk=", "kind"),
    ],
)
def test_the_server_refuses_what_is_no_picture(client: httpx.Client, url: str, said: str) -> None:
    answer = client.post("/v1/chat/completions", json=body(url))
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
