"""Runs one episode of an environment, whatever it does: the one function that workflows call.

    session (deadline) ─▶ environment.run (deadline) ─▶ reward (deadlines of its own) ─▶ samples
                             └─ raises, hangs, runs out of its budget: data, with every token that was sampled

What passes through: cancellation (the episode was put back) and errors of rill's own that no environment caused (an
engine that failed).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from rill.envs.agent import Agents, EpisodeOver, Setting, TurnTimeout
from rill.envs.base import Environment, Policy
from rill.envs.deadline import Late, begun, within
from rill.envs.events import EventLog
from rill.envs.places import described
from rill.envs.rewards.base import as_score
from rill.envs.rewards.runner import RewardRunner, Score
from rill.errors import InvalidSampleError, RunError, TooLongError, in_words
from rill.types import Episode, Failure, Prompt, SamplingParams, StopReason, Trajectory

logger = logging.getLogger(__name__)

MAX_LOGGED = 20
"""Failures whose traceback goes to the log, per process; all of them are counted."""
_num_logged = 0


@dataclass(slots=True)
class _Outcome:
    """What became of an episode before its samples are made."""

    returned: object = None
    failure: Failure | None = None
    error: str | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def fail(self, failure: Failure, error: str) -> None:
        """The first failure counts; what follows from it is told too."""
        self.failure = self.failure or failure
        self.error = error if self.error is None else f"{self.error}; {error}"


async def run_episode(
    environment: Environment,
    prompt: Prompt,
    policy: Policy,
    *,
    episode_id: str,
    group_id: str,
    sampling: SamplingParams,
    log: EventLog | None = None,
    train_failed: bool = False,
) -> Episode:
    """From set-up to the reward. `log`: that of an earlier attempt, whose tools are then not called again.
    `train_failed`: one that fails keeps its loss mask."""
    started = time.monotonic()
    setting = Setting(
        environment=environment,
        policy=policy,
        sampling=sampling,
        log=EventLog() if log is None else log,
        episode_id=episode_id,
        group_id=group_id,
    )
    agents, outcome = Agents(setting), _Outcome()
    try:
        await _play(environment, prompt, agents, outcome)
    finally:
        agents.close()
    if outcome.failure is None:
        _take_returned(agents, outcome)
    _check_metrics(agents, outcome)
    names = {"group_id": group_id, "prompt_id": prompt.id}
    if not any(agent.tree.nodes for agent in agents.values()):
        _show_prompt(agents, prompt, outcome)
    samples = _samples(agents, episode_id, names, setting.counts.is_cut_off)
    if outcome.failure is None:
        await _score(environment, prompt, agents, samples, outcome)
    elif outcome.error is not None:
        _log(episode_id, outcome.error)
    whole = _rewarded(agents, samples, outcome, train_failed)
    whole.sort(key=lambda sample: agents[sample.agent] is not agents.first)
    failed, trained = outcome.failure is not None, dict.fromkeys(sample.agent for sample in whole)
    return Episode(
        id=episode_id,
        group_id=group_id,
        prompt_id=prompt.id,
        samples=tuple(whole),
        rewards={} if failed else {name: agents[name].tree.total_reward for name in trained},
        failure=outcome.failure,
        error=outcome.error,
        metrics=_metrics(agents, samples, time.monotonic() - started),
    )


# --- playing -----------------------------------------------------------------------------------------------


async def _play(environment: Environment, prompt: Prompt, agents: Agents, outcome: _Outcome) -> None:
    """Set up, run and tear down, each within its time."""
    limits = environment.config.limits
    if type(environment).session is Environment.session:
        await _run(environment, prompt, agents, outcome)
        return
    try:
        session = environment.session(prompt)
        agents.session = await within(limits.setup_timeout_s, begun(session.__aenter__))
    except Exception as error:  # noqa: BLE001  boundary: an environment is a user's code and may raise anything
        _raise_if_ours(error)
        outcome.fail(Failure.SETUP, f"set-up: {described(error)}")
        return
    error_of_run: BaseException | None = None
    try:
        error_of_run = await _run(environment, prompt, agents, outcome)
    except BaseException as error:
        error_of_run = error
        raise
    finally:
        await _tear_down(session, error_of_run, limits.teardown_timeout_s)


async def _run(
    environment: Environment, prompt: Prompt, agents: Agents, outcome: _Outcome
) -> Exception | None:
    """Environment.run; what it raised, where that is the episode's own failure."""
    limits, setting = environment.config.limits, agents.setting
    setting.running = begun(environment.run, prompt, agents)
    try:
        outcome.returned = await within(
            limits.episode_timeout_s, setting.running, grace_s=limits.teardown_timeout_s
        )
    except Exception as raised:  # noqa: BLE001  boundary, as above
        error = None if setting.interrupted is not None else _cause(raised)
    except asyncio.CancelledError as cancelled:
        raise setting.interrupted or cancelled from None
    else:
        error = None
    setting.check()
    if isinstance(error, EpisodeOver):
        setting.counts.is_cut_off = True
        return None
    if error is not None:
        _raise_if_ours(error)
        _blame(error, outcome)
    return error


