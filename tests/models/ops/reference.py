"""Attention of one sequence, written out in float32 at least: what kernels are held against."""

from __future__ import annotations

import torch

from rill.models.eager import ScoreRule


def attend_one(
    query_QHD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Causal attention of the last Q of T tokens."""
    num_queries, num_heads, _ = query_QHD.shape
    wide = torch.promote_types(query_QHD.dtype, torch.float32)
    key_THD, value_THD = (
        x.to(wide).repeat_interleave(num_heads // x.shape[1], dim=1) for x in (key_TKD, value_TKD)
    )
    score_HQT = torch.einsum("qhd,thd->hqt", query_QHD.to(wide), key_THD) * rule.scale
    if rule.softcap:
        score_HQT = rule.softcap * torch.tanh(score_HQT / rule.softcap)
    at_T = torch.arange(len(key_TKD), device=query_QHD.device)
    ahead_QT = at_T - at_T[-num_queries:, None]
    hidden_QT = (ahead_QT > 0) | (ahead_QT <= -(rule.window or len(at_T)))
    score_HQT = score_HQT.masked_fill(hidden_QT, float("-inf"))
    if rule.sinks_H is not None:
        sink_HQ1 = rule.sinks_H.to(wide)[:, None, None].expand(-1, num_queries, 1)
        score_HQT = torch.cat((score_HQT, sink_HQ1), dim=-1)
    share_HQT = score_HQT.softmax(-1)[..., : len(key_TKD)]
    return torch.einsum("hqt,thd->qhd", share_HQT, value_THD).to(query_QHD.dtype)
