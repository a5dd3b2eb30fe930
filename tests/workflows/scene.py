"""The real loop, channels, feeder, fleet and rollout workers around a scripted engine and a trainer that only records.

scene = Scene(tmp_path, cluster, max_lag=1)
scene.run()
scene.trained()      # what reached the loss, step by step
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rill.algorithms import AlgorithmConfig
from rill.data.loader import LoaderConfig
from rill.data.tasks.arithmetic import ArithmeticDataset
from rill.models.loading import ModelConfig
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.telemetry.run import Run
from rill.types import PolicyVersion, Prompt, Sample, Trajectory
from rill.weights import Canary, CanaryProof, Publisher, SealedManifest, open_publisher, seated
from rill.workflows.checkpoints import RunCheckpoints
from rill.workflows.feeder import Feeder, PromptPlan
from rill.workflows.fleet import Fleet, Flow
from rill.workflows.jobs import StepPlan, TrainedStep
from rill.workflows.loop import Loop, Parts, StepReport
from rill.workflows.publishing import PublishingWorker
from rill.workflows.rollout import RolloutConfig, RolloutWorker
from rill.workflows.sections import LoopConfig, SyncConfig
from tests.workflows.scripted_engine import ENGINE, WEIGHT, scores

MODEL = ModelConfig(
    shape={
        "model_type": "qwen2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 104,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    tokenizer="chars",
)
SEED = 7
DEADLINE_S = 60.0


def parity(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A reward that a test can compute again from the tokens."""
    return float(int(trajectory.token_ids[trajectory.loss_mask].sum()) % 3 == 0)


class RecordingActor(PublishingWorker):
    """An actor whose training is a file: the samples of every step, as they came."""

    publisher: Publisher

    def __init__(self, *, folder: str, sync: SyncConfig) -> None:
        self.folder = Path(folder)
        self.publisher = open_publisher(sync.transport)
        self.value = 0.0

    def close(self) -> None:
        self.publisher.close()

    def train(self, rollouts: Channel, plan: StepPlan) -> TrainedStep:
        samples: list[Sample] = rollouts.take(keys=plan.share(0, 1, whole_groups=True))
        path = self.folder / f"step-{plan.step:04d}.pickle"
        assert not path.exists(), f"step {plan.step} was trained twice"
        path.write_bytes(pickle.dumps((plan, samples)))
        synced = self._bring_engines_to(self._gather(PolicyVersion(plan.version + 1)))
        return TrainedStep({"samples": float(len(samples))}, synced, 0.0)

    def _gather(self, version: PolicyVersion) -> SealedManifest:
        self.value = float(version)
        tensors = {"a": torch.zeros(64), WEIGHT: torch.tensor(self.value), "z": torch.ones(64)}
        manifest = self.publisher.publish(tensors.items(), version)
        canary = Canary.random(100)
        return manifest.seal(CanaryProof(canary=canary, expected=scores(self.value, canary.sequences)))

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)

    def load(self, folder: str) -> None: ...


class NoEvaluation:
    """An evaluator that is never due."""

    def is_due(self, step: int, last_step: int) -> bool:
        return False

    def run(self) -> dict[str, float]:
        return {}


