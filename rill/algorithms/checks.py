"""What a batch must be before any formula sees it: whole, finite on trained tokens, harmless elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch
from rill.algorithms.base import TokenBatch
from rill.errors import InvalidSampleError, TrainingError

AnyBatch = TypeVar("AnyBatch", TokenBatch, AdvantageBatch)


def sanitised(batch: AnyBatch, *, check_finite: bool) -> AnyBatch:
    """Every per-token float field in full precision and 0 where the mask is 0; sizes and finiteness checked."""
    num_tokens = batch.mask_N.numel()
    is_on_N = batch.mask_N > 0
    clean: dict[str, Any] = {"mask_N": is_on_N.to(full_precision(batch.mask_N).dtype)}
    for field in fields(batch):
        values = getattr(batch, field.name)
        if not field.name.endswith("_N") or values is None:
            continue
        if values.shape != (num_tokens,):
            raise TrainingError(
                f"{field.name} has shape {tuple(values.shape)}, the mask has {num_tokens} tokens"
            )
        if field.name not in ("mask_N", "seq_N", "turn_N", "anchor_N"):
            clean[field.name] = zero_unless(is_on_N, full_precision(values))
    if check_finite:
        require_finite(clean)
    return replace(batch, **clean)


def checked_advantage_batch(batch: AdvantageBatch) -> AdvantageBatch:
    """Sanitised, and with what no later formula could notice refused: lost rewards, interleaved sequences."""
    for name in ("rewards_S", "greedy_rewards_S", "group_S", "episode_S", "lengths_S"):
        values_S: Tensor | None = getattr(batch, name)
        if values_S is None:
            continue
        if values_S.numel() != batch.num_seqs:
            raise InvalidSampleError(f"{name} has {values_S.numel()} entries for {batch.num_seqs} sequences")
        if not bool(torch.isfinite(values_S).all()):
            raise InvalidSampleError(f"{name} must be finite, got NaN or infinity: mend the reward function")
    _check_sequences(batch.seq_N, batch.num_seqs)
    if batch.token_rewards_N is not None and bool((batch.token_rewards_N[batch.mask_N == 0] != 0).any()):
        raise InvalidSampleError(
            "a reward lies on an untrained token and would be lost: move it to a trained one"
        )
    clean = sanitised(batch, check_finite=True)
    return replace(clean, rewards_S=full_precision(batch.rewards_S).to(clean.mask_N))


def _check_sequences(seq_N: Tensor, num_seqs: int) -> None:
    if not seq_N.numel():
        return
    if int(seq_N.min()) < 0 or int(seq_N.max()) >= num_seqs:
        raise InvalidSampleError(
            f"seq_N must lie in [0, {num_seqs}), got {int(seq_N.min())} to {int(seq_N.max())}"
        )
    if bool((seq_N[1:] < seq_N[:-1]).any()):
        raise InvalidSampleError("sequences must lie one after another in the flat batch, by their numbers")


def require_finite(named: Mapping[str, Tensor]) -> None:
    """One synchronisation when all is well; names the culprits when not."""
    checks = torch.stack([torch.isfinite(values.detach()).all() for values in named.values()])
    if bool(checks.all()):
        return
    counts = {name: int((~torch.isfinite(values.detach())).sum()) for name, values in named.items()}
    bad = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    raise TrainingError(f"NaN or infinity on trained tokens ({bad}): the update is refused")


def required(batch: TokenBatch | AdvantageBatch, name: str) -> Tensor:
    """An optional field that this algorithm cannot do without."""
    values: Tensor | None = getattr(batch, name)
    if values is None:
        raise TrainingError(f"this algorithm needs {name} and the batch has none: see Algorithm.needs")
    return values


def full_precision(values: Tensor) -> Tensor:
    """float64 stays; half precision and integers become float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def zero_unless(is_on_N: Tensor, values_N: Tensor) -> Tensor:
    """`where`, not a product: a masked NaN must reach neither the sum nor the gradient."""
    return torch.where(is_on_N, values_N, torch.zeros_like(values_N))
