"""The real loop, channels, controller, fleet and workers around a scripted engine and a trainer that only records.

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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from rill.journal.checkpoints import RunCheckpoints
from rill.models.loading import ModelConfig
from rill.runtime.cluster import Cluster
from rill.telemetry.run import Run
from rill.training.parallel import World
from rill.types import PolicyVersion, Prompt, Sample, Trajectory
from rill.weights import Canary, CanaryProof, Publisher, SealedManifest, open_publisher, seated
from rill.weights.publishing import PublishingWorker
from rill.workers.config import SyncConfig
from rill.workers.edges import Edge
from rill.workers.env_worker import EnvWorker
from rill.workers.rollout import RolloutWorker
from rill.workflows.controller import Controller
from rill.workflows.fleet import Fleet
from rill.workflows.flow import Flow
from rill.workflows.grpo import GRPO, finish_group
from rill.workflows.language import episode_settings
from rill.workflows.loop import Loop, StepReport
from rill.workflows.session import Session
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
DEADLINE_S = 180.0


def parity(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A reward that a test can compute again from the tokens."""
    return float(int(trajectory.token_ids[trajectory.loss_mask].sum()) % 3 == 0)


class RecordingActor(PublishingWorker):
    """An actor whose training is a file: the samples of every step, chunk by chunk, as they came."""

    publisher: Publisher

    def __init__(self, *, folder: str, sync: SyncConfig) -> None:
        self.folder = Path(folder)
        self.publisher = open_publisher(sync.transport)
        self.world = World(None, torch.device("cpu"))
        self.value = 0.0

    def close(self) -> None:
        self.publisher.close()

    def num_shares(self) -> int:
        return 1

    def _train(self, source: Edge, version: PolicyVersion) -> Mapping[str, float]:
        parts = [(part.chunk, part.samples()) for part in source.parts(self, self.world)]
        path = self.folder / f"step-{parts[0][0].step:04d}.pickle"
        assert not path.exists(), f"step {parts[0][0].step} was trained twice"
        path.write_bytes(pickle.dumps((version, parts)))
        return {}

    @property
    def device_lock(self) -> Any:
        """None: engines that run ahead hold the devices for the whole run."""
        return nullcontext

    def _gather(self, version: PolicyVersion) -> SealedManifest:
        self.value = float(version)
        tensors = {"a": torch.zeros(64), WEIGHT: torch.tensor(self.value), "z": torch.ones(64)}
        manifest = self.publisher.publish(tensors.items(), version)
        canary = Canary.random(100)
        return manifest.seal(CanaryProof(canary=canary, expected=scores(self.value, canary.sequences)))

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)

    def wait_saved(self, timeout_s: float) -> None: ...

    def load(self, folder: str) -> None: ...


class TrainedBatch(NamedTuple):
    """What reached the loss in one step."""

    version: PolicyVersion
    indices: list[int]
    samples: list[Sample]
    chunks: list[int]
    """Groups of each."""