class Scene:
    """One run. Its groups are launched on the given cluster under names of their own."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        *,
        name: str = "a",
        engines: str = "0",
        steps: int = 4,
        groups_per_step: int = 3,
        group_size: int = 2,
        max_new_tokens: int = 12,
        drop_equal: bool = False,
        engine: Mapping[str, Any] | None = None,
        transport: Mapping[str, Any] | None = None,
        sync_timeout_s: float = 20.0,
        resumed: Scene | None = None,
        **loop: Any,
    ) -> None:
        """`resumed`: go on from the last checkpoint of a scene that has ended, in its folder."""
        self.folder: Path = folder / name if resumed is None else resumed.folder
        self.records = self.folder / "records"
        self.records.mkdir(parents=True, exist_ok=resumed is not None)
        self.max_new_tokens = max_new_tokens
        self.algorithm = AlgorithmConfig.model_validate(
            {"type": "grpo", "filters": {"drop_equal_rewards": drop_equal}}
        )
        sync = SyncConfig.model_validate(
            {
                "timeout_s": sync_timeout_s,
                "transport": {"type": "shm", "bucket_bytes": 128, **(transport or {})},
            }
        )
        rollout = RolloutConfig.model_validate(
            {
                "engine": {"type": ENGINE, "record_dir": str(self.records), **(engine or {})},
                "env": {
                    "type": "single_turn",
                    "reward": {
                        "type": "function",
                        "function": f"{__name__}:parity",
                        "run_in": "inline",
                    },
                },
                "sampling": {"max_new_tokens": max_new_tokens},
                "group_size": group_size,
            }
        )
        self.rollout = RolloutWorker.launch_async(
            cluster,
            name=f"rollout-{name}",
            placement=engines,
            threads=1,
            config=rollout,
            algorithm=self.algorithm,
            model=MODEL,
            sync=sync,
            seed=SEED,
            run_dir=str(self.folder),
        )
        transport_end = seated(sync.transport, rank=0, num_receivers=self.rollout.size)
        self.actor = RecordingActor.launch(
            cluster,
            name=f"actor-{name}",
            placement="0",
            threads=1,
            folder=str(self.folder),
            sync=sync.model_copy(update={"transport": transport_end}),
        )
        self.rollout.ready(DEADLINE_S)
        self.flow = Flow(
            jobs=Channel.create(cluster, f"jobs-{name}", capacity_items=100_000),
            rollouts=Channel.create(cluster, f"rollouts-{name}"),
            outcomes=Channel.create(cluster, f"outcomes-{name}", timeout_s=1e6),
        )
        config = LoopConfig(steps=steps, groups_per_step=groups_per_step, step_timeout_s=DEADLINE_S, **loop)
        self.feeder = Feeder.launch(
            cluster,
            name=f"feeder-{name}",
            placement="0",
            threads=1,
            prompts=PromptPlan(data=ArithmeticDataset.Config(digits=(1, 2)), loader=LoaderConfig(seed=SEED)),
            config=config,
            group_size=group_size,
        )
        self.fleet = Fleet(self.rollout, self.actor, self.flow, sync, config)
        self.run_folder: Run = (
            Run.create(name, root=self.folder / "runs") if resumed is None else resumed.run_folder
        )
        self.reports: list[StepReport] = []
        self.loop = Loop(
            config,
            Parts(
                fleet=self.fleet,
                flow=self.flow,
                feeder=self.feeder,
                train_step=self._train_step,
                evaluator=NoEvaluation(),  # type: ignore[arg-type]
                checkpoints=RunCheckpoints(
                    self.run_folder, {"actor": self.actor, "feeder": self.feeder}, 2, DEADLINE_S
                ),
            ),
            [self.reports.append],
        )
        if resumed is not None:
            assert self.loop.restore()

    def _train_step(self, plan: StepPlan) -> TrainedStep:
        trained: TrainedStep = self.actor.train(self.flow.rollouts, plan).wait(timeout_s=DEADLINE_S)[0]
        return trained

    def run(self) -> None:
        self.loop.run()

    def close(self) -> None:
        self.rollout.close(timeout_s=0.0)
        self.actor.close()
        self.feeder.close(timeout_s=0.0)  # where the run failed, it still waits for a batch

    # --- what happened ------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """The feeder's admission as it stands."""
        counts: dict[str, int] = self.feeder.counts().wait(timeout_s=DEADLINE_S)[0]
        return counts

    def trained(self) -> list[tuple[StepPlan, list[Sample]]]:
        return [pickle.loads(path.read_bytes()) for path in sorted(self.folder.glob("step-*.pickle"))]

    def said(self) -> dict[str, list[dict[str, Any]]]:
        """Completions of the engines by request id; several where a group was done again."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in self.records.glob("*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                found.setdefault(record["id"], []).append(record)
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.rollout.addresses()[rank].pid, signal.SIGKILL)
