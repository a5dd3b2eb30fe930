"""Claim: the server gives at least 90 % of the engine's own throughput.

    this process ─┬─ engine: an engine with nothing around it
                  ├─ server: the application as `rill serve` runs it; with --isolate its engine is in a replica
                  └─ clients: plain sockets over asyncio, --clients processes that share --in-flight requests

The same requests in turns, round by round, `--in-flight` of them open at a time, the next one when one ends: to the
engine alone; and through HTTP (the token route, completions whole and as streams, all with log-probabilities and token
ids). The engine runs as many at once. Prints one JSON line per way; `ratio_to_engine` is the median over the rounds,
each against the engine's own rate of that round. An engine that is given all requests at once has its line too.

HTTP, JSON and text cost an isolated engine nothing as long as they need less time per token than it does:
`server_us_per_token` (CPU time of the serving process) against `engine_us_per_token`. `--threads` are the engine's; the
server needs a core besides. `client_busy` near 1 means that the clients were measured.

server_cpu.py measures the server's own cost, without an engine and without sockets.

    python benchmarks/server.py --isolate                                CPU, tiny model, 256 requests, 64 in flight
    python benchmarks/server.py --requests 64 --isolate                  64 at once: with the start and the end of it
    python benchmarks/server.py --isolate --shape qwen2.5-1.5b --device cuda --clients 4 --requests 1024 \\
        --in-flight 256 --prompt 128 --tokens 256                         one GPU
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import signal
import statistics
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.pool import Pool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from report import report
from shapes import QWEN_1_5B

from rill.inference.base import Completion, Engine, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.server import ServerConfig, create_app
from rill.inference.server.router import Router
from rill.inference.server.run import serve
from rill.models.loading import ModelConfig, load_model_config, load_tokenizer
from rill.types import SamplingParams

TINY = {
    "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip

SHAPES = {"tiny": TINY, "qwen2.5-1.5b": QWEN_1_5B | {"eos_token_id": 151643}}
WAYS = ("tokens", "completions", "stream")
START_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 300.0
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes that start from here
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rill-bench-") as folder:
        path = args.model or folder
        if not args.model:
            _ask_once(_write_model, path, SHAPES[args.shape], args.device)
            _note(f"{time.monotonic() - started_at:.1f} s: weights written")
        settings = NativeEngine.Config(
            model=ModelConfig(path=path),
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=args.in_flight,
            max_batched_tokens=args.batched_tokens,
            max_context=args.prompt + args.tokens + 64,
            kv_memory_fraction=0.2,
        )
        prompts = np.random.default_rng(0).integers(8, 4000, size=(args.requests, args.prompt)).tolist()
        alone = _Peer(_engine_main, settings)
        served = _Peer(_server_main, settings, args.isolate)
        with alone, served, SPAWN.Pool(args.clients) as clients:
            alone.ready()
            served.ready()
            _note(f"{time.monotonic() - started_at:.1f} s: engine and server are ready")
            _measure(args, alone, served, clients, prompts)


def _measure(
    args: argparse.Namespace, alone: _Peer, served: _Peer, clients: Pool, prompts: list[list[int]]
) -> None:
    own: list[float] = []
    queued: list[float] = []
    rounds: dict[str, list[_Load]] = {way: [] for way in WAYS}
    for way in WAYS:  # the first ones warm up: a whole load each, for a wave's end has batches of every size
        _load(clients, args, served, way, prompts)
    alone.ask((prompts, args.tokens, args.in_flight))
    for number in range(args.repeats):
        queued.append(alone.ask((prompts, args.tokens, args.requests)))
        own.append(alone.ask((prompts, args.tokens, args.in_flight)))
        for way in WAYS:
            rounds[way].append(_load(clients, args, served, way, prompts))
        _note(f"round {number + 1} of {args.repeats}, the server is process {served.pid}")
    _report("engine, all requests in its queue", queued, own, args)
    _report("engine", own, own, args)
    for way, loads in rounds.items():
        _report(way, [load.rate for load in loads], own, args, loads)


# --- processes -------------------------------------------------------------------------------------------


class _Peer:
    """A process that says "ready" and then answers questions, one at a time."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._connection, child_end = SPAWN.Pipe()
        self._process: BaseProcess = SPAWN.Process(target=target, args=(child_end, *args))
        self._process.start()
        child_end.close()
        self.facts: Any = None

    def ready(self) -> None:
        self.facts = self._receive(START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, question: Any) -> Any:
        self._connection.send(question)
        return self._receive(ROUND_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"a process of the benchmark did not answer within {timeout_s} s")
        return self._connection.recv()

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()
        self._process.join(30.0)
        if self._process.is_alive():
            self._process.kill()


def _questions(connection: Connection) -> Any:
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def _engine_main(connection: Connection, settings: NativeEngine.Config) -> None:
    """Question: (prompts, number of new tokens, how many are open at a time). Answer: tokens per second."""
    engine = NativeEngine(settings)
    connection.send(None)
    for prompts, num_tokens, in_flight in _questions(connection):
        sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        requests = [
            Request(id=f"{time.monotonic_ns()}-{i}", token_ids=np.array(p, np.int32), sampling=sampling)
            for i, p in enumerate(prompts)
        ]
        room = threading.Semaphore(in_flight)
        futures: list[Future[Completion]] = []
        start = time.perf_counter()
        for request in requests:
            room.acquire()
            futures += engine.submit([request])
            futures[-1].add_done_callback(functools.partial(_make_room, room))
        num_done = sum(len(future.result().token_ids) for future in futures)
        connection.send(num_done / (time.perf_counter() - start))
    engine.close()


