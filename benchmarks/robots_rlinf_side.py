"""RLinf's side of robots_rlinf.py, which starts it and says in its own text what is compared and what is changed here.

Runs with the Python of RLinf's own environment as `python -c "import robots_rlinf_side; robots_rlinf_side.main()"`, the
task as JSON on standard input: RLinf's processes import this file by its name. Imports nothing of rill.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

import gymnasium
import psutil

# Its environment of state observations (D4RLEnv) and its vector environment ask for gym, which gymnasium replaced, and
# for d4rl, which registers D4RL's own tasks there. They take gymnasium's five values of a step as well.
sys.modules.setdefault("gym", gymnasium)
sys.modules.setdefault("d4rl", ModuleType("d4rl"))

import torch  # noqa: E402
from omegaconf import OmegaConf  # type: ignore[import-not-found] # noqa: E402
from rlinf.config import validate_cfg  # type: ignore[import-not-found] # noqa: E402
from rlinf.hybrid_engines.fsdp.strategy import fsdp  # type: ignore[import-not-found] # noqa: E402
from rlinf.runners.embodied_runner import EmbodiedRunner  # type: ignore[import-not-found] # noqa: E402
from rlinf.scheduler import Cluster  # type: ignore[import-not-found] # noqa: E402
from rlinf.scheduler.worker import worker  # type: ignore[import-not-found] # noqa: E402
from rlinf.utils.placement import HybridComponentPlacement  # type: ignore[import-not-found] # noqa: E402
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # type: ignore[import-not-found] # noqa: E402
from rlinf.workers.env.env_worker import EnvWorker  # type: ignore[import-not-found] # noqa: E402
from rlinf.workers.rollout.hf.huggingface_worker import (  # type: ignore[import-not-found] # noqa: E402
    MultiStepRolloutWorker,
)


class Stream:
    def synchronize(self) -> None:
        pass


class Processor:
    """What RLinf asks torch.cuda for, where there is none: a device called cpu and nothing to wait for."""

    def current_device(self) -> str:
        return "cpu"

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def set_device(self, device: Any) -> None:
        pass

    def nothing(self) -> None:
        pass

    synchronize = empty_cache = ipc_collect = nothing


class Unsharded(fsdp.FSDP):  # type: ignore[misc]
    """Its FSDP on the CPU in place of the GPU with the number of the process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        here = {"device_id": torch.device("cpu"), "sync_module_states": False}
        super().__init__(*args, **{**options, **here})


worker.AcceleratorUtil.get_torch_platform = staticmethod(lambda kind: Processor())
worker.AcceleratorUtil.get_device_type = staticmethod(lambda kind: "cpu")
fsdp.FSDP = Unsharded


# Classes of this file, so that RLinf's processes import it.
class Actor(EmbodiedFSDPActor):  # type: ignore[misc]
    pass


class Rollout(MultiStepRolloutWorker):  # type: ignore[misc]
    pass


class Env(EnvWorker):  # type: ignore[misc]
    pass


ALGORITHM = {
    "update_epoch": 1,
    "normalize_advantages": True,
    "kl_penalty": "kl",
    "group_size": 1,
    "reward_type": "action_level",
    "logprob_type": "action_level",
    "entropy_type": "action_level",
    "adv_type": "gae",
    "loss_type": "actor_critic",
    "loss_agg_func": "token-mean",
    "bootstrap_type": "standard",
    "kl_beta": 0.0,
    "entropy_bonus": 0,
    "clip_ratio_high": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_c": 3.0,
    "value_clip": 1.0,
    "huber_delta": 10.0,
    "gamma": 0.99,
    "gae_lambda": 0.95,
}
FSDP_CONFIG = {
    "strategy": "fsdp",
    "sharding_strategy": "no_shard",
    "gradient_checkpointing": False,
    "cpu_offload": False,
    "offload_pin_memory": False,
    "reshard_after_forward": True,
    "enable_gradient_accumulation": True,
    "forward_prefetch": False,
    "limit_all_gathers": False,
    "backward_prefetch": None,
    "use_orig_params": False,
    "use_liger_kernel": False,
    "mixed_precision": {"param_dtype": "32", "reduce_dtype": "32", "buffer_dtype": "32"},
    "amp_autocast": {"enabled": False, "precision": "bf16"},
    "grad_scaler": {"enabled": False},
}
OPTIM = {
    "lr": 3.0e-4,
    "value_lr": 3.0e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1.0e-8,
    "weight_decay": 0.01,
    "clip_grad": 0.5,
}
WEIGHT_SYNCER = {
    "type": "bucket",
    "bucket": {
        "bucket_size": 536870912,
        "bucket_dtype": None,
        "bucket_device": "cpu",
        "is_agent": False,
        "load_instant": True,
    },
}


