"""An edge of the flow: the samples of a batch on their way to one group, chunk by chunk.

    controller ── Chunk ──▶ announced[rank] ──▶ ┐
                                                ├─▶ Part: this rank's balanced share of the chunk
    the stage before ── Sample, by key ─────▶ ┘

The chunk's size is the edge's `granularity`, in groups: the plan's, never the worker's code's. A worker loops over
`parts`, which waits outside any turn on devices until the samples are in hand, and puts what it made of them, under the
same keys, into the next edge's samples. Ranks that compute one share together (tensor and context parallelism): the
first of them takes, tells the others, and `Part.samples` hands the samples on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rill.runtime.channel import Channel
from rill.runtime.worker import Worker
from rill.telemetry import trace
from rill.training.balance import CostModel
from rill.types import Sample
from rill.workers.records import BY_TOKENS, Chunk

if TYPE_CHECKING:
    from rill.training.parallel import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A handle; equal in every process it is sent to."""

    name: str
    """Of the group that consumes it."""
    samples: Channel
    """By key."""
    announced: tuple[Channel, ...]
    """One per rank."""
    num_shares: int
    """Parts that a chunk is cut into: the data ranks."""
    granularity: int
    """Groups to a chunk."""
    is_whole: bool
    """The group takes turns on its devices with one that may still be at work: the whole batch is in hand before the
    first chunk is worked on, so that nobody waits for the other in the middle. The chunks, and the bits, are the
    same."""

    def announce(self, chunk: Chunk) -> None:
        """By the controller, to the first rank of every share."""
        for channel in self.announced[:: len(self.announced) // self.num_shares]:
            channel.put(chunk)

    def parts(
        self,
        worker: Worker,
        world: World,
        *,
        whole_groups: bool = False,
        cost: CostModel = BY_TOKENS,
        turn: ExitStack | None = None,
    ) -> Iterator[Part]:
        """This rank's part of every chunk of one batch, in order. Used up, it has dealt with the batch.

        world: of the model that works on them; one of a single rank is a model that every rank of the group has whole.
        turn: one on the devices, for a trainer: it begins with the first part, once it is in hand, and lasts for the
        step, since gradients stay where they are.
        """
        per_share = len(self.announced) // self.num_shares
        share = worker.rank // per_share
        mine = self.announced[worker.rank]
        peers = self.announced[worker.rank + 1 : (share + 1) * per_share] if world.leads else ()
        waiting: list[Part] = []
        while True:
            chunk: Chunk = mine.take()
            keys = chunk.share(share, self.num_shares, whole_groups=whole_groups, cost=cost)
            taken = (self.samples.take(keys=keys) if keys else []) if world.leads else None
            for peer in peers:
                peer.put(chunk)
            waiting.append(Part(chunk, keys, taken, world))
            if chunk.is_last and self.is_whole:
                world.barrier()  # else one waits in a collective for others, holding devices that their shares need
            if chunk.is_last or not self.is_whole:
                if turn is not None and waiting[0].is_first:
                    turn.enter_context(worker.device_lock())
                yield from self._traced(worker, waiting)
                waiting = []
            if chunk.is_last:
                return

    def _traced(self, worker: Worker, parts: Sequence[Part]) -> Iterator[Part]:
        """Each within a span that lasts until the worker asks for the next: the planner's points, and the lines that
        the timeline draws from worker to worker."""
        for part in parts:
            chunk = part.chunk
            with trace.span(
                "chunk",
                lane=f"{worker.group_name}[{worker.rank}]",
                of=self.name,
                chunk=f"{chunk.step}.{chunk.number}",
                groups=len(chunk.indices_G),
            ):
                yield part


class Part(NamedTuple):
    """One rank's share of one chunk."""

    chunk: Chunk
    keys: Sequence[str]
    taken: list[Sample] | None
    """By the first rank that computes the share; see `samples`."""
    world: World

    @property
    def is_first(self) -> bool:
        return self.chunk.number == 0

    def samples(self) -> list[Sample]:
        """All ranks that compute the share together call it, once, inside their turn on the devices."""
        return self.world.from_leader(self.taken)

    def put(self, target: Channel, samples: Sequence[Sample]) -> None:
        """What was made of the samples, in their order, under their keys; once for all ranks of the share."""
        if self.world.leads:
            put_all(target, self.keys, samples)


def put_all(target: Channel, keys: Sequence[str], samples: Sequence[Sample]) -> None:
    for key, sample in zip(keys, samples, strict=True):
        target.put(sample, weight=float(sample.num_tokens), key=key)


def num_shares(group_size: int, world: World) -> int:
    """Parts that a chunk is cut into for a group whose model spans `world`: ranks that hold it whole work apart."""
    return group_size if world.size == 1 else world.data_size
