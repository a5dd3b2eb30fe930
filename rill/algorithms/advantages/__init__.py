"""Advantage estimators by name; a new one is one file and one line here."""

from rill.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        # one number to an episode
        "grpo": "rill.algorithms.advantages.grpo:GRPO",
        "dr_grpo": "rill.algorithms.advantages.dr_grpo:DrGRPO",
        "rloo": "rill.algorithms.advantages.rloo:RLOO",
        "opo": "rill.algorithms.advantages.opo:OPO",
        "remax": "rill.algorithms.advantages.remax:ReMax",
        "pass_at_k": "rill.algorithms.advantages.pass_at_k:PassAtK",
        "reward": "rill.algorithms.advantages.reward:Reward",
        "raft": "rill.algorithms.advantages.raft:RAFT",
        # over the tokens of a group
        "turn": "rill.algorithms.advantages.turn:Turn",
        "return_to_go": "rill.algorithms.advantages.return_to_go:ReturnToGo",
        "gigpo": "rill.algorithms.advantages.gigpo:GiGPO",
        "optimal_token": "rill.algorithms.advantages.optimal_token:OptimalToken",
        "online_dpo": "rill.algorithms.advantages.online_dpo:OnlineDPO",
        # over the batch
        "grpo_batch_std": "rill.algorithms.advantages.grpo_batch_std:GRPOBatchStd",
        "gdpo": "rill.algorithms.advantages.gdpo:GDPO",
        "gpg": "rill.algorithms.advantages.gpg:GPG",
        "gae": "rill.algorithms.advantages.gae:GAE",
        "reinforce_pp": "rill.algorithms.advantages.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "rill.algorithms.advantages.reinforce_pp_baseline:ReinforcePPBaseline",
    },
)
