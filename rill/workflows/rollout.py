"""The rollout worker: an engine and the environments that talk to it.

    jobs ──▶ take ──▶ a coroutine per sample ──▶ engine ──▶ reward ──▶ filter ──▶ advantages ──▶ rollouts
               ▲         (one event loop)                                  └──▶ outcomes ──▶ the loop
               └────────── a job's lease ends when its samples lie in `rollouts` ──────────┘

Two threads: `generate` runs an event loop for as long as the epoch lasts, the engine steps in its own; both need the
interpreter, so the loop's share of a sample is kept small and the lock changes hands often. Calls marked concurrent
(`update`, `evaluate`, `put_back`) come in beside them. New weights reach the engine between two of its steps, and
sequences that were running continue under them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.config import Config, OneOf, PartConfig
from rill.envs.base import ENVIRONMENTS, open_environment
from rill.inference.base import ENGINES, Completion, Engine, MemoryLevel, PauseMode
from rill.models.loading import ModelConfig, load_tokenizer
from rill.runtime.channel import Channel, Lease
from rill.runtime.context import current
from rill.runtime.worker import Worker, concurrent
from rill.telemetry.rollout_log import RolloutLog
from rill.types import Group, Prompt, Sample, SamplingParams, Trajectory
from rill.weights import Pulled, SealedManifest, open_receiver, seated
from rill.workflows.groups import group_metrics, oldest_version, samples_of, shaped
from rill.workflows.jobs import GroupJob, Outcome, sample_key
from rill.workflows.policy_client import PolicyClient
from rill.workflows.scoring import rewards_of
from rill.workflows.sections import EvalConfig, SamplingConfig, SyncConfig

LOCK_S = 0.0005
"""After so long a busy thread gives up the interpreter's lock. Python's own 5 ms are two steps of a GPU's engine, which
asks for the lock in every step: while a batch of answers is being scored it would stand still."""


class RolloutConfig(Config):
    """[rollout]"""

    engine: Annotated[PartConfig, OneOf(ENGINES)]
    """The inference engine. Its model is the recipe's unless it names its own."""
    env: Annotated[PartConfig, OneOf(ENVIRONMENTS)]
    """What a prompt is put through, rewards included."""
    sampling: SamplingConfig = SamplingConfig()
    group_size: int = Field(8, ge=1)
    """Samples per prompt."""
    max_concurrent: int = Field(1024, ge=1)
    """Samples in flight on one engine; further jobs wait where other engines can take them."""
    log_groups: int = Field(4, ge=0)
    """Groups per step and engine whose text is kept for the rollout viewer. 0: off."""


