"""Episodes: a task from prompt to outcome, in whichever process environments run.

    tasks ──▶ lease ──▶ num_samples episodes, coroutines on one event loop ──▶ the workflow's `finish_group` ──▶ samples
                │                                                                     └──▶ outcomes ──▶ controller
                └──────── the lease ends together with what came of it ─────────────────────────────┘

Called by the rollout worker (environments beside the engine) and by the environment worker (engines elsewhere); both
say whom to ask. An episode that fails is data: it is counted, and left out of baselines, filters and training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rill.algorithms import Algorithm, AlgorithmConfig, Need, Verdict
from rill.envs.base import Environment, open_environment
from rill.envs.episode import run_episode
from rill.envs.events import EventLog
from rill.inference.base import Completion
from rill.inference.collector import CollectorHold
from rill.inference.policy import Asked, PolicyClient
from rill.journal.checkpoints import needed_now
from rill.journal.reader import LogReader
from rill.journal.token_log import JournalConfig, TokenLog
from rill.models.loading import ModelConfig, load_tokenizer
from rill.models.pictures import load_pictures
from rill.runtime.channel import Lease
from rill.runtime.process.waits import watch_loop
from rill.telemetry.groups import episode_metrics, group_metrics, oldest_version
from rill.telemetry.rollout_log import RolloutLog
from rill.types import Episode, Group, Sample, SamplingParams, Trajectory
from rill.workers.config import EvalSetConfig, RolloutConfig
from rill.workers.records import TRAIN, Flows, Outcome, Progress, Task


class FinishedGroup(NamedTuple):
    """What a workflow makes of a group: whether it is trained on, and what reaches the stages."""

    verdict: Verdict
    samples: list[Sample]


FinishGroup = Callable[[Algorithm, Group, Sequence[Trajectory]], FinishedGroup]
"""(algorithm, group, the samples of the greedy episode where the algorithm needs one). A workflow file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What a worker needs to run episodes; travels with its launch."""

    rollout: RolloutConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    finish_group: FinishGroup
    evals: Mapping[str, EvalSetConfig]
    seed: int
    journal: JournalConfig
    run_dir: str

    def open_journal(self, process: str) -> TokenLog | None:
        """The token log of a process; None where the recipe wants none."""
        return TokenLog(Path(self.run_dir), process, self.journal) if self.journal.enabled else None


class Episodes:
    """One process's environments."""

    def __init__(self, settings: EpisodeSettings, process: str, journal: TokenLog | None) -> None:
        """`journal`: the process's."""
        self._settings = settings
        self._config = settings.rollout
        self._algorithm = Algorithm(settings.algorithm)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.model)
        self._pictures = load_pictures(settings.model)
        self._environments: dict[str, Environment] = {
            TRAIN: open_environment(self._config.env, self.tokenizer, self._pictures)
        }
        run_dir = Path(settings.run_dir)
        self._log = RolloutLog(run_dir, process, self.tokenizer, self._config.log_groups)
        self._journal = journal
        self._before = LogReader(run_dir, partial(needed_now, run_dir))
        self._collector = CollectorHold()
        self._collector.take()

    def close(self) -> None:
        self._collector.give_back()
        for environment in set(self._environments.values()):
            environment.close()
        self._log.close()

    async def run(self, flows: Flows, training: Asked, evaluation: Asked, epoch: int) -> int:
        """Until this epoch of the tasks ends and everything taken is finished; returns the number of groups.
        Evaluations are seeded apart."""
        watch_loop(asyncio.get_running_loop())
        seed, decode = self._settings.seed, self.tokenizer.decode
        learner = PolicyClient(training, seed=seed, decode=decode)
        examined = PolicyClient(evaluation, seed=seed + 1, decode=decode)
        room = asyncio.Semaphore(self._config.max_concurrent)
        num_groups = 0
        try:
            async with asyncio.TaskGroup() as groups:
                async for lease in flows.tasks.of_epoch(epoch).leases():
                    task: Task = lease.value
                    num_groups += 1
                    policy = learner if task.purpose == TRAIN else examined
                    groups.create_task(self._one(lease, flows, policy, room))
                    for _ in range(min(task.num_samples, self._config.max_concurrent)):
                        # Before the next task is taken: another worker may have room for it.
                        await room.acquire()
        except ExceptionGroup as errors:  # of the groups: the first is what went wrong
            raise (first := errors.exceptions[0]) from first.__cause__
        return num_groups

    async def _one(self, lease: Lease, flows: Flows, policy: PolicyClient, room: asyncio.Semaphore) -> None:
        task: Task = lease.value
        outcome, samples = await self.group(task, policy)
        await flows.finish(lease, outcome, samples)
        for _ in range(min(task.num_samples, self._config.max_concurrent)):
            room.release()

    async def group(self, task: Task, policy: PolicyClient) -> tuple[Outcome, list[Sample]]:
        """One task to its end, or to where it was stopped."""
        answers = dict(task.progress.answers)
        logs: dict[str, EpisodeEvents] = {}
        episodes = await self._episodes(task, policy, answers, logs)
        if episodes is None:
            events = {name: log.events for name, log in logs.items()}
            stopped = Progress(answers=answers, events=events)
            return self._outcome(task, stopped=stopped), []
        greedy = episodes.pop().samples if len(episodes) > task.num_samples else ()
        rewards = tuple(e.reward if e.failure is None else float("nan") for e in episodes)
        if task.purpose != TRAIN:
            error = next((e.error for e in episodes if e.error is not None), None)
            said = tuple(sample for episode in episodes for sample in episode.samples)
            group = Group(id=task.id, prompt=task.prompt, trajectories=said)
            self._log.write_evaluation(group, task.index, task.purpose)
            return self._outcome(task, rewards=rewards, error=error, metrics=episode_metrics(episodes)), []
        trajectories = tuple(sample for episode in episodes for sample in episode.samples)
        group = Group(id=task.id, prompt=task.prompt, trajectories=trajectories)
        verdict, samples = self._settings.finish_group(self._algorithm, group, greedy)
        if self._log.write(group, dropped=verdict.reason, trained={sample.id: sample for sample in samples}):
            samples = [replace(sample, is_logged=True) for sample in samples]
        outcome = self._outcome(
            task,
            lengths=tuple(sample.num_tokens for sample in samples),
            dropped=verdict.reason,
            rewards=rewards,
            oldest_version=oldest_version(group),
            metrics={**group_metrics(group), **episode_metrics(episodes)},
        )
        return outcome, samples

    async def _episodes(
        self, task: Task, policy: PolicyClient, answers: dict[str, Completion], logs: dict[str, EpisodeEvents]
    ) -> list[Episode] | None:
        """All of the group, the greedy one last where the algorithm needs it; None when it was stopped."""
        environment, sampling = self._setting(task.purpose)
        wanted = {f"{task.id}/{i}": sampling for i in range(task.num_samples)}
        if task.purpose == TRAIN and Need.GREEDY_BASELINE in self._algorithm.needs:
            wanted[f"{task.id}/greedy"] = replace(sampling, temperature=0.0)
        known, train_failed = self._begin(task), self._algorithm.config.filters.train_failed
        for name in wanted:
            events = {**known.get(name, {}), **task.progress.events.get(name, {})}
            logs[name] = EpisodeEvents(name, events, self._journal if task.purpose == TRAIN else None)
        ended = await asyncio.gather(
            *(
                run_episode(
                    environment,
                    task.prompt,
                    policy.episode(name, answers, task.epoch),
                    episode_id=name,
                    group_id=task.id,
                    sampling=how,
                    log=logs[name],
                    train_failed=train_failed,
                )
                for name, how in wanted.items()
            ),
            return_exceptions=True,
        )
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        whole = [episode for episode in ended if isinstance(episode, Episode)]
        return whole if len(whole) == len(ended) else None

    def _begin(self, task: Task) -> Mapping[str, Mapping[str, Any]]:
        """Put down that this process has the group; what one before it, which is gone, has put down, by episode."""
        if self._journal is None or task.purpose != TRAIN:
            return {}
        self._journal.event(task.id, "begun", task.prompt.id)
        if not self._before.has_left(task.id):
            return {}
        self._before.read_all()
        return {name: self._before.events(name) for name in self._before.names(task.id)}

    def _setting(self, purpose: str) -> tuple[Environment, SamplingParams]:
        """The environment and the sampling of training, or of an evaluation set; its own environment is opened at its
        first prompt."""
        sampling = self._config.sampling
        if purpose == TRAIN:
            return self._environments[TRAIN], sampling.params()
        chosen = self._settings.evals[purpose]
        if purpose not in self._environments:
            self._environments[purpose] = (
                self._environments[TRAIN]
                if chosen.env is None
                else open_environment(chosen.env, self.tokenizer, self._pictures)
            )
        return self._environments[purpose], chosen.params(sampling)

    def _outcome(self, task: Task, **known: Any) -> Outcome:
        return Outcome(index=task.index, purpose=task.purpose, **known)


class EpisodeEvents(EventLog):
    """Of one episode, those of earlier attempts too. What is put down is on disk before anybody acts on it."""

    def __init__(self, episode_id: str, events: dict[str, Any], journal: TokenLog | None) -> None:
        super().__init__(events)
        self._episode_id = episode_id
        self._journal = journal

    def record(self, key: str, value: Any) -> None:
        if self._journal is not None:
            self._journal.event(self._episode_id, key, value)
        super().record(key, value)
