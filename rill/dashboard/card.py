"""The run card: what ran, on what, and the nine questions to ask before a result is believed, answered from the files.

The questions are the field's checklist for a reinforcement-learning result. An answer comes from the resolved
configuration, the environment file and the figures; what none of them holds is said to be unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rill.config.base import value_at
from rill.dashboard.metric_columns import MetricColumns
from rill.dashboard.trace_index import TraceIndex

UNKNOWN = "not recorded in this run's files"
STEP_PARTS = {
    "time/rollout_wait_s": "waiting for rollouts",
    "time/train_s": "training",
    "time/sync_s": "weight sync",
}
"""The figures that a step's time is made of, and what the page calls them."""
PHASE_PARTS = {"warm_up": "warm-up", "evaluate": "evaluation"}
"""The same for spans outside the steps, by the last part of their names."""


def run_card(values: Mapping[str, Any], starts: list[Any], figures: MetricColumns) -> list[dict[str, str]]:
    """[{question, answer}], in the checklist's order."""
    config = dict(values)
    answers = [
        ("Which framework, version and commit?", _framework(starts)),
        ("Inference engine and rollout topology?", _engine(config)),
        ("Precision, and what keeps engine and trainer consistent?", _precision(config, figures)),
        ("On-policy or asynchronous, and what bounds staleness?", _staleness(config, figures)),
        ("Are log-probabilities recomputed by the trainer?", _recomputed(config)),
        ("Mixture of experts: is routing replayed?", _routing(config)),
        ("Group size?", _group_size(config)),
        ("Turns, token budget, truncation?", _turns(config, figures)),
        ("Compute per step, and where the time goes?", _compute(config, starts, figures)),
    ]
    return [{"question": question, "answer": answer or UNKNOWN} for question, answer in answers]


def time_shares(figures: MetricColumns, traces: Sequence[TraceIndex] = ()) -> list[tuple[str, float]]:
    """Where the time went: (what, seconds), the longest first. Ranks that do the same at once count once."""
    seconds = {what: figures.total(name) for name, what in STEP_PARTS.items()}
    for trace in traces:
        spent: dict[str, float] = {}
        for (_, name), total_ns in zip(trace.state.pairs, trace.state.totals_ns):
            what = PHASE_PARTS.get(name.rpartition(".")[2], "")
            spent[what] = spent.get(what, 0.0) + total_ns / 1e9
        for what in PHASE_PARTS.values():
            seconds[what] = max(seconds.get(what, 0.0), spent.get(what, 0.0))
    return sorted([(what, s) for what, s in seconds.items() if s > 0], key=lambda part: -part[1])


def machine(starts: list[Any]) -> dict[str, str]:
    """What the last start ran on, in words."""
    last = starts[-1] if starts and isinstance(starts[-1], dict) else {}
    git = last.get("git") if isinstance(last.get("git"), dict) else None
    command = last.get("command")
    return {
        "command": " ".join(map(str, command)) if isinstance(command, list) else "",
        "host": str(last.get("host", "")),
        "platform": str(last.get("platform", "")),
        "python": str(last.get("python", "")),
        "cpus": str(last.get("num_cpus", "")),
        "versions": _versions(last),
        "commit": f"{str(git['commit'])[:12]}{' with changes' if git.get('has_changes') else ''}"
        if git
        else "",
        "starts": str(len(starts)),
    }


def _framework(starts: list[Any]) -> str:
    found = machine(starts)
    commit = f", commit {found['commit']}" if found["commit"] else ""
    return f"{found['versions']}{commit}" if found["versions"] else ""


def _versions(start: Mapping[str, Any]) -> str:
    versions = start.get("versions")
    return ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""


def _engine(config: dict[str, Any]) -> str:
    engine = value_at(config, "rollout.engine.type")
    if engine is None:
        return ""
    rollout, actor = value_at(config, "placement.rollout"), value_at(config, "placement.actor")
    where = ""
    if rollout is not None and actor is not None:
        is_shared = rollout == actor
        where = (
            f"; rollout and actor share devices ({rollout})"
            if is_shared
            else f"; rollout on {rollout}, actor on {actor}"
        )
    prefix = value_at(config, "rollout.engine.enable_prefix_cache")
    cache = "" if prefix is None else f"; prefix cache {'on' if prefix else 'off'}"
    return f"{engine} engine{where}{cache}"


def _precision(config: dict[str, Any], figures: MetricColumns) -> str:
    trainer = value_at(config, "trainer.compute_dtype")
    if trainer is None:
        return ""
    engine = value_at(config, "rollout.engine.dtype") or trainer
    canary = value_at(config, "sync.canary")
    words = f"trainer {trainer}, engine {engine}"
    if canary is not None:
        words += f"; canary after every sync {'on' if canary else 'off'}"
    mismatch = figures.last("mismatch/abs_mean")
    return words + ("" if mismatch is None else f"; mean mismatch at the end {mismatch:.2g} nats")


def _staleness(config: dict[str, Any], figures: MetricColumns) -> str:
    lag = value_at(config, "loop.max_lag")
    if lag is None:
        return ""
    words = "on-policy (max_lag 0)" if lag == 0 else f"asynchronous, max_lag {lag}"
    correction = value_at(config, "algorithm.correction.type")
    words += f"; correction {correction}" if correction else ""
    seen = figures.last("lag/max")
    return words + ("" if seen is None else f"; largest lag of the last step {seen:g}")


def _recomputed(config: dict[str, Any]) -> str:
    if value_at(config, "algorithm.type") is None:
        return ""
    return "yes: the loss uses the trainer's own; the engine's serve corrections and mismatch figures only"


def _routing(config: dict[str, Any]) -> str:
    experts = value_at(config, "model.shape.num_experts")
    replay = value_at(config, "trainer.routing_replay")
    if replay is not None:
        return "replayed" if replay else "not replayed"
    return "no experts in this model's shape" if value_at(config, "model.shape") and not experts else ""


def _group_size(config: dict[str, Any]) -> str:
    size = value_at(config, "rollout.group_size")
    groups = value_at(config, "loop.prompts_per_step")
    if size is None:
        return ""
    return f"{size} samples a prompt" + (f", {groups} prompts a step" if groups is not None else "")


def _turns(config: dict[str, Any], figures: MetricColumns) -> str:
    env, tokens = value_at(config, "rollout.env.type"), value_at(config, "rollout.sampling.max_new_tokens")
    if env is None and tokens is None:
        return ""
    turns = value_at(config, "rollout.env.max_turns")
    parts = [f"environment {env}" if env else ""]
    parts.append(f"at most {turns} turns" if turns is not None else "")
    parts.append(f"at most {tokens} new tokens" if tokens is not None else "")
    cut = figures.last("length/truncated")
    parts.append(f"{cut:.1%} cut off in the last step" if cut is not None else "")
    return ", ".join(part for part in parts if part)


def _compute(config: dict[str, Any], starts: list[Any], figures: MetricColumns) -> str:
    shares = time_shares(figures)
    total = sum(seconds for _, seconds in shares)
    if not total:
        return ""
    devices = value_at(config, "cluster.devices")
    steps = max(1, len([step for step in figures.steps if step > 0]))
    parts = ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in shares)
    on = f" on {devices} device{'' if devices == 1 else 's'}" if devices is not None else ""
    return f"{total / steps:.2f} s a step{on}: {parts}"
