"""The ranks that compute one model together, and everything they say to each other while they do.

One small object over a process group: gloo for CPU tensors, NCCL for those of GPUs, where a wait is the stream's and a
captured step replays it. Every member makes the same calls in the same order; each fails past the group's deadline.
Who the members are, and how they are started, is the caller's business (rill.inference.native.followers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TensorGroup:
    def __init__(self, group: Any, *, rank: int, size: int, device: torch.device) -> None:
        """`group`: as rill.runtime.transfer.collective.open_group makes it."""
        self.rank, self.size, self.device = rank, size, device
        self._group = group
        self.blame: Callable[[Exception], Exception] = lambda error: error
        """What a call that failed raises, from what the library said."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed over the ranks, in place; returns x."""
        self._run(self._group.allreduce, [x])
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """As rank 0 has it, in place; returns x."""
        self._run(self._group.broadcast, x, 0)
        return x

    def scatter(self, into: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Rank r receives parts[r], of one shape each. Rank 0 gives the parts, as it does without options."""
        self._run(self._group.scatter, [into], [list(parts)] if self.rank == 0 else [])

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        number_1 = torch.tensor([number], dtype=torch.int64, device=self.device)
        self._run(self._group.allreduce, number_1, dist.ReduceOp.MIN)
        return int(number_1.item())

    def abort(self) -> None:
        """Any thread: let go of a call that waits for a rank that is gone. gloo sees the broken connection itself."""
        if self.device.type == "cuda":
            self._group.abort()

    def _run(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args).wait()
        except RuntimeError as error:
            raise self.blame(error) from error
