"""Claim: the server gives at least 90 % of the engine's own throughput.

The same requests, on the same engine: submitted directly, then through HTTP (the token route, completions whole and as
streams), from an asyncio client in a process of its own. Prints one JSON line per way, with the ratio to the engine.

`--isolate` gives the engine a process of its own, as `rill serve --isolate` does. HTTP, JSON and text then cost the
engine nothing as long as they need less time per token than it does: `server_us_per_token` (CPU time of the serving
process) against `engine_us_per_token`.

`--instant` puts an engine in its place that needs no time: what is left is the server's own cost.

    python benchmarks/server.py --requests 64 --tokens 128 --isolate           CPU, tiny model
    python benchmarks/server.py --requests 256 --prompt 128 --tokens 256 --instant
    python benchmarks/server.py --shape qwen2.5-1.5b --requests 256 --prompt 128 --tokens 256 --isolate
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from rill.inference.base import Completion, Delta, Engine, EngineStats, Feature, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.replica import ReplicaEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app, serve_in_thread
from rill.models.loading import ModelConfig, load_tokenizer
from rill.types import PolicyVersion, SamplingParams, StopReason

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


class InstantEngine:
    """Has every token at once, and tells of them one by one where somebody streams."""

    features = frozenset({Feature.STREAM})
    version = PolicyVersion(0)
    max_context = 4096

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        return [self._pool.submit(self._answer, request, on_delta) for request in requests]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        return [future.result(timeout_s) for future in self.submit(requests)]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Nothing is ever under way for long."""

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        self._pool.shutdown()

    def _answer(self, request: Request, on_delta: Callable[[Delta], None] | None) -> Completion:
        length = request.sampling.max_new_tokens
        ids = (np.arange(length) % 90 + 8).astype(np.int32)
        logprobs = np.linspace(-3.0, -0.1, length).astype(np.float32)
        versions = np.zeros(length, np.int32)
        for i in range(length if on_delta is not None else 0):
            part = slice(i, i + 1)
            assert on_delta is not None
            on_delta(
                Delta(
                    request_id=request.id,
                    token_ids=ids[part],
                    logprobs=logprobs[part],
                    versions=versions[part],
                )
            )
        return Completion(
            request_id=request.id,
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            stop_reason=StopReason.LENGTH,
        )


def main() -> None:
    args = _arguments()
    model = (
        ModelConfig(path=args.model)
        if args.model
        else ModelConfig(shape=SHAPES[args.shape], tokenizer="chars")
    )
    settings = NativeEngine.Config(model=model, max_num_seqs=args.requests, kv_memory_fraction=0.3)
    if args.instant:
        engine: Engine = InstantEngine()  # type: ignore[assignment]  # what a server asks while it answers
    else:
        engine = ReplicaEngine(settings, name="replica") if args.isolate else NativeEngine(settings)
    config = ServerConfig(port=0, model_name="bench")
    prompts = np.random.default_rng(0).integers(8, 100, size=(args.requests, args.prompt)).tolist()
    try:
        _direct(engine, prompts, args.tokens)  # warm up
        own = max(_direct(engine, prompts, args.tokens) for _ in range(args.repeats))
        _report("engine", own, own, 0.0, args)
        # One client process for all: its start is not the server's work.
        clients = multiprocessing.get_context("spawn").Pool(1)
        app = create_app(engine, load_tokenizer(model), config)
        with clients, serve_in_thread(app, config) as server:
            for way in ("tokens", "completions", "stream"):
                clients.apply(_client, (server.url, way, prompts[:2], 2))  # warm up
                rates, costs = [], []
                for _ in range(args.repeats):
                    before_s = _serving_cpu_s(server, args.isolate)
                    rates.append(clients.apply(_client, (server.url, way, prompts, args.tokens)))
                    costs.append(_serving_cpu_s(server, args.isolate) - before_s)
                _report(way, max(rates), own, min(costs) / (args.requests * args.tokens) * 1e6, args)
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


def _serving_cpu_s(server: BackgroundServer, is_isolated: bool) -> float:
    """All of this process where the engine has its own; else the thread that serves."""
    return time.process_time() if is_isolated else server.cpu_s


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


def _report(way: str, rate: float, own: float, server_us: float, args: argparse.Namespace) -> None:
    line = {
        "benchmark": "server",
        "way": way,
        "tokens_per_s": round(rate, 1),
        "ratio_to_engine": None if args.instant else round(rate / own, 3),
        "server_us_per_token": round(server_us, 2),
        "engine_us_per_token": round(1e6 / own, 2),
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
    parser.add_argument("--instant", action="store_true", help="an engine that needs no time")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
