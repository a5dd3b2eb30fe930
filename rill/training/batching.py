"""Between samples and packs: validation, micro-batches that all ranks agree on, and gathering results.

Callers: the trainers and ScoreModel. Ranks of a sharded model must run the same number of passes; a rank with less
to do runs an idle pack (two tokens, weight zero) to keep step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rill.algorithms.base import Metric
from rill.errors import InvalidSampleError
from rill.models.train.packed_layout import copy_in
from rill.training.packing import (
    Pack,
    PackSequence,
    build_pack,
    plan_micro_batches,
    plan_sharing_micro_batches,
    plan_units,
)
from rill.training.parallel import World
from rill.types import Floats, TokenIds, Trajectory

_CUDA_ROW_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One pass: the pack and which sequences it holds. An idle one holds none and must weigh nothing."""

    pack: Pack
    indices: tuple[int, ...]

    @property
    def is_idle(self) -> bool:
        return not self.indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """How this trainer makes packs."""

    world: World
    use_flash: bool
    """Lay packs out for the GPU's attention kernels, not for padded batches."""
    micro_batch_tokens: int
    vocab_size: int
    share_prefixes: bool = False
    skips_too_long: bool = False
    """What does not fit is left without results where others are asked for theirs; else it is an error."""

    def micro_batches(
        self, sequences: Sequence[PackSequence], units: Sequence[Sequence[int]] | None = None
    ) -> Iterator[MicroBatch]:
        """All sequences, in as many passes as the busiest rank needs. `units` are kept together in one pass.

        A rank that could do with fewer spreads its share over as many: passes of unequal size on two ranks cost both
        the longer one.
        """
        bins = self._plan(sequences, units)
        num_passes = self._agreed(len(bins))
        if len(bins) < num_passes:
            bins = self._plan(sequences, units, at_least=num_passes)
        for number in range(num_passes):
            indices = tuple(bins[number]) if number < len(bins) else ()
            yield MicroBatch(pack=self.pack([sequences[i] for i in indices] or [_IDLE]), indices=indices)

    def _plan(
        self, sequences: Sequence[PackSequence], units: Sequence[Sequence[int]] | None, *, at_least: int = 1
    ) -> list[list[int]]:
        budget = self.micro_batch_tokens
        if units is None and self.share_prefixes:
            return plan_sharing_micro_batches(sequences, budget, at_least=at_least)
        if units is None:
            return plan_micro_batches([s.num_tokens for s in sequences], budget, at_least=at_least)
        costs = [sum(sequences[i].num_tokens for i in unit) for unit in units]
        return plan_units(units, costs, budget, at_least=at_least)

    def pack(self, sequences: Sequence[PackSequence]) -> Pack:
        return build_pack(
            sequences,
            device=self.world.device,
            use_flash=self.use_flash,
            share_prefixes=self.share_prefixes,
            context=self.world.context(),
            pad_to_multiple=_CUDA_ROW_MULTIPLE if self.world.device.type == "cuda" else 1,
        )

    def per_token(self, sequences: Sequence[PackSequence], compute: Callable[[Pack], Tensor]) -> list[Floats]:
        """compute(pack) → [K] without gradients; the result of every sequence, 0 where nothing was wanted."""
        (results,) = self.per_token_columns(sequences, lambda pack: (compute(pack),), num_columns=1)
        return results

    def per_token_columns(
        self,
        sequences: Sequence[PackSequence],
        compute: Callable[[Pack], tuple[Tensor, ...]],
        *,
        num_columns: int,
    ) -> list[list[Floats]]:
        """per_token for several results of one pass: [column][sequence]."""
        fitting = [i for i, s in enumerate(sequences) if self.fits(s)]
        results: list[list[Floats]] = [
            [np.zeros(s.num_tokens, dtype=np.float32) for s in sequences] for _ in range(num_columns)
        ]
        done: list[tuple[MicroBatch, list[Tensor]]] = []
        with torch.no_grad():
            for batch in self.micro_batches([sequences[i] for i in fitting]):
                columns = [gather_context(x_K, batch.pack, self.world) for x_K in compute(batch.pack)]
                if not batch.is_idle:
                    done.append((batch, columns))
        for batch, columns in done:
            for column, values_K in enumerate(columns):
                values = values_K.float().cpu().numpy()
                offset = 0
                for index in batch.indices:
                    wanted = sequences[fitting[index]].wanted
                    count = int(np.count_nonzero(wanted))
                    results[column][fitting[index]][wanted] = values[offset : offset + count]
                    offset += count
        return results

    def fits(self, sequence: PackSequence) -> bool:
        """Whether to compute it; where too long a one is an error, packing raises it."""
        return not self.skips_too_long or sequence.num_tokens <= self.micro_batch_tokens

    def check(self, trajectory: Trajectory) -> None:
        """Raise InvalidSampleError for what would index out of range or train on nonsense."""
        if trajectory.loss_mask.dtype != np.bool_:
            raise InvalidSampleError(f"{trajectory.id}: loss_mask is {trajectory.loss_mask.dtype}, not bool")
        self.check_tokens(trajectory.id, trajectory.token_ids)

    def check_tokens(self, name: str, tokens: TokenIds) -> None:
        if tokens.dtype.kind != "i":
            raise InvalidSampleError(f"{name}: token_ids are {tokens.dtype}, not integers")
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            raise InvalidSampleError(
                f"{name}: token id {bad} is outside the model's vocabulary of {self.vocab_size}: the "
                "sequence was made with another tokenizer"
            )

    def _agreed(self, number: int) -> int:
        if self.world.data_size == 1:
            return number
        return int(self.world.max_over_data(torch.tensor(number, device=self.world.device)).item())


