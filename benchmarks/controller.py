"""What the controller costs: driver time of a step with workers that do nothing, as bytes, groups and ranks grow.

    python benchmarks/controller.py [--steps 50] [--bytes 1024,65536,1048576] [--groups 8,64] [--ranks 1,4,16]

The real Feeder, Admission, channels and hub around a loop like rill.workflows.loop's; workers that make no tokens and
train nothing. A rollout worker puts samples of a given size into the rollouts channel, an actor takes them by key.
Prints JSON lines for growing samples (driver time must not grow), for growing batches, and for a group call on more
ranks, a process each, from which 1,024 ranks can be extrapolated (cpu_us_per_rank).

    step_cpu_ms   CPU time of the driver process, all its threads, per step
    loop_cpu_ms   CPU time of the loop's own thread per step
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rill.data.loader import LoaderConfig, open_loader
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker
from rill.types import Prompt
from rill.workflows.admission import Admission
from rill.workflows.feeder import Feeder
from rill.workflows.jobs import GroupJob, Outcome, StepPlan, sample_key

TIMEOUT_S = 30.0
MAKER = "null"


def report(**fields: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


class NullRollout(Worker):
    """Answers every job at once with samples of zeros."""

    def __init__(self, *, num_bytes: int) -> None:
        self.payload = np.zeros(num_bytes, np.uint8)

    def generate(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> int:
        count = 0
        for job in jobs:
            for i in range(job.group_size):
                rollouts.put(self.payload, key=sample_key(job.id, i, MAKER))
            outcomes.put(self._outcome(job))
            count += 1
        return count

    def _outcome(self, job: GroupJob) -> Outcome:
        return Outcome(
            maker=MAKER, group_id=job.id, index=job.index, prompt_id=job.prompt.id, lengths=(1,) * job.group_size,
            metrics={"reward/mean": 0.5},
        )  # fmt: skip


class NullActor(Worker):
    def train(self, rollouts: Channel, plan: StepPlan) -> Mapping[str, float]:
        keys = plan.share(self.rank, self.world_size, whole_groups=False)
        return {"samples": float(len(rollouts.take(keys=keys)))}


class Nothing(Worker):
    """A rank that only answers."""

    def step(self) -> int:
        return self.rank


class Questions:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=str(index), text="q")


def null_steps(cluster: Cluster, tag: str, num_bytes: int, groups: int, steps: int) -> dict[str, float]:
    """Medians over the second half of the steps."""
    rollout = NullRollout.launch(cluster, name=f"rollout-{tag}", placement="0", num_bytes=num_bytes)
    actor = NullActor.launch(cluster, name=f"actor-{tag}", placement="1")
    jobs = Channel.create(cluster, f"jobs-{tag}", capacity_items=1_000_000)
    rollouts = Channel.create(cluster, f"rollouts-{tag}")
    outcomes = Channel.create(cluster, f"outcomes-{tag}", timeout_s=1e9)
    admission = Admission(batch_groups=groups, max_lag=0, max_concurrent=groups, num_steps=steps)
    feeder = Feeder(
        admission, source=open_loader(Questions(), LoaderConfig()), group_size=8, jobs=jobs, outcomes=outcomes,
        in_admission_order=False, discard=lambda outcome: None,
    )  # fmt: skip
    feeder.start()
    wall, process, thread = [], [], []
    handle = rollout.generate(jobs, rollouts, outcomes)
    feeder.open_epoch()
    for step in range(steps):
        began = time.perf_counter(), time.process_time(), time.thread_time()
        if handle.done():
            handle.wait(timeout_s=0)  # raises what ended it
        collected = feeder.take_batch(timeout_s=TIMEOUT_S)
        plan = StepPlan(step=step, version=admission.version, outcomes=collected.outcomes)  # type: ignore[arg-type]
        done = actor.train(rollouts, plan).wait(timeout_s=TIMEOUT_S)[0]
        assert done["samples"] == 8 * groups
        feeder.trained()
        wall.append(time.perf_counter() - began[0])
        process.append(time.process_time() - began[1])
        thread.append(time.thread_time() - began[2])
    feeder.close_epoch()
    handle.wait(timeout_s=TIMEOUT_S)
    feeder.stop()
    rollout.close()
    actor.close()
    half = steps // 2
    return {
        "step_wall_ms": 1e3 * statistics.median(wall[half:]),
        "step_cpu_ms": 1e3 * statistics.median(process[half:]),
        "loop_cpu_ms": 1e3 * statistics.median(thread[half:]),
    }


def rank_calls(cluster: Cluster, ranks: int, calls: int) -> dict[str, float]:
    """One group call on `ranks` null ranks, to the last answer."""
    group = Nothing.launch(cluster, name=f"ranks-{ranks}", placement=f"0:0-{ranks - 1}")
    wall, cpu = [], []
    for _ in range(calls):
        began = time.perf_counter(), time.process_time()
        assert len(group.step().wait(timeout_s=TIMEOUT_S)) == ranks
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    group.close()
    return {
        "call_wall_ms": 1e3 * statistics.median(wall[calls // 2 :]),
        "call_cpu_ms": 1e3 * statistics.median(cpu[calls // 2 :]),
        "cpu_us_per_rank": 1e6 * statistics.median(cpu[calls // 2 :]) / ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bytes", default="1024,65536,1048576", help="bytes of one sample")
    parser.add_argument("--groups", default="8,64", help="groups of 8 samples in a step")
    parser.add_argument("--ranks", default="1,4,16", help="ranks of the null group, a process each")
    args = parser.parse_args()
    with Cluster(devices=2) as cluster:
        for num_bytes in map(int, args.bytes.split(",")):
            figures = null_steps(cluster, f"b{num_bytes}", num_bytes, 8, args.steps)
            report(result="step by bytes", sample_bytes=num_bytes, groups=8, goal_cpu_ms=1.0, **figures)
        for groups in map(int, args.groups.split(",")):
            figures = null_steps(cluster, f"g{groups}", 1024, groups, args.steps)
            report(result="step by groups", sample_bytes=1024, groups=groups, **figures)
        for ranks in map(int, args.ranks.split(",")):
            report(result="call by ranks", ranks=ranks, **rank_calls(cluster, ranks, args.steps))


if __name__ == "__main__":
    main()
