"""The token log: what it costs an engine, how many bytes a token takes, how fast sequences in flight come back.

    python benchmarks/token_log.py [--device cuda] [--model PATH] [--requests 128] [--tokens 256] [--repeats 30]

Prints JSON lines:

    {"what": "pair", "off_s": …, "on_s": …, "off_cpu_s": …, "on_cpu_s": …, "own_s": …}
                          as many requests of the same lengths, one after the other, in turns either way first
    {"what": "cost", "of": "wall" | "cpu" | "own", "share": …, "low": …, "high": …, "quartiles": […]}
                          wall, cpu: on / off − 1, the processor's time being that of all threads. own: the processor's
                          time inside the log and what is made for it, counted where it is spent, over the rest of the
                          same run: it does not depend on what else the machine does. The median of the pairs, a 95 %
                          bootstrap interval of it, and the quartiles of the pairs
    {"what": "rate", "off": …, "on": …}                               tokens a second, of the median pair
    {"what": "bytes", "per_token": …}                                 on disk, before anything is removed
    {"what": "recovery", "sequences": …, "found_s": …, "recovered_s": …, "prefill_s": …, "times_prefill": …}
                          a killed engine's sequences, half of each in its log, asked of another: until the log is read,
                          until each has its next token, and the prefill of as many that were never lost. Medians

Without a model it uses fresh weights, and no tokenizer: on a GPU in the shape of Qwen2.5-1.5B, on the CPU one of two
layers, with which the engine is as fast as it can be and the log's share an upper bound. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report import report
from shapes import QWEN_1_5B

from rill.inference.base import Completion, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.native.sequence import Sequence
from rill.inference.policy import Asked, EngineGate
from rill.journal.logged import LoggedEngine
from rill.journal.reader import LogReader, segments
from rill.journal.token_log import FOLDER, JournalConfig, TokenLog
from rill.models.loading import ModelConfig
from rill.types import SamplingParams, TokenIds

TINY = {
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
NUM_RECOVERIES = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--in-flight", type=int, default=1000)
    given = parser.parse_args()
    shape = TINY if given.device == "cpu" else QWEN_1_5B | {"rope_theta": 1e6}
    model = ModelConfig(path=given.model) if given.model else ModelConfig(shape=shape)
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
        logged = LoggedEngine(gate, log, decode=str)
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
                report(what="pair", **pair)
        log.close()
        num_tokens = given.requests * given.tokens * (given.repeats + 1)
        num_bytes = sum(path.stat().st_size for path in segments(Path(folder) / FOLDER))
    for of, suffix in (("wall", "s"), ("cpu", "cpu_s")):
        shares = [pair[f"on_{suffix}"] / pair[f"off_{suffix}"] - 1 for pair in pairs]
        report(what="cost", of=of, **median_with_interval(shares))
    shares = [pair["own_s"] / (pair["on_cpu_s"] - pair["own_s"]) for pair in pairs]
    report(what="cost", of="own", **median_with_interval(shares))
    rates = {way: statistics.median(pair[f"{way}_s"] for pair in pairs) for way in ("off", "on")}
    sampled = given.requests * given.tokens
    report(what="rate", **{way: round(sampled / seconds) for way, seconds in rates.items()})
    report(what="bytes", per_token=num_bytes / num_tokens)
    report(**recovery(gate, requests, given.in_flight, given.tokens))
    engine.close()


class OwnTime:
    """The processor's time that goes to the log: its own threads, and on the engine's thread what makes, takes and
    ends the pieces that are written."""

    def __init__(self) -> None:
        own = [thread.ident for thread in threading.enumerate() if thread.name.startswith("token-log")]
        self._clocks = [time.pthread_getcpuclockid(ident) for ident in own if ident is not None]
        self._engine_s = 0.0
        for owner, name in ((Sequence, "take_delta"), (LoggedEngine, "_tokens"), (LoggedEngine, "_ended")):
            setattr(owner, name, self._clocked(getattr(owner, name)))

    def __call__(self) -> float:
        return self._engine_s + sum(map(time.clock_gettime, self._clocks))

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self._engine_s += time.thread_time() - began_s

        return clocked


def median_with_interval(values: list[float]) -> dict[str, Any]:
    draws = np.random.default_rng(0).choice(np.asarray(values), (10_000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    quartiles = [round(float(each), 4) for each in np.quantile(values, (0.25, 0.75))]
    return {
        "share": round(statistics.median(values), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "quartiles": quartiles,
    }


def recovery(
    gate: EngineGate, requests: Callable[[str, int], list[Request]], num_lost: int, num_tokens: int
) -> dict[str, object]:
    """Every round has prompts of its own: the engine would remember others."""
    half = num_tokens // 2
    said = np.arange(half, dtype=np.int32) % 100 + 1
    found_s, recovered_s, prefill_s = [], [], []
    for number in range(NUM_RECOVERIES):
        with tempfile.TemporaryDirectory(dir=os.environ.get("RILL_BENCH_DIR")) as folder:
            sampling = SamplingParams(max_new_tokens=half + 1, ignore_eos=True)
            lost = [replace(each, sampling=sampling) for each in requests(f"lost{number}", num_lost)]
            leave_behind(Path(folder), lost, said)
            began_s = time.perf_counter()
            reader = LogReader(Path(folder))
            reader.read_all()
            assert all(reader.sequence(request.id) is not None for request in lost)
            found_s.append(time.perf_counter() - began_s)
            log = TokenLog(Path(folder), "rollout-1", JournalConfig())
            recovered_s.append(seconds_of(LoggedEngine(gate, log, decode=str), lost))
            log.close()
        one = SamplingParams(max_new_tokens=1, ignore_eos=True)
        whole = [
            replace(each, token_ids=np.concatenate([each.token_ids, said]), sampling=one, num_generated=half)
            for each in requests(f"whole{number}", num_lost)
        ]
        prefill_s.append(seconds_of(gate, whole))
    times = [again_s / once_s for again_s, once_s in zip(recovered_s, prefill_s, strict=True)]
    return {
        "what": "recovery",
        "sequences": num_lost,
        "found_s": round(statistics.median(found_s), 4),
        "recovered_s": round(statistics.median(recovered_s), 4),
        "prefill_s": round(statistics.median(prefill_s), 4),
        "times_prefill": round(statistics.median(times), 3),
    }


def leave_behind(folder: Path, lost: list[Request], said: TokenIds) -> None:
    """The log of a process that is gone."""
    log = TokenLog(folder, "rollout-0", JournalConfig())
    for request in lost:
        number = log.open(request.id, num_prompt=len(request.token_ids), base=0)
        log.tokens(number, said, -said.astype(np.float32), np.ones(len(said), np.int32))
    log.close()


def seconds_of(asked: Asked, batch: list[Request]) -> float:
    began_s = time.perf_counter()
    for future in asked.submit(batch, 0):
        future.result(600)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
