"""The rollout worker: an engine and the environments that talk to it.

    jobs ──▶ take ──▶ a coroutine per sample ──▶ engine ──▶ reward ──▶ filter ──▶ advantages ──▶ rollouts
               ▲         (one event loop)                                  └──▶ outcomes ──▶ the loop
               └────────── a job's lease ends when its samples lie in `rollouts` ──────────┘

Two threads: `generate` runs an event loop for as long as the epoch lasts, the engine steps in its own. Calls marked
concurrent (`update`, `evaluate`) come in beside them. New weights reach the engine between two of its
steps, and sequences that were running continue under them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.config import Config, OneOf, PartConfig
from rill.envs.base import ENVIRONMENTS, open_environment
from rill.inference.base import ENGINES, Engine, MemoryLevel, PauseMode
from rill.models.loading import ModelConfig, load_tokenizer
from rill.runtime.channel import Channel, Lease
from rill.runtime.context import current
from rill.runtime.worker import Worker, concurrent
from rill.types import Floats, Group, PolicyVersion, Prompt, Sample, SamplingParams, TokenIds, Trajectory
from rill.weights import WeightManifest, open_receiver
from rill.workflows.groups import group_metrics, oldest_version, samples_of, shaped
from rill.workflows.jobs import GroupJob, Outcome, sample_key
from rill.workflows.policy_client import PolicyClient
from rill.workflows.rollout_log import RolloutLog
from rill.workflows.scoring import rewards_of
from rill.workflows.sections import EvalConfig, SamplingConfig, SyncConfig


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
        self.config = config
        self.algorithm = Algorithm(algorithm)
        self.engine: Engine = ENGINES.load(config.engine.type)(placed(config.engine, self.device))
        self.sync = sync
        self.receiver = open_receiver(sync.transport)
        self.seed = seed
        self.maker = current().address.identity
        tokenizer = load_tokenizer(model)
        self.env = open_environment(config.env, tokenizer)
        self.log = RolloutLog(Path(run_dir), f"{self.group_name}-{self.rank}", tokenizer, config.log_groups)
        self._updating = threading.Lock()

    # --- device memory, called by the device lock. Host memory is not scarce: a CPU engine stays. --------

    def onload(self) -> None:
        if self.device != "cpu":
            self.engine.restore()

    def offload(self) -> None:
        if self.device != "cpu":
            self.engine.release(MemoryLevel.WEIGHTS)

    # --- generating ---------------------------------------------------------------------------------------

    def generate(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> int:
        """Until the epoch of `jobs` ends and everything taken is finished; returns the number of groups."""
        with self.device_lock(jobs, rollouts):
            return asyncio.run(self._serve(jobs, rollouts, outcomes))

    @concurrent
    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, list[float]]:
        """Rewards of this engine's share of the prompts, by prompt id."""
        mine = list(prompts)[self.rank :: self.world_size]
        limit = config.max_new_tokens or self.config.sampling.max_new_tokens
        sampling = self.config.sampling.params(temperature=config.temperature, max_new_tokens=limit)
        with self.device_lock():
            rewards = asyncio.run(
                rewards_of(self.engine, self.env, mine, sampling, config.samples, self.seed + 1)
            )
        return {prompt.id: row for prompt, row in zip(mine, rewards, strict=True)}

    async def _serve(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> int:
        policy = PolicyClient(self.engine, seed=self.seed)
        room = asyncio.Semaphore(max(1, self.config.max_concurrent // self.config.group_size))
        num_groups = 0
        async with asyncio.TaskGroup() as groups:
            async for lease in jobs.leases():
                num_groups += 1
                groups.create_task(self._finish(lease, policy, rollouts, outcomes, room))
                await room.acquire()  # before the next job is taken: another engine may have room for it
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
        outcome, samples = await self._group(lease.value, policy)
        for number, sample in enumerate(samples):
            key = sample_key(outcome.group_id, number, self.maker)
            await rollouts.put_async(sample, weight=float(sample.num_tokens), key=key)
        await outcomes.put_async(outcome)
        lease.done()
        room.release()

    async def _group(self, job: GroupJob, policy: PolicyClient) -> tuple[Outcome, list[Sample]]:
        sampling = self.config.sampling.params()
        episodes = [self._episode(job, f"{job.id}/{i}", policy, sampling) for i in range(job.group_size)]
        if Need.GREEDY_BASELINE in self.algorithm.needs:
            episodes.append(
                self._episode(job, f"{job.id}/greedy", policy, replace(sampling, temperature=0.0))
            )
        trajectories = [shaped(t, self.algorithm) for t in await asyncio.gather(*episodes)]
        greedy = trajectories.pop().reward if len(trajectories) > job.group_size else None
        group = Group(id=job.id, prompt=job.prompt, trajectories=tuple(trajectories))
        verdict = self.algorithm.keep(group.rewards)
        self.log.write(group, dropped=verdict.reason)
        samples = samples_of(group, self.algorithm, greedy) if verdict.keep else []
        outcome = Outcome(
            group_id=job.id,
            index=job.index,
            prompt_id=job.prompt.id,
            lengths=tuple(sample.num_tokens for sample in samples),
            dropped=verdict.reason,
            oldest_version=oldest_version(group, self.engine.version),
            metrics=group_metrics(group),
            maker=self.maker,
        )
        return outcome, samples

    async def _episode(
        self, job: GroupJob, trajectory_id: str, policy: PolicyClient, sampling: SamplingParams
    ) -> Trajectory:
        return await self.env.rollout(
            job.prompt,
            policy.episode(trajectory_id),
            trajectory_id=trajectory_id,
            group_id=job.id,
            sampling=sampling,
        )

    # --- weights ------------------------------------------------------------------------------------------

    @concurrent
    def update(self, manifest: WeightManifest, interrupt: bool) -> PolicyVersion:
        """Take new weights between two steps of the engine; running sequences continue under them."""
        with self.device_lock(), self._updating:
            self.engine.pause(PauseMode.INTERRUPT if interrupt else PauseMode.FINISH, self.sync.timeout_s)
            try:
                self.engine.update_weights(self.receiver.pull(manifest), manifest.version)
            finally:
                self.engine.resume()
            return self.engine.version

    @concurrent
    def score(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        """For the canary."""
        with self.device_lock():
            return self.engine.score(sequences)


def placed(engine: PartConfig, device: str) -> PartConfig:
    """The engine's configuration with the device its worker was given, where it is free to choose one."""
    if "device" in type(engine).model_fields and engine.model_dump()["device"] == "auto":
        return engine.model_copy(update={"device": device})
    return engine
