"""The groups that every workflow of a language model has: engines with their environments, and the policy's trainer.

Called by the workflow files' `groups`. What else they need (a critic, scorers) they launch themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rill.errors import ConfigError
from rill.models.loading import ModelConfig, load_tokenizer, model_folder
from rill.runtime.group import WorkerGroup
from rill.workers.actor import ActorWorker
from rill.workers.env_worker import EnvWorker
from rill.workers.episodes import EpisodeSettings, FinishGroup
from rill.workers.rollout import RolloutWorker
from rill.workflows.launch import Launcher
from rill.workflows.rl_config import RLConfig


def launch_rollout(
    launch: Launcher, config: RLConfig, finish_group: FinishGroup
) -> WorkerGroup[RolloutWorker]:
    """The engines, and the processes of the environments where the recipe wants them apart."""
    if config.model.path and config.cluster.type == "local":
        model_folder(config.model.path)  # here, where a wrong path is one line and not a worker's traceback
    settings = episode_settings(config, finish_group, launch.run_dir)
    if num_env := config.rollout.env_workers:
        launch.beside(EnvWorker, "env", num_env, settings=settings)
    return launch(RolloutWorker, "rollout", settings=settings, sync=launch.sync)


def episode_settings(config: RLConfig, finish_group: FinishGroup, run_dir: str) -> EpisodeSettings:
    return EpisodeSettings(
        rollout=config.rollout,
        model=config.model,
        algorithm=config.algorithm,
        finish_group=finish_group,
        evals=config.eval.all_sets(config.data),
        seed=config.seed,
        journal=config.journal,
        run_dir=run_dir,
    )


def launch_actor(
    launch: Launcher, config: RLConfig, rollout: WorkerGroup[Any], *, has_critic: bool = False
) -> WorkerGroup[ActorWorker]:
    """The trainer of the policy. It is warm when this returns: the supervised steps of [sft] are done."""
    actor = launch.trainer(
        ActorWorker,
        rollout,
        config=config.trainer,
        algorithm=config.algorithm,
        teachers=config.teachers,
        has_critic=has_critic,
        run_dir=launch.run_dir,
    )
    launch.warm_up(actor, config.sft.steps, config.sft.data or config.data, config.sft, config.seed)
    return actor


def initial_model(launch: Launcher, config: RLConfig, actor: WorkerGroup[ActorWorker]) -> ModelConfig:
    """The policy as RL begins: the recipe's model, or what [sft] made of it, kept in the run folder."""
    if config.sft.steps == 0:
        return config.model
    folder = Path(launch.run_dir) / "initial_model"
    if not (launch.is_resumed and (folder / "config.json").exists()):
        actor.export(str(folder)).wait(timeout_s=config.loop.step_timeout_s)
    return ModelConfig(path=str(folder), tokenizer=config.model.tokenizer)


def require_same_tokenizer(policy: ModelConfig, other: ModelConfig) -> None:
    """Samples pass between models as tokens: one that reads them otherwise would score nonsense."""
    if load_tokenizer(policy).get_vocab() != load_tokenizer(other).get_vocab():
        raise ConfigError(
            f"the model {other.path or other.tokenizer!r} has another vocabulary than the policy's "
            f"{policy.path or policy.tokenizer!r}, whose tokens it would have to read: use one of the same family"
        )
