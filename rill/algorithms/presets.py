"""Algorithms by name: what `algorithm = "dapo"` stands for, key by key.

A recipe may override any key; a part given with another `type` replaces the preset's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.registry import unknown_name_message

_CLIP = {"type": "clip", "clip_low": 0.2, "clip_high": 0.2}

PRESETS: dict[str, dict[str, Any]] = {
    # --- a group is its own baseline ---
    # arXiv 2402.03300; the paper's KL term is kl.coefficient = 0.04, off here as in most of today's runs
    "grpo": {"advantage": {"type": "grpo"}, "loss": _CLIP, "aggregation": "seq-mean-token-mean"},
    # Every token weighs the same in dr_grpo, rloo and remax, as in a sum over tokens, which max_grad_norm would cut at
    # every step. With a constant divisor: seq-mean-token-sum-norm and aggregation_constant = max_new_tokens
    # arXiv 2503.20783
    "dr_grpo": {"advantage": {"type": "dr_grpo"}, "loss": _CLIP, "aggregation": "token-mean"},
    # arXiv 2508.08221
    "lite_ppo": {"advantage": {"type": "grpo_batch_std"}, "loss": _CLIP, "aggregation": "token-mean"},
    # arXiv 2601.05242
    "gdpo": {"advantage": {"type": "gdpo"}, "loss": _CLIP, "aggregation": "token-mean"},
    # arXiv 2504.02546
    "gpg": {"advantage": {"type": "gpg"}, "loss": {"type": "reinforce"}, "aggregation": "token-mean"},
    # arXiv 2602.07078
    "otb": {"advantage": {"type": "optimal_token"}, "loss": _CLIP, "aggregation": "token-mean"},
    # arXiv 2511.14846, with the clipped surrogate
    "turn": {"advantage": {"type": "turn"}, "loss": _CLIP, "aggregation": "token-mean"},
    "return_to_go": {"advantage": {"type": "return_to_go"}, "loss": _CLIP, "aggregation": "token-mean"},
    "gigpo": {"advantage": {"type": "gigpo"}, "loss": _CLIP, "aggregation": "token-mean"},
    # arXiv 2503.14476; filters.overlong needs the run's length limit, so a recipe sets it
    "dapo": {
        "advantage": {"type": "grpo"},
        "loss": {"type": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token-mean",
        "filters": {"drop_equal_rewards": True},
    },
    # arXiv 2402.14740
    "rloo": {"advantage": {"type": "rloo"}, "loss": {"type": "reinforce"}, "aggregation": "token-mean"},
    # arXiv 2310.10505
    "remax": {"advantage": {"type": "remax"}, "loss": {"type": "reinforce"}, "aggregation": "token-mean"},
    # arXiv 2505.23585: strictly on-policy
    "opo": {"advantage": {"type": "opo"}, "loss": {"type": "reinforce"}, "aggregation": "token-mean"},
    "pass_at_k": {"advantage": {"type": "pass_at_k"}, "loss": _CLIP, "aggregation": "token-mean"},
    # --- other ratios, other clips ---
    # arXiv 2507.18071
    "gspo": {"advantage": {"type": "grpo"}, "loss": {"type": "gspo"}, "aggregation": "seq-mean-token-mean"},
    # arXiv 2506.13585
    "cispo": {"advantage": {"type": "grpo"}, "loss": {"type": "cispo"}, "aggregation": "token-mean"},
    # arXiv 2507.20673
    "gmpo": {"advantage": {"type": "grpo"}, "loss": {"type": "gmpo"}, "aggregation": "seq-mean-token-mean"},
    # arXiv 2505.22617
    "clip_cov": {"advantage": {"type": "grpo"}, "loss": {"type": "clip_cov"}, "aggregation": "token-mean"},
    "kl_cov": {"advantage": {"type": "grpo"}, "loss": {"type": "kl_cov"}, "aggregation": "token-mean"},
    # arXiv 2511.20347
    "sapo": {"advantage": {"type": "grpo"}, "loss": {"type": "sapo"}, "aggregation": "seq-mean-token-mean"},
    # arXiv 2602.04879
    "dppo": {"advantage": {"type": "grpo"}, "loss": {"type": "dppo"}, "aggregation": "token-mean"},
    # --- for stale samples ---
    # prime-rl: normalised by all tokens, no KL, no entropy
    "aipo": {
        "advantage": {"type": "grpo"},
        "loss": {"type": "aipo", "delta": 8.0},
        "aggregation": "token-mean",
    },
    # arXiv 2405.19107
    "dro": {"advantage": {"type": "dr_grpo"}, "loss": {"type": "dro"}, "aggregation": "token-mean"},
    # AReaL
    "decoupled_ppo": {
        "advantage": {"type": "grpo"},
        "loss": {"type": "decoupled"},
        "aggregation": "token-mean",
    },
    # --- with a critic, or over the batch ---
    # arXiv 1707.06347, with the KL penalty of RLHF in the reward
    "ppo": {
        "advantage": {"type": "gae", "gamma": 1.0, "lam": 0.95},
        "loss": _CLIP,
        "aggregation": "token-mean",
        "kl": {"coefficient": 0.001, "place": "reward", "estimator": "k1"},
    },
    # arXiv 2504.05118: start with trainer.critic_warmup = 50 (value pretraining)
    "vapo": {
        "advantage": {"type": "gae", "gamma": 1.0, "length_alpha": 0.05, "critic_lam": 1.0},
        "loss": {"type": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token-mean",
    },
    # arXiv 2501.03262
    "reinforce_pp": {
        "advantage": {"type": "reinforce_pp"},
        "loss": _CLIP,
        "aggregation": "token-mean",
        "kl": {"coefficient": 0.001, "place": "reward", "estimator": "k1"},
    },
    "reinforce_pp_baseline": {
        "advantage": {"type": "reinforce_pp_baseline"},
        "loss": _CLIP,
        "aggregation": "token-mean",
        "kl": {"coefficient": 0.001, "place": "loss", "estimator": "k2"},
    },
    # --- imitation and preference of one's own answers ---
    # arXiv 2304.06767
    "raft": {"advantage": {"type": "raft"}, "loss": {"type": "reinforce"}, "aggregation": "token-mean"},
    # arXiv 2402.04792
    "online_dpo": {
        "advantage": {"type": "online_dpo"},
        "loss": {"type": "reinforce"},
        "aggregation": "seq-mean-token-sum",
    },
    # --- from a teacher alone; add a baseline's advantage to mix with rewards ---
    "distill": {
        "advantage": {"type": "reward", "scale": 0.0},
        "loss": {"type": "reinforce"},
        "aggregation": "token-mean",
        "distillation": {"coefficient": 1.0, "form": "advantage"},
    },
}


def expand(value: Any) -> Any:
    """A name, or a mapping with `type`, as the full set of keys; anything else is left for validation to refuse."""
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        return value
    name = value.get("type", "grpo")
    if name not in PRESETS:
        raise ValueError(unknown_name_message("algorithm", str(name), PRESETS))
    return _merged(PRESETS[name], {**value, "type": name})


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, str) and isinstance(below, Mapping) and "type" in below:
            value = {"type": value}
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_part(below, value):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _same_part(below: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return "type" not in over or over["type"] == below.get("type")