def _cause(error: Exception) -> Exception:
    """Of what failed side by side: a budget that was used up counts where nothing else went wrong."""
    while isinstance(error, ExceptionGroup):
        error = next((e for e in error.exceptions if not isinstance(e, EpisodeOver)), error.exceptions[0])
    return error


async def _tear_down(
    session: AbstractAsyncContextManager[Any], error: BaseException | None, timeout_s: float
) -> None:
    """A session that cannot be given back costs nothing but a line in the log: the episode is over."""
    try:
        await within(timeout_s, begun(session.__aexit__, type(error) if error else None, error, None))
    except Exception as raised:  # noqa: BLE001  boundary: a user's clean-up may raise anything
        if raised is not error:
            _log("teardown", described(raised))


def _blame(error: Exception, outcome: _Outcome) -> None:
    match error:
        case Late() | TurnTimeout():
            outcome.fail(Failure.TIMEOUT, f"environment: {error}")
        case TooLongError():
            outcome.fail(Failure.TOO_LONG, str(error))
        case _:
            outcome.fail(Failure.ENVIRONMENT, f"environment: {described(error)}")


def _raise_if_ours(error: Exception) -> None:
    """A failed engine is no episode's fault. Mistakes in what the environment asked for are."""
    if isinstance(error, RunError | InvalidSampleError):
        raise error


# --- rewards and samples -----------------------------------------------------------------------------------


def _take_returned(agents: Agents, outcome: _Outcome) -> None:
    """What `run` returned is the first agent's reward."""
    if outcome.returned is None:
        return
    try:
        agents.first.reward(as_score(outcome.returned))
    except Exception as error:  # noqa: BLE001  boundary: a number of the user's own may raise anything
        kind = type(outcome.returned).__name__
        outcome.fail(
            Failure.REWARD, f"the environment's run() returned a {kind} as the reward: {in_words(error)}"
        )


def _check_metrics(agents: Agents, outcome: _Outcome) -> None:
    given, agents.metrics = agents.metrics, {}
    for name, value in given.items():
        try:
            agents.metrics[str(name)] = float(value)
        except Exception as error:  # noqa: BLE001  boundary, as above
            outcome.fail(Failure.ENVIRONMENT, f"agents.metrics[{name!r}] is no number: {in_words(error)}")


async def _score(
    environment: Environment,
    prompt: Prompt,
    agents: Agents,
    samples: dict[str, list[Trajectory]],
    outcome: _Outcome,
) -> None:
    """The configured reward, for the first agent's last answer."""
    if environment.rewards is not None:
        answer, log = samples[agents.first.name][-1], agents.setting.log
        score = await _scored_once(environment.rewards, prompt, answer, log)
        outcome.parts = dict(score.parts)
        if score.error is not None:
            outcome.fail(Failure.REWARD, score.error)
            return
        try:
            agents.first.reward(score.value)
        except ValueError as error:
            outcome.fail(Failure.REWARD, str(error))
    elif not any(agent.tree.has_rewards for agent in agents.values()):
        if agents.setting.counts.is_cut_off:
            agents.first.reward(0.0)  # it ran out of its budget before it earned anything
            return
        outcome.fail(
            Failure.NO_REWARD,
            f"{type(environment).__name__}.run() gave no reward: return a number, call agent.reward(value), or set "
            "rollout.env.reward",
        )


