"""What every RL workflow needs before its loop can start: its recipe's shared tables, a cluster, prompts, channels.

A workflow's own file then only says who produces what and who consumes it.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import model_validator

from rill.algorithms import AlgorithmConfig
from rill.config import Config, OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_dataset, open_indexed, prompts_of
from rill.data.loader import LoaderConfig, PromptSource, open_loader
from rill.models.loading import ModelConfig
from rill.runtime.cluster import Cluster
from rill.telemetry.run import Run
from rill.training.policy import PolicyTrainer
from rill.types import Prompt
from rill.workflows.rollout import RolloutConfig
from rill.workflows.sections import ClusterConfig, EvalConfig, LoopConfig, SyncConfig, WarmupConfig


class RLConfig(Config):
    """The tables that all RL recipes have. `model` is handed to every part that does not name its own."""

    workflow: str
    seed: int = 0
    """Decides prompts' order, sampling and fresh weights; the same seed and plan give the same run."""
    model: ModelConfig
    data: Annotated[PartConfig, OneOf(DATASETS)]
    """Problems to learn from; its held-out side is the evaluation's."""
    loader: LoaderConfig = LoaderConfig()
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    trainer: PolicyTrainer.Config
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    warmup: WarmupConfig = WarmupConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, values: Any) -> Any:
        """Fill what is said once at the top into the parts that need it."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        model, seed = values.get("model"), values.get("seed")
        rollout = values["rollout"] = _as_table(values.get("rollout", {}))
        engine = rollout["engine"] = _as_table(rollout.get("engine", "native"))
        trainer = values["trainer"] = _as_table(values.get("trainer", {}))
        if model is not None:
            engine.setdefault("model", model)
            trainer.setdefault("model", model)
        sampling = rollout.get("sampling")
        if isinstance(sampling, dict) and sampling.get("temperature"):
            trainer.setdefault("temperature", sampling["temperature"])
        if seed is not None:
            values["loader"] = {"seed": seed, **_as_table(values.get("loader", {}))}
        return values

    @model_validator(mode="after")
    def _temperatures_agree(self) -> RLConfig:
        sampled, trained = self.rollout.sampling.temperature, self.trainer.temperature
        if sampled != trained:
            raise ValueError(
                f"rollout.sampling.temperature is {sampled} and trainer.temperature is {trained}: the trainer must "
                "recompute log-probabilities at the sampler's temperature; leave trainer.temperature unset"
            )
        return self


def open_cluster(config: ClusterConfig, run: Run) -> Cluster:
    devices = config.devices or "auto"
    folders = {"trace_dir": run.path, "log_dir": run.path / "logs"}
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, **folders)
    return Cluster(devices=devices, **folders)


def threads_of(config: ClusterConfig, cluster: Cluster) -> int:
    """Threads for each worker: the cores, divided among the device slots, since sharers of a slot take turns."""
    return config.threads or max(1, (os.cpu_count() or 1) // max(1, len(cluster.devices)))


def open_prompts(config: RLConfig) -> PromptSource:
    return open_loader(open_dataset(config.data, Split.TRAIN), config.loader)


def held_out_prompts(config: RLConfig) -> list[Prompt]:
    dataset = open_indexed(config.data, Split.HELD_OUT)
    return list(prompts_of(dataset, config.eval.num_prompts))


def _as_table(value: Any) -> Any:
    """A copy that may be written to; a bare name is short for a table with that `type`."""
    if isinstance(value, str):
        return {"type": value}
    return dict(value) if isinstance(value, dict) else value
