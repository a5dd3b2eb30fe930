"""Claim: what the server itself costs for a request stays small beside what HTTP costs.

The application is called as uvicorn calls it, in this process and thread, over an engine that answers at once: no
socket, no other process, so that the figures hold on a busy machine too (CPU time, the least of the rounds). Prints one
JSON line per way: CPU microseconds for a request, of --tokens tokens with log-probabilities and ids.

    python benchmarks/server_cpu.py --tokens 256
    python benchmarks/server_cpu.py --tokens 256 --profile tokens         where they go
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import uvloop
from report import report

from rill.inference.base import Completion, Delta, EngineStats, Feature, Request
from rill.inference.server import ServerConfig, create_app
from rill.models.tokenizer import build_char_tokenizer
from rill.types import PolicyVersion, StopReason

WAYS = ("tokens", "completions", "chat", "stream")


class InstantEngine:
    """Answers in submit()."""

    features = frozenset({Feature.STREAM})
    version = PolicyVersion(0)
    max_context = 1 << 20
    vocab_size = 104

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        return [self._answer(request) for request in requests]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Nothing is ever under way."""

    def stats(self) -> EngineStats:
        return EngineStats()

    def _answer(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_result(replace(_completion(request.sampling.max_new_tokens), request_id=request.id))
        return future


@lru_cache
def _completion(length: int) -> Completion:
    return Completion(
        request_id="",
        token_ids=(np.arange(length) % 90 + 8).astype(np.int32),
        logprobs=np.linspace(-3.0, -0.1, length).astype(np.float32),
        versions=np.zeros(length, np.int32),
        stop_reason=StopReason.LENGTH,
    )


def body_of(way: str, num_prompt: int, num_tokens: int) -> tuple[str, dict[str, Any]]:
    prompt = [8 + i % 90 for i in range(num_prompt)]
    if way == "tokens":
        params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params}
    shared = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    if way == "chat":
        messages = [{"role": "user", "content": "x" * num_prompt}]
        return "/v1/chat/completions", shared | {"messages": messages, "logprobs": True}
    return "/v1/completions", shared | {"prompt": prompt, "logprobs": 0, "stream": way == "stream"}


async def answered(app: Any, path: str, content: bytes) -> int:
    """One request, as a server that has read it hands it over; the answer's bytes."""
    inbox = [{"type": "http.request", "body": content, "more_body": False}]
    num_bytes = 0

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.get_running_loop().create_future()  # never leaves

    async def send(message: Any) -> None:
        nonlocal num_bytes
        assert message.get("status", 200) == 200, message
        num_bytes += len(message.get("body", b""))

    headers = [(b"host", b"bench"), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(content)).encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return num_bytes


async def measure(args: argparse.Namespace) -> None:
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    app = create_app(InstantEngine(), tokenizer, ServerConfig(port=0))  # type: ignore[arg-type]
    for way in WAYS:
        path, body = body_of(way, args.prompt, args.tokens)
        content = json.dumps(body).encode()
        rounds = []
        with cProfile.Profile(time.thread_time) as profile:
            if args.profile != way:
                profile.disable()
            for _ in range(args.rounds):
                start = time.thread_time()
                for _ in range(args.requests):
                    await answered(app, path, content)
                rounds.append((time.thread_time() - start) / args.requests * 1e6)
        sizes = {"tokens": args.tokens, "prompt": args.prompt}
        report(benchmark="server_cpu", way=way, us_per_request=min(rounds[1:]), **sizes)
        if args.profile == way:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--profile", choices=WAYS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
