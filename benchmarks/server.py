"""Claim: the server gives at least 90 % of the engine's own throughput.

The same requests in turns, round by round: to an engine in this process, with nothing around it; and through HTTP (the
token route, completions whole and as streams) from an asyncio client in a process of its own, which keeps
`--in-flight` requests open, as a rollout does. The engine runs as many at once. Prints one JSON line per way;
`ratio_to_engine` is the median over the rounds, each against the engine's own rate of that round.

`--isolate` serves as `rill serve --isolate` does: a router, and the engine in a process of its own. HTTP, JSON and text
then cost the engine nothing as long as they need less time per token than it does: `server_us_per_token` (CPU time of
the serving process) against `engine_us_per_token`. `--threads` are the engine's; the server needs a core besides.

`--instant` puts an engine in its place that needs no time: what is left is the server's own cost.

    python benchmarks/server.py --isolate                                CPU, tiny model, 256 requests, 64 in flight
    python benchmarks/server.py --requests 64 --isolate                  64 at once: with the start and the end of it
    python benchmarks/server.py --requests 256 --in-flight 256 --prompt 128 --tokens 256 --instant
    python benchmarks/server.py --shape qwen2.5-1.5b --requests 1024 --in-flight 256 --prompt 128 --tokens 256 --isolate
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import Pool
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from rill.inference.base import Completion, Delta, Engine, EngineStats, Feature, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app, serve_in_thread
from rill.inference.server.router import Router
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
    vocab_size = 4096

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
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes that start from here
    torch.set_num_threads(args.threads)
    model = (
        ModelConfig(path=args.model)
        if args.model
        else ModelConfig(shape=SHAPES[args.shape], tokenizer="chars")
    )
    settings = NativeEngine.Config(
        model=model, dtype=args.dtype, max_num_seqs=args.in_flight, kv_memory_fraction=0.2
    )
    alone: Engine = InstantEngine() if args.instant else NativeEngine(settings)  # type: ignore[assignment]
    served: Engine = Router(settings) if args.isolate else alone
    config = ServerConfig(port=0, model_name="bench")
    prompts = np.random.default_rng(0).integers(8, 100, size=(args.requests, args.prompt)).tolist()
    try:
        # One client process for all: its start is not the server's work.
        clients = multiprocessing.get_context("spawn").Pool(1)
        app = create_app(served, load_tokenizer(model), config)
        with clients, serve_in_thread(app, config) as server:
            _measure(args, alone, server, clients, prompts)
    finally:
        alone.close()
        if served is not alone:
            served.close()


WAYS = ("tokens", "completions", "stream")


def _measure(
    args: argparse.Namespace, alone: Engine, server: BackgroundServer, clients: Pool, prompts: list[list[int]]
) -> None:
    own: list[float] = []
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_number in range(args.repeats + 1):  # the first one warms up
        rate = _direct(alone, prompts, args.tokens)
        if round_number:
            own.append(rate)
        for way in WAYS:
            before_s = _serving_cpu_s(server, args.isolate)
            rate = clients.apply(_client, (server.url, way, prompts, args.tokens, args.in_flight))
            cost_s = _serving_cpu_s(server, args.isolate) - before_s
            if round_number:
                rates[way].append(rate)
                costs[way].append(cost_s / (args.requests * args.tokens) * 1e6)
    _report("engine", own, own, [0.0], args)
    for way in WAYS:
        _report(way, rates[way], own, costs[way], args)


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


def _client(url: str, way: str, prompts: list[list[int]], num_tokens: int, in_flight: int) -> float:
    """Plain sockets: an HTTP library would need more of the machine than the server that is measured."""
    address = urlsplit(url)

    async def one(prompt: list[int], room: asyncio.Semaphore) -> None:
        async with room:
            await send(prompt)

    async def send(prompt: list[int]) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(_http_request(way, prompt, num_tokens))
        status = await reader.readline()
        assert b" 200 " in status, status
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def run() -> float:
        start = time.perf_counter()
        room = asyncio.Semaphore(in_flight)
        await asyncio.gather(*(one(prompt, room) for prompt in prompts))
        return len(prompts) * num_tokens / (time.perf_counter() - start)

    return asyncio.run(run())


def _http_request(way: str, prompt: list[int], num_tokens: int) -> bytes:
    path, body = _request(way, prompt, num_tokens)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


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


def _report(
    way: str, rates: list[float], own: list[float], costs_us: list[float], args: argparse.Namespace
) -> None:
    ratio = statistics.median(rate / alone for rate, alone in zip(rates, own, strict=True))
    line = {
        "benchmark": "server",
        "way": way,
        "tokens_per_s": round(statistics.median(rates), 1),
        "ratio_to_engine": None if args.instant else round(ratio, 3),
        "server_us_per_token": round(statistics.median(costs_us), 2),
        "engine_us_per_token": round(1e6 / statistics.median(own), 2),
        "isolated": args.isolate,
        "threads": args.threads,
        "requests": args.requests,
        "in_flight": args.in_flight,
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
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=64, help="requests open at one time")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--dtype", default="auto", help="of the engine")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