async def _scored_once(rewards: RewardRunner, prompt: Prompt, sample: Trajectory, log: EventLog) -> Score:
    """What an earlier attempt at the episode was given counts: a judge may answer otherwise the second time."""
    key = f"score/{hashlib.blake2b(sample.token_ids.tobytes(), digest_size=8).hexdigest()}"
    if (known := log.events.get(key)) is not None:
        return Score(**known)
    score = await rewards.score(prompt, sample)
    if score.error is None:
        parts = {name: float(value) for name, value in score.parts.items()}
        log.record(key, {"value": float(score.value), "parts": parts})
    return score


def _show_prompt(agents: Agents, prompt: Prompt, outcome: _Outcome) -> None:
    """An episode in which nobody was asked still has its prompt, or the name of one that cannot be written."""
    encoder, tree = agents.setting.environment.encoder, agents.policy.tree
    try:
        ids = encoder.encode(prompt)
        tree.grow(ids, encoder.pictures_in(prompt.messages, ids))
    except Exception as error:
        if encoder.pictures is None and any(message.pictures for message in prompt.messages):
            raise  # the wrong model for this data, and not a bad row of it
        if outcome.failure is None:
            outcome.fail(Failure.ENVIRONMENT, f"prompt: {described(error)}")
        tree.grow(encoder.encode_text(prompt.id, special=False))


def _samples(
    agents: Agents, episode_id: str, names: dict[str, str], is_cut_off: bool
) -> dict[str, list[Trajectory]]:
    """By agent."""
    trees = {name: agent for name, agent in agents.items() if agent.tree.nodes}
    made: dict[str, list[Trajectory]] = {}
    for name, agent in trees.items():
        sample_id = episode_id if len(trees) == 1 else f"{episode_id}:{name}"
        fields: dict[str, Any] = {**names, "agent": name, "episode_id": episode_id}
        if is_cut_off:
            fields["stop_reason"] = StopReason.LENGTH
        made[name] = agent.tree.samples(sample_id, **fields)
    return made


def _rewarded(
    agents: Agents, samples: dict[str, list[Trajectory]], outcome: _Outcome, train_failed: bool
) -> list[Trajectory]:
    whole: list[Trajectory] = []
    is_left_out = outcome.failure is not None and not train_failed
    for name, given in samples.items():
        agent = agents[name]
        if not agent.is_trained and len(samples) > 1:
            continue
        changes: dict[str, Any] = {"reward_parts": outcome.parts} if agent is agents.first else {}
        if outcome.failure is not None:
            changes.update(error=outcome.error, stop_reason=StopReason.ERROR)
        for sample in agent.tree.rewarded(given, **changes):
            if is_left_out or not agent.is_trained:
                sample.loss_mask[:] = False  # its own array; kept as data, never trained on
            whole.append(sample)
    return whole


def _metrics(agents: Agents, samples: dict[str, list[Trajectory]], seconds: float) -> dict[str, float]:
    counts = agents.setting.counts
    metrics = {
        "turns": float(counts.turns),
        "samples": float(sum(len(each) for each in samples.values())),
        "rewritten": float(sum(agent.tree.num_rewritten for agent in agents.values())),
        "episode_s": seconds,
    }
    if counts.tools_offered or counts.tool_calls or agents.setting.environment.offers_tools:
        metrics["tool_calls"] = float(counts.tool_calls)
        metrics["tool_errors"] = float(counts.tool_errors)
        metrics["malformed_calls"] = float(counts.malformed_calls)
        metrics["no_tool_call"] = float(counts.tool_calls == 0)
    return {**agents.metrics, **metrics}


def _log(episode_id: str, error: str) -> None:
    global _num_logged
    _num_logged += 1
    if _num_logged <= MAX_LOGGED:
        logger.warning("episode %s failed: %s", episode_id, error)
