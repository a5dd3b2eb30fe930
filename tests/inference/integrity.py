"""The native engine's bookkeeping, recounted: blocks, slots, the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from rill.inference.native.block_manager import NULL_BLOCK, BlockManager
from rill.inference.native.engine import NativeEngine
from rill.inference.native.scheduler import Scheduler
from rill.inference.native.sequence import Sequence


def checked_every_step(engine: NativeEngine) -> NativeEngine:
    """The same engine; what is wrong ends its thread. Nothing is in flight then between two of its steps."""
    core, step = engine._core, engine._core.step

    def step_and_check() -> None:
        step()
        core.drain()
        check_scheduler(core.scheduler)

    core.step = step_and_check  # type: ignore[method-assign]
    return engine


def check_scheduler(scheduler: Scheduler) -> None:
    check_blocks(scheduler.blocks, scheduler.running)
    assert all(not seq.block_ids for seq in (*scheduler.waiting, *scheduler.scoring)), (
        "a waiting sequence holds blocks"
    )
    slots = [seq.slot for seq in scheduler.running] + scheduler._free_slots
    assert len(slots) == len(set(slots)), "two sequences share a slot"


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Recount everything from the sequences; an AssertionError names the first block that disagrees."""
    refs = [0] * blocks.num_blocks
    for seq in sequences:
        for block in seq.block_ids:
            refs[block] += 1
    free, idle = set(blocks._free), set(blocks._idle)
    assert refs[NULL_BLOCK] == 0 and NULL_BLOCK not in free | idle, "the null block was handed out"
    assert len(free) == len(blocks._free) and not free & idle, "a block is free twice"
    for block in range(1, blocks.num_blocks):
        assert refs[block] == blocks._num_refs[block], (
            f"block {block}: {blocks._num_refs[block]} references are counted, {refs[block]} exist"
        )
        is_out = block in free or block in idle
        assert is_out == (refs[block] == 0), f"block {block} has {refs[block]} holders and free={is_out}"
        key = blocks._key_of[block]
        assert (key is not None) or block not in idle, f"idle block {block} has no key"
        assert key is None or (block not in free and blocks._cached.get(key) == block), (
            f"block {block} is cached under a key that leads elsewhere"
        )
    assert len(blocks._cached) == sum(k is not None for k in blocks._key_of), "a cache key leads nowhere"
