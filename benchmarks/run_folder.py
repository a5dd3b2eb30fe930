"""A run folder of any size, for looking at: made of the formats that a run writes, without running anything.

The figures rise, rollouts hold prompts that come back, failed rewards and dropped groups; spans nest and take turns
on a device as in a run with a trainer and several rollout workers. benchmarks/dashboard.py and the dashboard's tests
use it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rill.telemetry.guards import GUARDS_FILE
from rill.telemetry.jsonl import LineFile
from rill.telemetry.metrics import METRICS_FILE
from rill.telemetry.run import Run, RunStatus

GROUP_SIZE = 8
NUM_PROMPTS = 5000
BEGIN_NS = 1_750_000_000_000_000_000
STEP_NS = 20_000_000_000
WORDS = (
    "the",
    "answer",
    "is",
    "sum",
    "of",
    "two",
    "then",
    "we",
    "carry",
    "one",
    "and",
    "check",
    "it",
    "again",
    "digit",
)
_encode = msgspec.json.Encoder().encode


def make_run_folder(
    path: Path, *, steps: int, rollouts: int, spans: int, workers: int = 4, seed: int = 0
) -> Run:
    """`path` must not exist. About 0.7 kB a rollout and 0.12 kB a span."""
    randoms = random.Random(seed)
    run = Run.create(path.name, root=path.parent, config_toml=_config(steps), argv=["rill", "train", "big"])
    _write(run.path / METRICS_FILE, (_metric(step, steps) for step in range(1, steps + 1)))
    finding = {
        "guard": "entropy collapse",
        "step": steps // 2,
        "action": "warn",
        "seen": "policy/entropy is 0.0004, expected above 0.001 nats",
        "meaning": "The policy answers the same every time: raise the temperature.",
    }
    _write(run.path / GUARDS_FILE, iter([finding]))
    num_groups = rollouts // GROUP_SIZE
    for worker in range(workers):
        groups = _groups(randoms, range(worker, num_groups, workers), num_groups, steps)
        _write(run.path / "rollouts" / f"rollout-{worker}.jsonl", groups)
    _write(run.path / "trace" / "driver.jsonl", _driver_spans(steps))
    for worker in range(workers):
        events = _worker_spans(worker, steps, spans // workers)
        _write(run.path / "trace" / f"rollout[{worker}]#0.jsonl", events)
    run.set_status(RunStatus.FINISHED)
    run.close()
    return run


def _write(path: Path, records: Iterator[dict[str, object]]) -> None:
    file, lines, size = LineFile(path), [], 0
    for record in records:
        line = _encode(record)
        lines.append(line)
        size += len(line)
        if size > 1 << 20:
            file.write(b"\n".join(lines) + b"\n")
            lines, size = [], 0
    if lines:
        file.write(b"\n".join(lines) + b"\n")
    file.close()


def _metric(step: int, steps: int) -> dict[str, object]:
    share = step / steps
    values = {
        "reward/mean": 0.2 + 0.7 * share,
        "length/response": 40 + 60 * share,
        "policy/entropy": 0.8 * (1 - share) + 0.02,
        "mismatch/abs_mean": 1e-4,
        "lag/mean": 0.5,
        "throughput/tokens_per_s": 9000 + 100 * (step % 7),
        "time/step_s": 20.0,
        "time/rollout_wait_s": 12.0,
        "time/train_s": 7.5,
        "time/sync_s": 0.5,
    } | {f"other/figure_{i}": share * i for i in range(40)}
    if step % 10 == 0:
        values |= {
            "eval/accuracy": share,
            "eval/accuracy_low": share * 0.95,
            "eval/accuracy_high": min(1, share + 0.03),
        }
    return {"step": step, "time_s": (BEGIN_NS + step * STEP_NS) / 1e9, "values": values}


def _groups(
    randoms: random.Random, places: range, num_groups: int, steps: int
) -> Iterator[dict[str, object]]:
    for place in places:
        prompt = place % NUM_PROMPTS
        version = 1 + place * steps // num_groups
        yield {
            "version": version,
            "group": f"g{place:08d}",
            "prompt_id": f"sum/{prompt}",
            "task": "sums" if prompt % 3 else "words",
            "answer": str(prompt),
            "dropped": "equal rewards" if place % 50 == 0 else None,
            "samples": [_sample(randoms, place, i, prompt, version) for i in range(GROUP_SIZE)],
        }


def _sample(randoms: random.Random, place: int, index: int, prompt: int, version: int) -> dict[str, object]:
    question = ["What", " is", f" {prompt}", " +", f" {prompt % 97}", "?", "\n"]
    said = [f" {word}" for word in randoms.choices(WORDS, k=randoms.randint(8, 20))] + [
        f" {prompt + prompt % 97}"
    ]
    given, sampled = len(question), len(said)
    is_failed = place % 997 == 0 and index == 0
    return {
        "id": f"g{place:08d}/{index}",
        "reward": float(randoms.random() < 0.2 + 0.7 * version / 1000),
        "parts": {"exact": 1.0},
        "stop": "length" if randoms.random() < 0.05 else "eos",
        "error": "TimeoutError: the reward took longer than 30 s" if is_failed else None,
        "tokens": question + said,
        "logprobs": [0.0] * given + [-0.3] * sampled,
        "sampled": [0] * given + [1] * sampled,
        "versions": [-1] * given + [version] * sampled,
        "num_tokens": given + sampled,
    }


def _driver_spans(steps: int) -> Iterator[dict[str, object]]:
    yield {"kind": "process", "process": "driver", "pid": 1, "host": "here", "at_ns": BEGIN_NS}
    for step in range(steps):
        begin = BEGIN_NS + step * STEP_NS
        parts = [("wait for rollouts", 0, 12), ("train", 12, 7)]
        for name, start, seconds in parts:
            yield _span(name, "loop", begin + start * 1_000_000_000, seconds * 1_000_000_000)
        yield _span("step", "loop", begin, STEP_NS - 200_000_000, step=step)
        yield _span("actor", "device 0", begin + 12_000_000_000, 7_000_000_000)


def _worker_spans(worker: int, steps: int, count: int) -> Iterator[dict[str, object]]:
    yield {"kind": "process", "process": f"rollout[{worker}]#0", "pid": 2, "host": "here", "at_ns": BEGIN_NS}
    each = max(1, count // steps)
    for step in range(steps):
        begin = BEGIN_NS + step * STEP_NS
        length = 12_000_000_000 // each
        for i in range(each):
            yield _span("decode", "engine", begin + i * length, int(length * 0.8))
        yield _span("rollout.generate", f"rollout[{worker}]", begin, 12_000_000_000, chunk=step)
        yield {"kind": "counter", "name": "process/cpu", "at_ns": begin, "value": 0.5 + (step % 10) / 20}


def _span(name: str, lane: str, at_ns: int, duration_ns: int, **attributes: object) -> dict[str, object]:
    record: dict[str, object] = {
        "kind": "span",
        "name": name,
        "at_ns": at_ns,
        "lane": lane,
        "duration_ns": duration_ns,
    }
    return record | ({"attributes": attributes} if attributes else {})


def _config(steps: int) -> str:
    return f'workflow = "grpo"  # big.toml:1\n\n[loop]\nsteps = {steps}  # command line\nmax_lag = 1  # default\n'
