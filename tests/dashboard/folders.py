"""Small run folders with everything the pages show, for the tests of the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run, RunStatus

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"
BEGIN_NS = 1_750_000_000_000_000_000
SECOND = 1_000_000_000


def append(path: Path, *records: Any) -> None:
    file = LineFile(path)
    file.write(b"".join(encode_line(record) for record in records))
    file.close()


def span(name: str, lane: str, start_s: float, seconds: float, **attributes: Any) -> dict[str, Any]:
    record = {
        "kind": "span",
        "name": name,
        "lane": lane,
        "at_ns": BEGIN_NS + round(start_s * SECOND),
        "duration_ns": round(seconds * SECOND),
    }
    return record | ({"attributes": attributes} if attributes else {})


def process(name: str) -> dict[str, Any]:
    return {"kind": "process", "process": name, "pid": 1, "host": "here", "at_ns": BEGIN_NS}


def sample(answer: str, reward: float | None, **more: Any) -> dict[str, Any]:
    tokens, sampled = ["2", "+2=", *answer], [0, 0, *(1 for _ in answer)]
    return {
        "id": "s",
        "reward": reward,
        "parts": {},
        "stop": "eos",
        "error": None,
        "tokens": tokens,
        "logprobs": [-0.5 * flag for flag in sampled],
        "sampled": sampled,
        "versions": [flag - 1 for flag in sampled],
        "num_tokens": len(tokens),
    } | more


def group(version: int, name: str, *samples: dict[str, Any], **more: Any) -> dict[str, Any]:
    record = {
        "version": version,
        "group": name,
        "prompt_id": "p",
        "task": "sums",
        "answer": "4",
        "dropped": None,
    }
    return record | {"samples": list(samples)} | more


def small_run(root: Path, name: str = "small", *, is_running: bool = False) -> Run:
    """Three steps, two groups, two processes, a finding, a configuration."""
    config = "seed = 0          # default\n\n[loop]\nsteps = 3  # recipes/x.toml:4\n# order is unset\n"
    run = Run.create(name, root=root, config_toml=config, argv=["rill", "train", "x"])
    with MetricLog(run.path) as log:
        for step in range(1, 4):
            figures = {"reward/mean": 0.1 * step, "time/train_s": 2.0, "time/step_s": 3.0, "tiny": 1.7e-7}
            log.write(
                step, figures | {"eval/accuracy": 0.3, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.4}
            )
    append(
        run.path / "trace" / "driver.jsonl",
        process("driver"),
        span("wait for rollouts", "loop", 0.0, 1.0),
        span("train", "loop", 1.0, 1.5),
        span("step", "loop", 0.0, 3.0, step=1),
        {"kind": "counter", "name": "process/cpu", "at_ns": BEGIN_NS + SECOND, "value": 0.5},
    )
    append(
        run.path / "trace" / "rollout[0]#0.jsonl",
        process("rollout[0]#0"),
        span("rollout[0]", "device 0", 0.0, 1.0, chunk=7),
        {"kind": "open", "name": "generate", "lane": "engine", "at_ns": BEGIN_NS + SECOND},
    )
    append(
        run.path / "rollouts" / "rollout-0.jsonl",
        group(1, "g1", sample("4", 1.0), sample(HOSTILE, 0.0, stop="length"), tags=["odd"]),
        group(
            3, "g2", sample("5", None, error="ValueError: no number"), dropped="equal rewards", prompt_id="q"
        ),
    )
    finding = {
        "guard": "lag",
        "step": 2,
        "action": "warn",
        "seen": "lag/max is 2",
        "meaning": "Lower max_lag.",
    }
    append(run.path / "guards.jsonl", finding)
    run.log_path.write_text(f"INFO it said {HOSTILE}\n", encoding="utf-8")
    if not is_running:
        run.set_status(RunStatus.FINISHED)
        run.close()
    return run
