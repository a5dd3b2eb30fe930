"""Claim: the server gives at least 90 % of the engine's own throughput.

The same requests, on the same engine object in this process: submitted directly, then through HTTP (the token route,
chat without and with streams), from an asyncio client in a process of its own. Prints one JSON line per way, with the
ratio to the engine.

    python benchmarks/server.py --requests 64 --tokens 128             CPU, tiny model
    python benchmarks/server.py --shape qwen2.5-1.5b --requests 256 --prompt 128 --tokens 256 --isolate
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

import httpx
import numpy as np

from rill.inference.base import Engine, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.replica import ReplicaEngine
from rill.inference.server import ServerConfig, create_app, serve_in_thread
from rill.models.loading import ModelConfig, load_tokenizer
from rill.types import SamplingParams

TINY = {
    "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip

QWEN_1_5B = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "eos_token_id": 151643,
}  # fmt: skip
SHAPES = {"tiny": TINY, "qwen2.5-1.5b": QWEN_1_5B}


def main() -> None:
    args = _arguments()
    model = (
        ModelConfig(path=args.model)
        if args.model
        else ModelConfig(shape=SHAPES[args.shape], tokenizer="chars")
    )
    settings = NativeEngine.Config(model=model, max_num_seqs=args.requests, kv_memory_fraction=0.3)
    engine: Engine = ReplicaEngine(settings, name="replica") if args.isolate else NativeEngine(settings)
    config = ServerConfig(port=0, model_name="bench")
    prompts = np.random.default_rng(0).integers(8, 100, size=(args.requests, args.prompt)).tolist()
    try:
        _direct(engine, prompts, args.tokens)  # warm up
        own = max(_direct(engine, prompts, args.tokens) for _ in range(args.repeats))
        _report("engine", own, own, args)
        with serve_in_thread(create_app(engine, load_tokenizer(model), config), config) as server:
            for way in ("tokens", "completions", "stream"):
                rates = [_over_http(server.url, way, prompts, args.tokens) for _ in range(args.repeats)]
                _report(way, max(rates), own, args)
    finally:
        engine.close()


def _direct(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    requests = [
        Request(id=f"{time.monotonic_ns()}-{i}", token_ids=np.array(p, np.int32), sampling=sampling)
        for i, p in enumerate(prompts)
    ]
    start = time.perf_counter()
    done = engine.generate(requests)
    return sum(len(c.token_ids) for c in done) / (time.perf_counter() - start)


def _over_http(url: str, way: str, prompts: list[list[int]], num_tokens: int) -> float:
    """In a process of its own: the client's work must not be counted as the server's."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        rate: float = pool.apply(_client, (url, way, prompts, num_tokens))
    return rate


def _client(url: str, way: str, prompts: list[list[int]], num_tokens: int) -> float:
    async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
        path, body = _request(way, prompt, num_tokens)
        async with client.stream("POST", url + path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_bytes():
                pass

    async def run() -> float:
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            start = time.perf_counter()
            await asyncio.gather(*(one(client, prompt) for prompt in prompts))
            return len(prompts) * num_tokens / (time.perf_counter() - start)

    return asyncio.run(run())


def _request(way: str, prompt: list[int], num_tokens: int) -> tuple[str, dict[str, Any]]:
    if way == "tokens":
        params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params}
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
    }
    return "/v1/completions", body | {"stream": way == "stream"}


def _report(way: str, rate: float, own: float, args: argparse.Namespace) -> None:
    line = {
        "benchmark": "server",
        "way": way,
        "tokens_per_s": round(rate, 1),
        "ratio_to_engine": round(rate / own, 3),
        "isolated": args.isolate,
        "requests": args.requests,
        "prompt_tokens": args.prompt,
        "new_tokens": args.tokens,
    }
    print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a local folder; unset: --shape with random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--isolate", action="store_true", help="the engine in a process of its own")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