def environments_of(task: dict[str, Any]) -> dict[str, Any]:
    return {
        "env_type": "d4rl",
        "task_name": task["id"],
        "rollout_epoch": 1,
        "total_num_envs": task["envs"],
        "group_size": 1,
        "max_episode_steps": task["episode"],
        "max_steps_per_rollout_epoch": task["episode"],
        "seed": 0,
        "auto_reset": True,
        "ignore_terminations": False,
        "use_rel_reward": False,
        "use_subproc_vector_env": task["processes"],
        "use_fixed_reset_state_ids": False,
        "use_ordered_reset_state_ids": False,
        "specific_reset_id": None,
        "is_eval": False,
        "video_cfg": {"save_video": False, "video_base_dir": task["folder"]},
    }


def config_of(task: dict[str, Any]) -> Any:
    """As examples/embodiment/config/maniskill_ppo_mlp.yaml of its repository, v0.3, but for what the task says."""
    num_rows = task["envs"] * task["episode"]
    return OmegaConf.create(
        {
            "cluster": {"num_nodes": 1, "component_placement": {"env,rollout,actor": 0}},
            "runner": {
                "task_type": "embodied",
                "logger": {
                    "log_path": task["folder"],
                    "project_name": "rlinf",
                    "experiment_name": "robots",
                    "logger_backends": ["tensorboard"],
                },
                "max_epochs": task["iterations"],
                "max_steps": -1,
                "only_eval": False,
                "val_check_interval": -1,
                "save_interval": -1,
                "weight_sync_interval": 1,
                "resume_dir": None,
                "ckpt_path": None,
            },
            "algorithm": ALGORITHM,
            "env": {
                "group_name": "EnvGroup",
                "train": environments_of(task),
            },
            "rollout": {
                "group_name": "RolloutGroup",
                "backend": "huggingface",
                "enable_offload": False,
                "pipeline_stage_num": task["stages"],
                "model": {"model_path": "", "precision": "32"},
                "enable_torch_compile": task["compile"],
                "enable_cuda_graph": False,
            },
            "actor": {
                "group_name": "ActorGroup",
                "training_backend": "fsdp",
                "micro_batch_size": num_rows // task["mini_batches"],
                "global_batch_size": num_rows // task["mini_batches"],
                "seed": 1234,
                "enable_offload": False,
                "model": {
                    "model_type": "mlp_policy",
                    "model_path": "",
                    "policy_setup": "panda-qpos",
                    "obs_dim": task["state_size"],
                    "action_dim": task["action_size"],
                    "num_action_chunks": 1,
                    "hidden_dim": 256,
                    "precision": "32",
                    "add_value_head": True,
                    "is_lora": False,
                    "lora_rank": 32,
                },
                "optim": OPTIM,
                "fsdp_config": FSDP_CONFIG,
            },
            "weight_syncer": WEIGHT_SYNCER,
            "reward": {"use_reward_model": False},
            "critic": {"use_critic_model": False},
        }
    )


def cpu_s() -> float:
    """Of this process and all that it has started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


class TimedRunner(EmbodiedRunner):  # type: ignore[misc]
    """Notes when an iteration is over, where RLinf itself logs it."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.ends_s: list[float] = []
        self.spent_s: list[float] = []

    def _log_step_metrics(self, **told: Any) -> None:
        super()._log_step_metrics(**told)
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) in (1, self.max_steps):
            self.spent_s.append(cpu_s())


def main() -> None:
    task = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        config = validate_cfg(config_of(task))
        cluster = Cluster(cluster_cfg=config.cluster, distributed_log_dir=config.runner.per_worker_log_path)
        placed = HybridComponentPlacement(config, cluster)
        groups = {
            name: kind.create_group(config).launch(
                cluster, name=config[name].group_name, placement_strategy=placed.get_strategy(name)
            )
            for name, kind in (("actor", Actor), ("rollout", Rollout), ("env", Env))
        }
        runner = TimedRunner(cfg=config, **groups)
        runner.init_workers()
        runner.run()
    print(json.dumps({"ends_s": runner.ends_s, "cpu_s": runner.spent_s}), flush=True)
    os._exit(0)  # its own shutdown takes long, and Ray's processes end with their driver