def _make_room(room: threading.Semaphore, _: Future[Completion]) -> None:
    room.release()


def _server_main(connection: Connection, settings: NativeEngine.Config, is_isolated: bool) -> None:
    """Answers any question with the CPU seconds so far, by thread and together; those of an engine not counted."""
    engine: Engine = Router(settings) if is_isolated else NativeEngine(settings)
    config = ServerConfig(port=0, model_name="bench")
    app = create_app(engine, load_tokenizer(settings.model), config)

    def answer() -> None:
        for _ in _questions(connection):
            by_thread = _thread_seconds()
            connection.send((time.process_time() if is_isolated else by_thread["MainThread"], by_thread))
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread serves, as in `rill serve`

    def started(url: str) -> None:
        connection.send(url)
        threading.Thread(target=answer, name="answers", daemon=True).start()

    try:
        serve(app, config, on_started=started)
    finally:
        engine.close()


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of this process's threads by name."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def _ask_once(act: Callable[..., None], *args: Any) -> None:
    """In a process of its own: CUDA memory is given back with it."""
    with SPAWN.Pool(1) as pool:
        pool.apply(act, args)


def _write_model(folder: str, shape: dict[str, Any], device: str) -> None:
    """Random weights, drawn on the GPU where there is one; and a byte-level vocabulary of the model's size."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    on_cuda = device.startswith("cuda")
    torch.manual_seed(0)
    with torch.device(device if on_cuda else "cpu"):
        config = load_model_config(ModelConfig(shape=shape))
        dtype = torch.bfloat16 if on_cuda else torch.float32
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    letters = string.ascii_lowercase
    words = ["".join(letters[i // 26**k % 26] for k in range(4)) for i in range(shape["vocab_size"])]
    vocabulary = {("Ġ" if i % 2 else "") + word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(
        folder
    )
    assert (Path(folder) / "tokenizer.json").is_file()


# --- load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    rate: float
    client_busy: float
    server_us: float
    """CPU time of the serving process for a token, in microseconds."""
    thread_shares: dict[str, float]
    """Of the round's time, what each thread of the serving process was on a processor."""


def _load(
    clients: Pool, args: argparse.Namespace, served: _Peer, way: str, prompts: list[list[int]]
) -> _Load:
    before_s, threads_before = served.ask("cpu")
    shares = [
        (served.facts, way, prompts[i :: args.clients], args.tokens, args.in_flight // args.clients)
        for i in range(args.clients)
    ]
    spans = clients.starmap(_client, shares, chunksize=1)
    after_s, threads_after = served.ask("cpu")
    seconds = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    num_tokens = len(prompts) * args.tokens
    return _Load(
        rate=num_tokens / seconds,
        client_busy=max(busy_s for _, _, busy_s in spans) / seconds,
        server_us=(after_s - before_s) / num_tokens * 1e6,
        thread_shares={
            name: round((total - threads_before.get(name, 0.0)) / seconds, 3)
            for name, total in threads_after.items()
        },
    )


def _client(
    url: str, way: str, prompts: list[list[int]], num_tokens: int, in_flight: int
) -> tuple[float, float, float]:
    """When it began and ended, and its CPU seconds. Plain sockets: an HTTP library would need more of the machine than
    the server that is measured."""
    address = urlsplit(url)
    bodies = [_http_request(way, prompt, num_tokens) for prompt in prompts]

    waiting = iter(bodies)

    async def send_in_turn() -> None:
        """One request after the other on one connection, as clients' pools do."""
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for body in waiting:
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0], head
            if b"chunked" in head:
                tail = b""
                while not tail.endswith(b"\r\n0\r\n\r\n"):
                    tail = tail[-8:] + await reader.read(1 << 16)
            else:
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.close()

    async def run() -> None:
        await asyncio.gather(*(send_in_turn() for _ in range(in_flight)))

    start, busy_s = time.monotonic(), time.process_time()
    asyncio.run(run())
    return start, time.monotonic(), time.process_time() - busy_s


def _http_request(way: str, prompt: list[int], num_tokens: int) -> bytes:
    path, body = _request(way, prompt, num_tokens)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
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
    way: str, rates: list[float], own: list[float], args: argparse.Namespace, loads: Sequence[_Load] = ()
) -> None:
    ratios = [rate / alone for rate, alone in zip(rates, own, strict=True)]
    line: dict[str, Any] = {
        "benchmark": "server",
        "way": way,
        "tokens_per_s": round(statistics.median(rates), 1),
        "ratio_to_engine": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "engine_us_per_token": round(1e6 / statistics.median(own), 2),
    }
    if loads:
        line |= {
            "server_us_per_request": round(
                statistics.median(load.server_us for load in loads) * args.tokens, 1
            ),
            "server_us_per_token": round(statistics.median(load.server_us for load in loads), 2),
            "client_busy": round(statistics.median(load.client_busy for load in loads), 3),
            "server_threads": {n: s for n, s in loads[-1].thread_shares.items() if s >= 0.005},
        }
    options = ("isolate", "device", "threads", "clients", "requests", "in_flight", "prompt", "tokens")
    report(**line, **{name: vars(args)[name] for name in options})


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a local folder; unset: --shape with random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu", help="of the engines: cpu or cuda")
    parser.add_argument("--isolate", action="store_true", help="the engine in a process of its own")
    parser.add_argument("--clients", type=int, default=1, help="processes that send requests")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=64, help="requests open at one time")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--dtype", default="auto", help="of the engine")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="the engine's tokens a step")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
