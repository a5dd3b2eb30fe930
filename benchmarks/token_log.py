"""The token log: what it costs an engine, how many bytes a token takes, how fast sequences in flight come back.

    python benchmarks/token_log.py [--model PATH] [--device cuda] [--requests 256] [--tokens 256] [--repeats 15]

Prints JSON lines:

    {"what": "pair", "off_s": …, "on_s": …, "off_cpu_s": …, "on_cpu_s": …, "own_s": …}
                          as many requests of the same lengths, one after the other, in turns either way first
    {"what": "cost", "of": "wall" | "cpu" | "own", "share": …, "low": …, "high": …}
                          wall, cpu: on / off − 1, the processor's time being that of all threads. own: the processor's
                          time inside the log and what is made for it, counted where it is spent, over the rest of the
                          same run: it does not depend on what else the machine does. The median of the pairs, and a
                          95 % bootstrap interval of it
    {"what": "bytes", "per_token": …}                                 on disk, before anything is removed
    {"what": "recovery", "sequences": …, "find_s": …, "prefill_s": …, "share": …}
                          a killed engine's sequences: found in its log, against the prefill that continues them

Without a model it uses one of two layers and fresh weights: then the engine is as fast as it can be, and the log's
share is an upper bound. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rill.inference.base import Completion, Request
from rill.inference.gate import EngineGate
from rill.inference.native.engine import NativeEngine
from rill.inference.native.sequence import Sequence
from rill.inference.policy import Asked
from rill.journal.logged import LoggedEngine
from rill.journal.reader import LogReader, segments
from rill.journal.token_log import FOLDER, JournalConfig, TokenLog
from rill.models.loading import ModelConfig
from rill.types import SamplingParams

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--in-flight", type=int, default=1000)
    given = parser.parse_args()
    model = ModelConfig(path=given.model) if given.model else ModelConfig(shape=SHAPE, tokenizer=None)
    engine = NativeEngine(NativeEngine.Config(model=model, device=given.device))
    rng = np.random.default_rng(0)
    vocabulary = engine.vocab_size or 1000

    def requests(tag: str, count: int) -> list[Request]:
        sampling = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
        prompts = rng.integers(1, vocabulary, (count, given.prompt)).astype(np.int32)
        return [
            Request(id=f"g{n:08d}/0#{tag}", token_ids=p, sampling=sampling) for n, p in enumerate(prompts)
        ]

    gate = EngineGate(engine)
    pairs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("RILL_BENCH_DIR")) as folder:
        log = TokenLog(Path(folder), "rollout-0", JournalConfig())
        logged = LoggedEngine(gate, log, delay_s=JournalConfig().delay_s, decode=str)
        own = OwnTime()
        ways: list[tuple[str, Asked]] = [("off", gate), ("on", logged)]
        for repeat in range(-1, given.repeats):  # the first warms up
            pair: dict[str, float] = {}
            for name, asked in ways[:: 1 if repeat % 2 else -1]:
                batch = requests(f"{name}{repeat}", given.requests)
                began_s, began_cpu_s, began_own_s = time.perf_counter(), time.process_time(), own()
                done: list[Completion] = [future.result(600) for future in asked.submit(batch, 0)]
                pair[f"{name}_s"] = time.perf_counter() - began_s
                pair[f"{name}_cpu_s"] = time.process_time() - began_cpu_s
                if name == "on":
                    pair["own_s"] = own() - began_own_s
                assert all(len(each.token_ids) == given.tokens for each in done)
            if repeat >= 0:
                pairs.append(pair)
                print(
                    json.dumps({"what": "pair", **{key: round(s, 3) for key, s in pair.items()}}), flush=True
                )
        log.close()
        num_tokens = given.requests * given.tokens * (given.repeats + 1)
        num_bytes = sum(path.stat().st_size for path in segments(Path(folder) / FOLDER))
    for of, suffix in (("wall", "s"), ("cpu", "cpu_s")):
        shares = [pair[f"on_{suffix}"] / pair[f"off_{suffix}"] - 1 for pair in pairs]
        print(json.dumps({"what": "cost", "of": of, **median_with_interval(shares)}))
    shares = [pair["own_s"] / (pair["on_cpu_s"] - pair["own_s"]) for pair in pairs]
    print(json.dumps({"what": "cost", "of": "own", **median_with_interval(shares)}))
    print(json.dumps({"what": "bytes", "per_token": round(num_bytes / num_tokens, 2)}))
    print(json.dumps(recovery(engine, requests("lost", given.in_flight), given.tokens)), flush=True)
    engine.close()


class OwnTime:
    """The processor's time that goes to the log: its writer's thread, and on the engine's thread what makes, takes and
    ends the pieces that are written."""

    def __init__(self) -> None:
        (writer,) = (thread for thread in threading.enumerate() if thread.name == "token-log")
        assert writer.ident is not None
        self._writer_clock = time.pthread_getcpuclockid(writer.ident)
        self._engine_s = 0.0
        for owner, name in ((Sequence, "take_delta"), (LoggedEngine, "_tokens"), (LoggedEngine, "_ended")):
            setattr(owner, name, self._clocked(getattr(owner, name)))

    def __call__(self) -> float:
        return self._engine_s + time.clock_gettime(self._writer_clock)

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self._engine_s += time.thread_time() - began_s

        return clocked


def median_with_interval(values: list[float]) -> dict[str, float]:
    draws = np.random.default_rng(0).choice(np.asarray(values), (10_000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"share": round(statistics.median(values), 4), "low": round(low, 4), "high": round(high, 4)}


def recovery(engine: NativeEngine, lost: list[Request], num_tokens: int) -> dict[str, object]:
    """Half of every answer is in the log of a process that is gone."""
    half = num_tokens // 2
    said = np.arange(half, dtype=np.int32) % 100 + 1
    with tempfile.TemporaryDirectory(dir=os.environ.get("RILL_BENCH_DIR")) as folder:
        log = TokenLog(Path(folder), "rollout-0", JournalConfig())
        for request in lost:
            number = log.open(request.id, num_prompt=len(request.token_ids), base=0)
            log.tokens(number, said, -said.astype(np.float32), np.ones(half, np.int32))
        log.close()
        began = time.perf_counter()
        reader = LogReader(Path(folder))
        assert all(reader.has_left(request.id.partition("/")[0]) for request in lost)
        found = [reader.sequence(request.id) for request in lost]
        assert all(each is not None and len(each.token_ids) == half for each in found)
        find_s = time.perf_counter() - began
    one = SamplingParams(max_new_tokens=1)
    whole = [
        Request(id=r.id, token_ids=np.concatenate([r.token_ids, said]), sampling=one, num_generated=half)
        for r in lost
    ]
    began = time.perf_counter()
    engine.generate(whole)
    prefill_s = time.perf_counter() - began
    share = round(find_s / prefill_s, 3)
    return {
        "what": "recovery",
        "sequences": len(lost),
        "find_s": find_s,
        "prefill_s": prefill_s,
        "share": share,
    }


if __name__ == "__main__":
    main()
