"""The token log: what it costs an engine, how many bytes a token takes, how fast sequences in flight come back.

    python benchmarks/token_log.py [--model PATH] [--device cuda] [--requests 256] [--tokens 256] [--repeats 5]

Prints JSON lines:

    {"what": "throughput", "log": "off" | "on", "tokens_per_s": …}    alternating, the same requests in both
    {"what": "cost", "share": …}                                      1 − on / off, medians
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
import time
from pathlib import Path

import numpy as np

from rill.inference.base import Completion, Request
from rill.inference.gate import EngineGate
from rill.inference.native.engine import NativeEngine
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
    parser.add_argument("--repeats", type=int, default=5)
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
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(dir=os.environ.get("RILL_BENCH_DIR")) as folder:
        log = TokenLog(Path(folder), "rollout-0", JournalConfig())
        logged = LoggedEngine(gate, log, delay_s=JournalConfig().delay_s, decode=str)
        for repeat in range(-1, given.repeats):  # the first warms up
            for name, asked in (("off", gate), ("on", logged)):
                batch = requests(f"{name}{repeat}", given.requests)
                began = time.perf_counter()
                done: list[Completion] = [future.result(600) for future in asked.submit(batch, 0)]
                rate = sum(len(each.token_ids) for each in done) / (time.perf_counter() - began)
                if repeat >= 0:
                    rates[name].append(rate)
                    print(
                        json.dumps({"what": "throughput", "log": name, "tokens_per_s": round(rate)}),
                        flush=True,
                    )
        log.close()
        num_tokens = given.requests * given.tokens * (given.repeats + 1)
        num_bytes = sum(path.stat().st_size for path in segments(Path(folder) / FOLDER))
    share = 1 - statistics.median(rates["on"]) / statistics.median(rates["off"])
    print(json.dumps({"what": "cost", "share": round(share, 4)}))
    print(json.dumps({"what": "bytes", "per_token": round(num_bytes / num_tokens, 2)}))
    print(json.dumps(recovery(engine, requests("lost", given.in_flight), given.tokens)), flush=True)
    engine.close()


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