class Scene:
    """One run. Its groups are launched on the given cluster under names of their own."""

    alive: ClassVar[list[Scene]] = []
    """What a test has left to be closed (the `cluster` fixture does)."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        *,
        name: str = "a",
        engines: str = "0",
        steps: int = 4,
        prompts_per_step: int = 3,
        group_size: int = 2,
        max_new_tokens: int = 12,
        drop_equal: bool = False,
        engine: Mapping[str, Any] | None = None,
        transport: Mapping[str, Any] | None = None,
        sync_timeout_s: float = 20.0,
        env_workers: int = 0,
        granularity: int = 0,
        evals: int = 0,
        resumed: Scene | None = None,
        **loop: Any,
    ) -> None:
        """`resumed`: go on from the last checkpoint of a scene that has ended, in its folder."""
        self.folder: Path = folder / name if resumed is None else resumed.folder
        self.records = self.folder / "records"
        self.records.mkdir(parents=True, exist_ok=resumed is not None)
        self.max_new_tokens = max_new_tokens
        data = {"type": "arithmetic", "digits": [1, 2]}
        self.config = GRPO.Config.model_validate(
            {
                "seed": SEED,
                "model": MODEL,
                "data": data,
                "algorithm": {"type": "grpo", "filters": {"drop_equal_rewards": drop_equal}},
                "trainer": {},
                "rollout": {
                    "engine": {"type": ENGINE, "record_dir": str(self.records), **(engine or {})},
                    "env": {
                        "type": "single_turn",
                        "reward": {
                            "type": "function",
                            "function": f"{__name__}:parity",
                            "run_in": "inline",
                        },
                    },
                    "env_workers": env_workers,
                    "sampling": {"max_new_tokens": max_new_tokens},
                    "group_size": group_size,
                },
                "loop": {
                    "steps": steps,
                    "prompts_per_step": prompts_per_step,
                    "step_timeout_s": DEADLINE_S,
                    **loop,
                },
                "eval": {"num_prompts": 0, "every": 0, "sets": self._eval_sets(data, evals)},
                "flow": {"granularity": granularity},
                "journal": {"delay_s": 0.02},
                "sync": {
                    "timeout_s": sync_timeout_s,
                    "transport": {"type": "shm", "bucket_bytes": 128, **(transport or {})},
                },
            }
        )
        sync = self.config.sync
        settings = episode_settings(self.config, finish_group, str(self.folder))
        self.rollout = RolloutWorker.launch_async(
            cluster, name=f"rollout-{name}", placement=engines, threads=1, settings=settings, sync=sync
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
        self.controller = Controller.launch(
            cluster,
            name=f"controller-{name}",
            placement="0",
            threads=1,
            config=self.config,
            run_dir=str(self.folder),
        )
        self.env = None
        if env_workers:
            self.env = EnvWorker.launch(
                cluster, name=f"env-{name}", placement=[0] * env_workers, threads=1, settings=settings
            )
        Scene.alive.append(self)
        self.run_folder: Run = (
            Run.create(name, root=self.folder / "runs") if resumed is None else resumed.run_folder
        )
        session = Session(self.config, self.run_folder, cluster, f"-{name}")
        session.groups = {"rollout": self.rollout, "actor": self.actor, "controller": self.controller}
        if self.env is not None:
            session.groups["env"] = self.env
        session.reseat()
        self.flows = session.flows
        self.fleet = Fleet(session)
        self.reports: list[StepReport] = []
        self.checkpoints = RunCheckpoints(
            self.run_folder, {"actor": self.actor, "controller": self.controller}, 2, DEADLINE_S
        )
        self.loop = Loop(Flow(self.fleet), self.step, self.checkpoints, [self.reports.append])
        if resumed is not None:
            self.loop.restore()
        self.controller.start(self.flows).wait(timeout_s=DEADLINE_S)

    def step(self, flow: Flow) -> None:
        batch = flow.select(flow.sample(self.rollout))
        flow.update(self.actor, batch)

    def _eval_sets(self, data: Mapping[str, Any], num_prompts: int) -> list[dict[str, Any]]:
        chosen = {"name": "sums", "data": data, "num_prompts": num_prompts, "samples": 2, "temperature": 1.0}
        return [chosen] if num_prompts else []

    def run(self) -> None:
        with self.checkpoints:
            self.loop.run()

    def close(self) -> None:
        self.rollout.close(timeout_s=0.0)
        if self.env is not None:
            self.env.close(timeout_s=0.0)
        self.actor.close(timeout_s=0.0)
        self.controller.close(timeout_s=0.0)  # where the run failed, it still waits for a batch

    # --- what happened ------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state, as the controller has them."""
        counts: dict[str, int] = self.controller.counts().wait(timeout_s=DEADLINE_S)[0]
        return counts

    def relaunches(self) -> list[int]:
        return [self.fleet._engines.num_relaunches[rank] for rank in self.rollout.ranks]

    def trained(self) -> list[TrainedBatch]:
        found = []
        for path in sorted(self.folder.glob("step-*.pickle")):
            version, parts = pickle.loads(path.read_bytes())
            indices = [index for chunk, _ in parts for index in chunk.indices_G.tolist()]
            samples = [sample for _, part in parts for sample in part]
            found.append(TrainedBatch(version, indices, samples, [len(c.indices_G) for c, _ in parts]))
        return found

    def said(self) -> dict[str, list[dict[str, Any]]]:
        """Completions of the engines by episode; several where a group was done again."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in self.records.glob("*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                found.setdefault(record["id"].partition("#")[0], []).append(record)
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.rollout.addresses()[rank].pid, signal.SIGKILL)
