"""Advantage estimators by name; a new one is one file and one line here."""

from rill.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        # group-scoped
        "grpo": "rill.algorithms.advantages.grpo:GRPO",
        "dr_grpo": "rill.algorithms.advantages.dr_grpo:DrGRPO",
        "rloo": "rill.algorithms.advantages.rloo:RLOO",
        "opo": "rill.algorithms.advantages.opo:OPO",
        "remax": "rill.algorithms.advantages.remax:ReMax",
        "pass_at_k": "rill.algorithms.advantages.pass_at_k:PassAtK",
        "reward": "rill.algorithms.advantages.reward:Reward",
        # batch-scoped
        "gae": "rill.algorithms.advantages.gae:GAE",
        "reinforce_pp": "rill.algorithms.advantages.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "rill.algorithms.advantages.reinforce_pp_baseline:ReinforcePPBaseline",
    },
)
