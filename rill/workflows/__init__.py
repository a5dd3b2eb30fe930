"""Workflows: who produces what and who consumes it, assembled from the parts of the rooms below."""

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
        "sft": "rill.workflows.sft:SFTWorkflow",
        "reward_model": "rill.workflows.preference:RewardModelWorkflow",
        "dpo": "rill.workflows.preference:DPOWorkflow",
    },
)


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