class RolloutWorker(Worker):
    def __init__(
        self,
        *,
        config: RolloutConfig,
        algorithm: AlgorithmConfig,
        model: ModelConfig,
        sync: SyncConfig,
        seed: int,
        run_dir: str,
    ) -> None:
        sys.setswitchinterval(LOCK_S)
        self.config = config
        self.algorithm = Algorithm(algorithm)
        self.engine: Engine = ENGINES.load(config.engine.type)(placed(config.engine, self.device))
        self.sync = sync
        self.receiver = open_receiver(
            seated(sync.transport, rank=self.rank + 1, num_receivers=self.world_size)
        )
        self.seed = seed
        self.maker = current().address.identity
        tokenizer = load_tokenizer(model)
        self.env = open_environment(config.env, tokenizer)
        self.log = RolloutLog(Path(run_dir), f"{self.group_name}-{self.rank}", tokenizer, config.log_groups)
        self._tokenizer = tokenizer
        self._updating = threading.Lock()
        self._serving: Serving | None = None
        self._put_back_until = 0
        """Calls of generate() up to this ordinal are to be put back."""

    # --- device memory, called by the device lock. Host memory is not scarce: a CPU engine stays. --------

    def onload(self) -> None:
        if self.device != "cpu":
            self.engine.restore()

    def offload(self) -> None:
        if self.device != "cpu":
            self.engine.release(MemoryLevel.WEIGHTS)

    # --- generating ---------------------------------------------------------------------------------------

    def generate(self, jobs: Channel, rollouts: Channel, outcomes: Channel, ordinal: int) -> int:
        """Until the epoch of `jobs` ends and everything taken is finished; returns the number of groups."""
        with self.device_lock(jobs, rollouts):
            return asyncio.run(self._serve(jobs, rollouts, outcomes, ordinal))

    @concurrent
    def put_back(self, ordinals: Sequence[int]) -> None:
        """Stop the call of generate() that has this rank's ordinal: groups that are not finished go back, with what
        was said of them. A call that is over, or has not begun, is told by the ordinal."""
        self._put_back_until = max(self._put_back_until, ordinals[self.rank])
        serving = self._serving
        if serving is not None and serving.ordinal <= self._put_back_until:
            serving.put_back(self.engine, self.sync.timeout_s)

    @concurrent
    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig) -> list[list[float]]:
        """Rewards of this engine's share of the prompts: every world_size-th, from its rank on."""
        mine = list(enumerate(prompts))[self.rank :: self.world_size]
        limit = config.max_new_tokens or self.config.sampling.max_new_tokens
        sampling = self.config.sampling.params(temperature=config.temperature, max_new_tokens=limit)
        with self.device_lock():
            return asyncio.run(
                rewards_of(self.engine, self.env, mine, sampling, config.samples, self.seed + 1)
            )

    async def _serve(self, jobs: Channel, rollouts: Channel, outcomes: Channel, ordinal: int) -> int:
        policy = PolicyClient(self.engine, seed=self.seed, decode=self._tokenizer.decode)
        room = asyncio.Semaphore(max(1, self.config.max_concurrent // self.config.group_size))
        serving = self._serving = Serving(ordinal, policy, asyncio.get_running_loop())
        if ordinal <= self._put_back_until:
            policy.put_back()
        num_groups = 0
        try:
            async with asyncio.TaskGroup() as groups:
                async for lease in jobs.leases():
                    num_groups += 1
                    groups.create_task(self._finish(lease, policy, rollouts, outcomes, room))
                    await room.acquire()  # before the next job is taken: another engine may have room for it
        finally:
            self._serving = None
            serving.end()
        return num_groups

    async def _finish(
        self,
        lease: Lease,
        policy: PolicyClient,
        rollouts: Channel,
        outcomes: Channel,
        room: asyncio.Semaphore,
    ) -> None:
        """One job from prompt to outcome; its lease ends when nothing of it can be lost any more."""
        job: GroupJob = lease.value
        outcome, samples = await self._group(job, policy)
        for number, sample in enumerate(samples):
            key = sample_key(outcome.group_id, number, self.maker)
            await rollouts.put_async(sample, weight=float(sample.num_tokens), key=key)
        await outcomes.put_async(outcome)
        lease.done()
        room.release()

    async def _group(self, job: GroupJob, policy: PolicyClient) -> tuple[Outcome, list[Sample]]:
        answers = dict(job.answers)
        trajectories = await self._episodes(job, policy, answers)
        if trajectories is None:
            return Outcome(index=job.index, returned=answers, maker=self.maker), []
        return self._outcome(job, trajectories)

    async def _episodes(
        self, job: GroupJob, policy: PolicyClient, answers: dict[str, Completion]
    ) -> list[Trajectory] | None:
        """All of the group, the greedy answer last where the algorithm needs one; None when it was put back."""
        sampling = self.config.sampling.params()
        episodes = [
            self._episode(job, f"{job.id}/{i}", policy, answers, sampling) for i in range(job.group_size)
        ]
        if Need.GREEDY_BASELINE in self.algorithm.needs:
            greedy = replace(sampling, temperature=0.0)
            episodes.append(self._episode(job, f"{job.id}/greedy", policy, answers, greedy))
        ended = await asyncio.gather(*episodes, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        whole = [trajectory for trajectory in ended if isinstance(trajectory, Trajectory)]
        return whole if len(whole) == len(ended) else None

    def _outcome(self, job: GroupJob, episodes: list[Trajectory]) -> tuple[Outcome, list[Sample]]:
        """The filter's verdict, and the samples of a group that is kept."""
        trajectories = [shaped(trajectory, self.algorithm) for trajectory in episodes]
        greedy = trajectories.pop().reward if len(trajectories) > job.group_size else None
        group = Group(id=job.id, prompt=job.prompt, trajectories=tuple(trajectories))
        verdict = self.algorithm.keep(group.rewards)
        self.log.write(group, dropped=verdict.reason)
        samples = samples_of(group, self.algorithm, greedy) if verdict.keep else []
        outcome = Outcome(
            index=job.index,
            lengths=tuple(sample.num_tokens for sample in samples),
            dropped=verdict.reason,
            oldest_version=oldest_version(group, self.engine.version),
            metrics=group_metrics(group),
            maker=self.maker,
        )
        return outcome, samples

    async def _episode(
        self,
        job: GroupJob,
        trajectory_id: str,
        policy: PolicyClient,
        answers: dict[str, Completion],
        sampling: SamplingParams,
    ) -> Trajectory:
        return await self.env.rollout(
            job.prompt,
            policy.episode(trajectory_id, answers),
            trajectory_id=trajectory_id,
            group_id=job.id,
            sampling=sampling,
        )

    # --- weights ------------------------------------------------------------------------------------------

    @concurrent
    def update(self, manifest: SealedManifest, interrupt: bool) -> Pulled:
        """Take new weights between two steps of the engine; running sequences continue under them, beside the proof."""
        opened = manifest.open()  # before the engine is stopped for it
        with self.device_lock(), self._updating:
            self.engine.pause(PauseMode.INTERRUPT if interrupt else PauseMode.FINISH, self.sync.timeout_s)
            try:
                self.engine.update_weights(self.receiver.pull(opened), manifest.version)
            finally:
                self.engine.resume()
            name = f"{self.group_name}[{self.rank}]"
            return Pulled.proven(name, manifest, self.engine.version, self.engine.score)


class Serving:
    """A call of generate() under way, as calls beside it see it."""

    def __init__(self, ordinal: int, policy: PolicyClient, loop: asyncio.AbstractEventLoop) -> None:
        self.ordinal = ordinal
        self._policy = policy
        self._loop = loop
        self._lock = threading.Lock()
        self._is_over = False
        self._asked: list[Future[list[str]]] = []
        """Those who wait to hear which requests are unanswered."""

    def put_back(self, engine: Engine, timeout_s: float) -> None:
        """From another thread. The engine is told outside of the event loop, which it may have to wait for."""
        unanswered: Future[list[str]] = Future()
        with self._lock:
            if self._is_over:
                return  # and with it everything that could be put back
            self._asked.append(unanswered)
            self._loop.call_soon_threadsafe(lambda: self._answer(self._policy.put_back()))
        if request_ids := unanswered.result(timeout_s):
            engine.abort(request_ids)

    def end(self) -> None:
        """On the event loop, as the last thing there: what was asked and is not answered will not run any more."""
        with self._lock:
            self._is_over = True
        self._answer([])

    def _answer(self, request_ids: list[str]) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        for unanswered in asked:
            unanswered.set_result(request_ids)


def placed(engine: PartConfig, device: str) -> PartConfig:
    """The engine's configuration with the device its worker was given, where it is free to choose one."""
    if "device" in type(engine).model_fields and engine.model_dump()["device"] == "auto":
        return engine.model_copy(update={"device": device})
    return engine
