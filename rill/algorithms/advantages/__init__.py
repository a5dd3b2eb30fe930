"""Advantage estimators by name; a new one is one file and one line here."""

from rill.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        "grpo": "rill.algorithms.advantages.grpo:GRPO",
        "dr_grpo": "rill.algorithms.advantages.dr_grpo:DrGRPO",
        "rloo": "rill.algorithms.advantages.rloo:RLOO",
    },
)
