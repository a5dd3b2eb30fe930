"""The run card: what ran, on what, and the nine questions to ask before a result is believed, answered from the files.

The questions are the field's checklist for a reinforcement-learning result. An answer comes from the resolved
configuration, the environment file and the figures; what none of them holds is said to be unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rill.config.base import value_at
from rill.dashboard.figures import Figures
from rill.dashboard.trace_index import TraceIndex

Values = Callable[[str], Any]
"""The value of a dotted key of the configuration, or None."""
RECOMPUTED = "yes: the loss uses the trainer's own; the engine's serve corrections and mismatch figures only"
UNKNOWN = "not recorded in this run's files"
STEP_PARTS = {
    "time/rollout_wait_s": "waiting for rollouts",
    "time/train_s": "training",
    "time/sync_s": "weight sync",
}
"""The figures that a step's time is made of, and what the page calls them."""
PHASE_PARTS = {"warm_up": "warm-up", "evaluate": "evaluation"}
"""The same for spans outside the steps, by the last part of their names."""


def run_card(values: Mapping[str, Any], starts: list[Any], figures: Figures) -> list[dict[str, str]]:
    """[{question, answer}], in the checklist's order."""

    def at(key: str) -> Any:
        return value_at(values, key)

    answers = [
        ("Which framework, version and commit?", _framework(machine(starts))),
        ("Inference engine and rollout topology?", _engine(at)),
        ("Precision, and what keeps engine and trainer consistent?", _precision(at, figures)),
        ("On-policy or asynchronous, and what bounds staleness?", _staleness(at, figures)),
        ("Are log-probabilities recomputed by the trainer?", RECOMPUTED if at("algorithm.type") else ""),
        ("Mixture of experts: is routing replayed?", _routing(at)),
        ("Group size?", _group_size(at)),
        ("Turns, token budget, truncation?", _turns(at, figures)),
        ("Compute per step, and where the time goes?", _compute(at, figures)),
    ]
    return [{"question": question, "answer": answer or UNKNOWN} for question, answer in answers]


def time_shares(figures: Figures, traces: Sequence[TraceIndex] = ()) -> list[tuple[str, float]]:
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


def _versions(start: Mapping[str, Any]) -> str:
    versions = start.get("versions")
    return ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""


def _framework(found: Mapping[str, str]) -> str:
    commit = f", commit {found['commit']}" if found["commit"] else ""
    return f"{found['versions']}{commit}" if found["versions"] else ""


def _engine(at: Values) -> str:
    engine, rollout, actor = at("rollout.engine.type"), at("placement.rollout"), at("placement.actor")
    if engine is None:
        return ""
    where = ""
    if rollout is not None and actor is not None:
        where = f"rollout on {rollout}, actor on {actor}"
        where = f"rollout and actor share devices ({rollout})" if rollout == actor else where
    return _joined(f"{engine} engine", where, _on("prefix cache", at("rollout.engine.enable_prefix_cache")))


def _precision(at: Values, figures: Figures) -> str:
    trainer = at("trainer.compute_dtype")
    if trainer is None:
        return ""
    mismatch = figures.last("mismatch/abs_mean")
    return _joined(
        f"trainer {trainer}, engine {at('rollout.engine.dtype') or trainer}",
        _on("canary after every sync", at("sync.canary")),
        "" if mismatch is None else f"mean mismatch at the end {mismatch:.2g} nats",
    )


def _staleness(at: Values, figures: Figures) -> str:
    lag, correction, seen = at("loop.max_lag"), at("algorithm.correction.type"), figures.last("lag/max")
    if lag is None:
        return ""
    return _joined(
        "on-policy (max_lag 0)" if lag == 0 else f"asynchronous, max_lag {lag}",
        f"correction {correction}" if correction else "",
        "" if seen is None else f"largest lag of the last step {seen:g}",
    )


def _routing(at: Values) -> str:
    replay, shape = at("trainer.routing_replay"), at("model.shape")
    if replay is not None:
        return "replayed" if replay else "not replayed"
    return "no experts in this model's shape" if shape and not at("model.shape.num_experts") else ""


def _group_size(at: Values) -> str:
    size, groups = at("rollout.group_size"), at("loop.prompts_per_step")
    if size is None:
        return ""
    return f"{size} samples a prompt" + (f", {groups} prompts a step" if groups is not None else "")


def _turns(at: Values, figures: Figures) -> str:
    env, tokens, turns = (
        at("rollout.env.type"),
        at("rollout.sampling.max_new_tokens"),
        at("rollout.env.max_turns"),
    )
    cut = figures.last("length/truncated")
    return _joined(
        f"environment {env}" if env else "",
        f"at most {turns} turns" if turns is not None else "",
        f"at most {tokens} new tokens" if tokens is not None else "",
        f"{cut:.1%} cut off in the last step" if cut is not None and (env or tokens) else "",
        between=", ",
    )


def _compute(at: Values, figures: Figures) -> str:
    shares, devices = time_shares(figures), at("cluster.devices")
    total = sum(seconds for _, seconds in shares)
    if not total:
        return ""
    steps = max(1, sum(step > 0 for step in figures.steps))
    on = f" on {devices} device{'' if devices == 1 else 's'}" if devices is not None else ""
    return f"{total / steps:.2f} s a step{on}: " + ", ".join(f"{what} {s / total:.0%}" for what, s in shares)


def _joined(*parts: str, between: str = "; ") -> str:
    return between.join(part for part in parts if part)


def _on(what: str, value: Any) -> str:
    return "" if value is None else f"{what} {'on' if value else 'off'}"
