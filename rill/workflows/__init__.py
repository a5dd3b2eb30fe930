"""Workflows: who produces what and who consumes it. What runs inside the processes is in rill.workers.

The room in the order of its story; docs/design.md follows one sample through it.

    grpo, ppo, embodied                the algorithms: their groups, and one step
    language, robots                   the groups that several have; the policy of a robot's recipe
    supervised                         those that learn from rows and not from samples of their own: sft, dpo …
    config, rl_config, robot_config    the recipe
    workflow, launch, session          a cluster with all groups, and what the driver knows of them; the next session
                                       where a trainer is lost
    flow                               the lines of a step as calls, channels and chunks
    loop, steering                     step after step; what may be changed between two of them
    staleness, controller              which groups are begun, kept, batched
    evaluation                         held-out figures
    fleet                              engines that are lost, come and go
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.config import Config
from rill.config.base import config_of
from rill.errors import ConfigError
from rill.registry import Registry, unknown_name_message

WORKFLOWS = Registry(
    "workflow",
    {
        "grpo": "rill.workflows.grpo:GRPO",
        "ppo": "rill.workflows.ppo:PPO",
        "embodied": "rill.workflows.embodied:Embodied",
        "sft": "rill.workflows.supervised:SFTWorkflow",
        "reward_model": "rill.workflows.supervised:RewardModelWorkflow",
        "dpo": "rill.workflows.supervised:DPOWorkflow",
    },
)

PRELOAD = (
    "rill.workers.rollout",
    "rill.workers.actor",
    "rill.workflows.controller",
    "rill.inference.native.engine",
    "rill.envs.single_turn",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Imported once, by the process that workers are forked from: seconds for every worker after the first, and for every
one that is lost. `transformers` alone imports next to nothing, and an optimizer imports the compiler."""


def recipe_schema(values: Mapping[str, Any], source: str = "recipe") -> type[Config]:
    """The Config a recipe is checked against: that of the workflow it names in its `workflow` key."""
    name = values.get("workflow")
    if name is None:
        choices = ", ".join(sorted(WORKFLOWS))
        raise ConfigError(
            f'{source}: missing the key `workflow`, such as workflow = "grpo": one of {choices}'
        )
    if not isinstance(name, str) or (name not in WORKFLOWS and ":" not in name):
        raise ConfigError(f"{source}: {unknown_name_message('workflow', str(name), WORKFLOWS)}")
    return config_of(WORKFLOWS, name, Config)
