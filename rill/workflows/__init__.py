"""Workflows: who produces what and who consumes it, assembled from the parts of the rooms below.

The room in the order of its story; docs/design.md follows one sample through it.

    grpo, ppo, embodied, language      the algorithms: their groups, and one step
    supervised                         those that learn from rows and not from samples of their own: sft, dpo …
    config, rl_config                  the recipe
    workflow, launch, session          a cluster with all groups, and what the driver knows of them; the next session
                                       where a trainer is lost
    flow, edges, records               the lines of a step as calls, channels and chunks
    loop, steering                     step after step; what may be changed between two of them
    staleness, controller              which groups are begun, kept, batched
    episodes                           a task from prompt to outcome
    rollout, env_worker                the processes where engines and environments run
    fleet                              engines that are lost, come and go
    scorers, learners, actor           what is added to samples on their way, and what learns from them
    evaluation                         held-out figures
    robots/                            what an embodied run has of its own
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
    "rill.workflows.rollout",
    "rill.workflows.actor",
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