_IDLE = PackSequence(token_ids=np.zeros(2, dtype=np.int32), wanted=np.array([False, True]))


def gather_context(values_K: Tensor, pack: Pack, world: World) -> Tensor:
    """The pack's values on every rank of a row; each rank's gradient flows into its own slice only."""
    if pack.context_slice is None:
        return values_K
    context = world.context()
    assert context is not None
    gathered: Tensor = _GatherSlices.apply(  # type: ignore[no-untyped-call]
        values_K, pack.context_slice, pack.seq_K.shape[0], context[2]
    )
    return gathered


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, span: tuple[int, int], length: int, group: Any) -> Tensor:
        ctx.span = span
        out = values.new_zeros(length)
        out[span[0] : span[1]] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Every rank of the row computes the same loss, so its own part is the whole of its share.
        return grads[0][ctx.span[0] : ctx.span[1]], None, None, None


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches: counts, the loss and the algorithm's metrics, reduced once per step."""

    sums: dict[str, Tensor | float] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            value = value.detach().float() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_metrics(self, metrics: dict[str, Metric], *, is_idle: bool) -> None:
        for name, metric in metrics.items():
            metric = metric.emptied() if is_idle else metric
            self.metrics[name] = self.metrics[name].with_(metric) if name in self.metrics else metric

    def reduce(
        self, world: World, beside: Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, float], float]:
        """(sums, metrics, `beside`) over all data ranks: two collectives and one copy to the host, on which a number
        that is the same on all ranks already may come along."""
        sum_names = sorted(self.sums)
        mean_names = sorted(n for n, m in self.metrics.items() if not m.is_max)
        max_names = sorted(n for n, m in self.metrics.items() if m.is_max)
        parts = [self.sums[n] for n in sum_names]
        parts += [self.metrics[n].total for n in mean_names] + [self.metrics[n].weight for n in mean_names]
        added = world.sum_over_data(_stack(parts, world.device))
        largest = _stack([self.metrics[n].total for n in max_names], world.device)
        if max_names:
            largest = world.max_over_data(largest)
        extra = _stack([0.0 if beside is None else beside], world.device)
        *values, passed = torch.cat([added, largest, extra]).tolist()
        num_sums, num_means = len(sum_names), len(mean_names)
        sums = dict(zip(sum_names, values, strict=False))
        totals, weights = values[num_sums : num_sums + num_means], values[num_sums + num_means :]
        metrics = {
            name: total / weight if weight else 0.0
            for name, total, weight in zip(mean_names, totals, weights, strict=False)
        }
        metrics.update(zip(max_names, values[num_sums + 2 * num_means :], strict=True))
        return sums, metrics, passed


def _stack(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    if not values:
        return torch.zeros(0, dtype=dtype, device=device)
    plain = copy_in(np.array([0.0 if isinstance(v, Tensor) else v for v in values]), device).to(dtype)
    return torch.stack(
        [
            v.detach().to(device=device, dtype=dtype).reshape(()) if isinstance(v, Tensor) else plain[i]
            for i, v in enumerate(values)
        ]
    )
