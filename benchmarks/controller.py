"""What the controller costs: driver time of a step with workers that do nothing, as bytes, groups and ranks grow.

    python benchmarks/controller.py [--steps 40] [--bytes 1024,65536,1048576] [--groups 8,64,512] [--ranks 8,128]

The real Loop, Flow, Fleet, Controller, channels and hub; rollout workers that make no tokens and actors that train
nothing. A rollout worker puts samples of a given size into the samples channel, an actor takes them by key, publishes a
manifest of as many tensors as a 1.5B model has and brings the engines to it; every engine answers with a canary.
JSON lines:

    step by bytes    driver time as samples grow: must not grow
    step by groups   driver time as the batch grows: must not grow
    step by ranks    half of the ranks are engines, half are trainers; the work of a step is the same
                     number of groups and --work-s seconds of sleep in every engine and every trainer. `slowdown` is the
                     median step of the largest number of ranks over that of the smallest; the goal is 1.1

    step_cpu_ms   CPU time of the driver process, all its threads, per step; the goal is 1.0
    loop_cpu_ms   CPU time of the loop's own thread per step
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from report import report

from rill.config import Config, PartConfig
from rill.journal.checkpoints import RunCheckpoints
from rill.journal.token_log import JournalConfig
from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker, concurrent
from rill.telemetry.run import Run
from rill.training.parallel import World
from rill.types import Floats, PolicyVersion, Prompt, TokenIds
from rill.weights import Canary, CanaryProof, Pulled, SealedManifest, WeightManifest, open_publisher
from rill.weights.manifest import BucketSpec, TensorSpec
from rill.weights.publishing import PublishingWorker
from rill.weights.shm import ShmTransport
from rill.workers.config import SampledConfig
from rill.workers.edges import Edge
from rill.workers.records import Flows, Outcome, sample_key
from rill.workflows.config import EvalConfig, LoopConfig, OnlineConfig
from rill.workflows.controller import Controller
from rill.workflows.fleet import Fleet
from rill.workflows.flow import Flow
from rill.workflows.loop import Loop, StepReport
from rill.workflows.session import Session

TIMEOUT_S = 600.0
GROUP_SIZE = 8
NUM_TENSORS = 338
"""Of a 1.5B model with 28 layers."""


ALONE = World(None, torch.device("cpu"))
"""Every rank trains by itself."""


class NullRollout(Worker):
    """Answers every job with samples of zeros, after a share of `work_s` seconds."""

    def __init__(self, *, num_bytes: int, work_s: float) -> None:
        self.payload = np.zeros(num_bytes, np.uint8)
        self.work_s = work_s

    def generate(self, flows: Flows, epoch: int) -> int:
        count = 0
        if self.work_s:
            time.sleep(self.work_s)
        for task in flows.tasks.of_epoch(epoch):
            for i in range(task.num_samples):
                flows.samples.put(self.payload, key=sample_key(task.id, i))
            flows.outcomes.put(
                Outcome(
                    index=task.index,
                    lengths=(1,) * task.num_samples,
                    metrics={"reward/mean": 0.5},
                )
            )
            count += 1
        return count

    @concurrent
    def update(self, manifest: SealedManifest, interrupt: bool) -> Pulled:
        name = f"{self.group_name}[{self.rank}]"
        return Pulled.proven(name, manifest, manifest.version, no_scores)


class NullActor(PublishingWorker):
    """Publishes manifests without bytes: its transport is there and never used."""

    def __init__(self, *, work_s: float) -> None:
        self.work_s = work_s
        self.publisher = open_publisher(ShmTransport.Config()) if self.rank == 0 else None

    @concurrent
    def num_shares(self) -> int:
        return self.world_size

    def _train(self, source: Edge, version: PolicyVersion) -> dict[str, float]:
        if self.work_s:
            time.sleep(self.work_s)
        num_samples = sum(len(part.samples()) for part in source.parts(self, ALONE))
        return {"samples": float(num_samples)}

    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        if self.rank > 0:
            return None
        canary = Canary.random(1000)
        return manifest(version).seal(CanaryProof(canary=canary, expected=no_scores(canary.sequences)))


def no_scores(sequences: Sequence[TokenIds]) -> list[Floats]:
    return [np.zeros(len(sequence), np.float32) for sequence in sequences]


def manifest(version: PolicyVersion) -> WeightManifest:
    tensors = tuple(
        TensorSpec(
            name=f"model.layers.{n}.weight",
            shape=(64,),
            dtype="float32",
            bucket=0,
            offset=256 * n,
            num_bytes=256,
        )
        for n in range(NUM_TENSORS)
    )
    bucket = BucketSpec(index=0, num_bytes=256 * NUM_TENSORS, checksum=0, sampled_checksum=0)
    return WeightManifest(version=version, transport="null", location="", tensors=tensors, buckets=(bucket,))


class Questions:
    """A dataset named by its path in a recipe."""

    class Config(PartConfig):
        type: str = f"{__name__}:Questions"

    def __init__(self, config: Config, split: str) -> None: ...

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=str(index), text="q")


class Stopwatch:
    """CPU and wall time of the driver between reports."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []
        self._last = self._now()

    def __call__(self, report: StepReport) -> None:
        now = self._now()
        self.rows.append((now[0] - self._last[0], now[1] - self._last[1], now[2] - self._last[2]))
        self._last = self._now()

    def figures(self) -> dict[str, float]:
        """Medians over the second half of the steps."""
        wall, process, thread = zip(*self.rows[len(self.rows) // 2 :], strict=True)
        return {
            "step_wall_ms": 1e3 * statistics.median(wall),
            "step_cpu_ms": 1e3 * statistics.median(process),
            "loop_cpu_ms": 1e3 * statistics.median(thread),
        }

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


def null_run(
    cluster: Cluster, root: Path, tag: str, *,
    num_bytes: int, groups: int, steps: int, ranks: int = 2, work_s: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """Half of the ranks are engines, half trainers."""
    half = ranks // 2
    loop = {"steps": steps, "prompts_per_step": groups, "step_timeout_s": TIMEOUT_S}
    recipe = OnlineConfig(
        workflow="null", data=Questions.Config(), rollout=SampledConfig(group_size=GROUP_SIZE), algorithm=Config(),
        trainer=Config(), loop=LoopConfig(**loop), journal=JournalConfig(enabled=False),
        eval=EvalConfig(num_prompts=0),
    )  # fmt: skip
    rollout = NullRollout.launch(
        cluster,
        name=f"rollout-{tag}",
        placement=f"0:0-{half - 1}",
        threads=1,
        num_bytes=num_bytes,
        work_s=work_s,
    )
    actor = NullActor.launch(
        cluster,
        name=f"actor-{tag}",
        placement=f"1:0-{half - 1}",
        threads=1,
        work_s=work_s,
    )
    run = Run.create(tag, root=root)
    controller = Controller.launch(
        cluster, name=f"controller-{tag}", placement="0", threads=1, config=recipe, run_dir=str(run.path)
    )  # fmt: skip

    session = Session(recipe, run, cluster, f"-{tag}")
    session.groups = {"rollout": rollout, "actor": actor, "controller": controller}
    stopwatch = Stopwatch()

    def step(flow: Flow) -> None:
        flow.update(actor, flow.select(flow.sample(rollout)))

    checkpoints = RunCheckpoints(run, {}, 1, TIMEOUT_S)
    controller.start(session.flows).wait(timeout_s=TIMEOUT_S)
    Loop(Flow(Fleet(session)), step, checkpoints, [stopwatch]).run()
    for group in (rollout, actor, controller):
        group.close()
    return stopwatch.figures()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=200, help="of 8 groups; fewer of more groups, 30 at least"
    )
    parser.add_argument("--bytes", default="1024,65536,1048576", help="bytes of one sample")
    parser.add_argument("--groups", default="8,64,512", help="groups of 8 samples in a step")
    parser.add_argument("--ranks", default="8,128", help="ranks, a process each; empty: none")
    parser.add_argument("--rank-steps", type=int, default=8)
    parser.add_argument("--rank-groups", type=int, default=64, help="groups in a step with simulated ranks")
    parser.add_argument("--work-s", type=float, default=5.0, help="sleep of every rank in a step")
    args = parser.parse_args()

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    with tempfile.TemporaryDirectory(prefix="controller-") as root, Cluster(devices=2) as cluster:
        for num_bytes in numbers(args.bytes):
            figures = null_run(
                cluster, Path(root), f"b{num_bytes}", num_bytes=num_bytes, groups=8, steps=args.steps
            )
            report(result="step by bytes", sample_bytes=num_bytes, groups=8, goal_cpu_ms=1.0, **figures)
        for groups in numbers(args.groups):
            figures = null_run(
                cluster, Path(root), f"g{groups}", num_bytes=1024, groups=groups,
                steps=max(min(30, args.steps), 8 * args.steps // groups),
            )  # fmt: skip
            report(result="step by groups", sample_bytes=1024, groups=groups, goal_cpu_ms=1.0, **figures)
        walls = []
        for ranks in numbers(args.ranks):
            figures = null_run(
                cluster, Path(root), f"r{ranks}", num_bytes=1024, groups=args.rank_groups, steps=args.rank_steps,
                ranks=ranks, work_s=args.work_s,
            )  # fmt: skip
            walls.append(figures["step_wall_ms"])
            report(
                result="step by ranks", ranks=ranks, groups=args.rank_groups, work_s=args.work_s, **figures
            )
        if len(walls) > 1:
            report(result="slowdown by ranks", slowdown=walls[-1] / walls[0], goal=1.1)


if __name__ == "__main__":
    main()
