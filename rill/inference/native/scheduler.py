"""Decides what each turn of the host computes: which sequences, how many of their tokens.

Continuous batching with chunked prefill. Every step has a budget of tokens. Sequences in the middle of
generation take one each; the rest of the budget goes to prompts, in order of priority and arrival, cut where the
budget ends. When blocks run out, the sequence that came last gives all of its back and is computed again later
(tokens are kept, so nothing sampled changes).

A turn of pure generation is several steps (`num_steps`): everything about them but the tokens is known beforehand,
so the host looks at each sequence once and the device goes on by itself. A sequence that reaches its limit leaves at
that step; what one samples after its end is dropped. Or it is one step that looks at drafts (speculation.py).

    turn of 4    step 0   A B C D        counts  A 4, B 4, C 3, D 1
                 step 1   A B C
                 step 2   A B C
                 step 3   A B

Called between turns by the engine's thread. With overlapped execution one turn may still be on the device; then
the tokens it samples count as `num_in_flight`, and a decision that needs them raises NeedsResults before anything
is changed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from rill.inference.base import PauseMode
from rill.inference.native.block_manager import BlockManager
from rill.inference.native.sequence import NO_SLOT, Sequence
from rill.inference.native.speculation import Speculator

_MAX_GATHERED_STEPS = 8
"""How long a prompt that could be started waits for others: some 20 ms with 256 sequences on an H200, ten with few."""


class NeedsResults(Exception):
    """The results of the step in flight must be read before this one can be decided."""


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a sequence, computed in one step."""

    seq: Sequence
    start: int
    length: int
    is_last: bool
    """The chunk ends at the sequence's newest token, so the step samples the next one."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one turn computes."""

    decodes: list[Sequence]
    """In the middle of generation: each computes its newest token and samples the next."""
    counts: list[int]
    """How many steps each of them takes, most first; with chunks, one. With drafts: its rows of the one step."""
    grown: list[Sequence]
    """Those of them that have a new block."""
    chunks: list[Chunk]
    """Prompts and texts to be scored, or parts of them."""
    has_special: bool
    """Somebody asks for more than the model's next token."""
    drafts: list[list[int]] = field(default_factory=list)
    """Of each of the decodes, where the step looks at some: what may follow its newest token."""

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        root_key: Callable[[Sequence], bytes],
        num_gathered: int = 0,
        num_steps: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        """num_gathered: while more than twice as many generate, prompts are started so many at a time: they wait for
        slots as long as it takes, and for company for a few steps. 0: at once.

        num_steps: of a turn in which nothing but generation happens.
        """
        self.blocks = blocks
        self.max_batched_tokens = max_batched_tokens
        self.waiting: list[Sequence] = []
        self.scoring: list[Sequence] = []
        """Texts that wait to be scored: a queue of their own, so that they do not wait for whole rollouts."""
        self.running: list[Sequence] = []
        self.paused: PauseMode | None = None
        """FINISH lets started sequences end and starts no others, INTERRUPT nothing but scoring; whoever sets that
        preempts what runs."""
        self.num_preempted = 0
        self.num_special = 0
        """Running sequences whose steps are taken one at a time."""
        self._num_steps = min(num_steps, blocks.block_size)  # so that a turn takes at most one block of each
        self._speculator = speculator
        self._root_key = root_key
        self._num_gathered = num_gathered
        self._num_steps_gathered = 0
        """How long prompts have waited for company, at most."""
        self._is_filling = False
        """Somebody has more than its newest token to compute, or would have, had the last step's budget been larger."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_reserve_blocks = blocks.num_usable // 100

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.scoring) or any(map(self._may_start, self.waiting))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.scoring)

    def add(self, seq: Sequence) -> None:
        queue = self._queue(seq)
        if not queue or queue[-1].order <= seq.order:
            queue.append(seq)
        else:
            bisect.insort(queue, seq, key=lambda s: s.order)

    def schedule(self) -> Work:
        """The next turn's work; nothing when nothing can run."""
        self._make_room()
        budget = self.max_batched_tokens
        can_admit = self._can_admit()
        # Nobody could begin or go on with a prompt meanwhile, and blocks are plenty: the turn may be longer.
        is_pure = not (can_admit or self.num_special or self._is_filling)
        is_pure &= len(self.running) <= min(self.blocks.num_free, budget)
        if is_pure and self._speculator is not None:
            drafts = self._speculator.propose(self.running)
            if drafts is not None:
                return self._take_drafts(drafts)
        num_steps = self._num_steps if is_pure else 1
        decodes, counts, grown, rest = self._take_decodes(budget, repeat(num_steps))
        chunks: list[Chunk] = []
        if num_steps == 1:
            self._take_chunks(rest, chunks, budget - len(decodes), can_admit)
        if num_steps > 1 and decodes and min(counts) != max(counts):
            most_first = sorted(range(len(counts)), key=lambda i: -counts[i])
            decodes, counts = [decodes[i] for i in most_first], [counts[i] for i in most_first]
        return Work(decodes, counts, grown, chunks, self.num_special > 0)

    def _take_drafts(self, drafts: list[list[int]]) -> Work:
        """One step that computes everybody's newest token and what may follow it."""
        if any(seq.num_in_flight for seq in self.running):
            raise NeedsResults
        wanted = [1 + len(draft) for draft in drafts]
        decodes, counts, grown, rest = self._take_decodes(len(wanted), wanted)
        assert counts == wanted and not rest, "a turn of drafts is one of pure generation"
        return Work(decodes, counts, grown, [], False, drafts)

    def _take_chunks(self, rest: list[Sequence], chunks: list[Chunk], budget: int, can_admit: bool) -> None:
        """What is left of the budget goes to prompts: those begun, then new ones."""
        for seq in rest:
            need = seq.num_tokens - seq.num_computed
            if need > (not seq.is_scored) and budget > 0:
                chunk = self._continue_prefill(seq, min(need, budget))
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.length
        is_cut = False
        if budget > 0 and can_admit:
            is_cut = self._admit(chunks, budget) <= 0 and bool(self.waiting)
            self._num_steps_gathered = 0
        begun = (seq.is_scored or seq.num_computed < seq.num_tokens - 1 for seq in self.running)
        self._is_filling = is_cut or any(begun)

    def _take_decodes(
        self, budget: int, most: Iterable[int]
    ) -> tuple[list[Sequence], list[int], list[Sequence], list[Sequence]]:
        """Who takes its next tokens, how many (`most` of each), who of them has a new block for it, and who takes none.

        _takes_one() and _take() for sampled tokens, spelt out: this is the loop that every turn runs.
        """
        decodes: list[Sequence] = []
        counts: list[int] = []
        grown: list[Sequence] = []
        rest: list[Sequence] = []
        size = self.blocks.block_size
        for seq, num_steps in zip(self.running, most, strict=False):
            num_computed = seq.num_computed
            num_tokens = len(seq.tokens) + seq.num_in_flight
            count = seq.max_tokens - num_tokens
            if num_tokens - num_computed != 1 or count <= 0 or seq.is_scored:
                rest.append(seq)
                continue
            if count > num_steps:
                count = num_steps
            num_computed += count
            if num_computed > len(seq.block_ids) * size:
                self.blocks.grow(seq, num_computed)
                grown.append(seq)
            seq.num_computed = num_computed
            seq.num_in_flight += count
            decodes.append(seq)
            counts.append(count)
            if len(decodes) == budget:
                break  # those behind wait for the next step
        return decodes, counts, grown, rest

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out for good, wherever it is."""
        if seq.slot != NO_SLOT:
            self._leave(seq)
        elif not seq.is_finished:
            self._queue(seq).remove(seq)
        seq.is_finished = True

    def preempt(self, seq: Sequence) -> None:
        """Give back a running sequence's blocks; it is computed again, tokens kept, when it is next admitted."""
        assert seq.num_in_flight == 0
        self._leave(seq)
        seq.num_computed = 0
        seq.num_preempted += 1
        self.num_preempted += 1
        self.add(seq)

    def _make_room(self) -> None:
        """Preempt from the end until every sequence in the middle of generation can take its next token."""
        size = self.blocks.block_size
        while len(self.running) > self.blocks.num_free:  # each takes at most one block
            takers = filter(self._takes_one, self.running)
            if sum(seq.num_tokens > len(seq.block_ids) * size for seq in takers) <= self.blocks.num_free:
                return
            if any(seq.num_in_flight for seq in self.running):
                raise NeedsResults
            self.preempt(max(self.running, key=lambda s: s.order))

    def _takes_one(self, seq: Sequence) -> bool:
        """In the middle of generation, and not merely waiting for its last token to be read."""
        num_tokens = len(seq.tokens) + seq.num_in_flight
        return num_tokens - seq.num_computed == 1 and num_tokens < seq.max_tokens and not seq.is_scored

    def _take(self, seq: Sequence, length: int) -> Chunk:
        start = seq.num_computed
        self.blocks.grow(seq, start + length)
        seq.num_computed = start + length
        is_last = seq.num_computed == seq.num_tokens
        if is_last and not seq.is_scored:
            seq.num_in_flight += 1
        self.blocks.publish(seq)
        return Chunk(seq, start, length, is_last)

    def _continue_prefill(self, seq: Sequence, length: int) -> Chunk | None:
        size = self.blocks.block_size
        room = (len(seq.block_ids) + self.blocks.num_free) * size - seq.num_computed
        if room >= 1:
            return self._take(seq, min(length, room))
        youngest = max(self.running, key=lambda s: s.order)
        if youngest is seq and len(self.running) > 1 and not seq.num_in_flight:
            self.preempt(seq)  # others are ahead of it and hold everything: it would only sit on its blocks
        return None

    def _can_admit(self) -> bool:
        """Whether somebody may start now. A step with a prompt is no captured one: it takes those that generate as much
        time for one prompt as for many."""
        num_free, num_running = len(self._free_slots), len(self.running)
        num_ready = min(self.num_waiting, num_free)
        if num_ready == 0:
            self._num_steps_gathered = 0
            return False
        if self._is_filling or self.scoring or num_ready >= min(self._num_gathered, num_running / 2):
            return True
        if len(self.waiting) > num_free:
            return False  # slots will come
        self._num_steps_gathered += self._num_steps
        return self._num_steps_gathered > _MAX_GATHERED_STEPS

    def _admit(self, chunks: list[Chunk], budget: int) -> int:
        """Texts to be scored first, with half of the budget where prompts wait too. What is left of it."""
        prompts = list(filter(self._may_start, self.waiting))
        rest = budget // 2 if prompts else 0
        rest += self._start(self.scoring, chunks, budget - rest)
        return self._start(prompts, chunks, rest)

    def _start(self, queue: list[Sequence], chunks: list[Chunk], budget: int) -> int:
        """How much of the budget is left."""
        for seq in list(queue):
            if budget <= 0 or not self._free_slots:
                break
            matched = self.blocks.match(seq, self._root_key(seq))
            if self.blocks.is_awaited(seq, len(matched)):
                continue
            chunk = self._try_start(seq, matched, budget)
            if chunk is None:
                break  # no room: those behind must not overtake
            chunks.append(chunk)
            budget -= chunk.length
        return budget

    def _try_start(self, seq: Sequence, matched: list[int], budget: int) -> Chunk | None:
        size = self.blocks.block_size
        # The newest token is always computed, for its logits, even when a cached block holds it.
        num_cached = min(len(matched) * size, len(seq.tokens) - 1)
        length = min(len(seq.tokens) - num_cached, budget)
        self.blocks.hold(seq, matched)
        reserve = self._num_reserve_blocks if self.running else 0
        need = -(-(num_cached + length) // size) - len(matched)
        if need + reserve > self.blocks.num_free:
            room = (self.blocks.num_free - reserve) * size + len(matched) * size - num_cached
            if self.running or room < 1:
                self.blocks.free(seq)
                return None
            length = min(length, room)
        self._queue(seq).remove(seq)
        self.running.append(seq)
        self.num_special += seq.is_special
        seq.slot = self._free_slots.pop()
        seq.num_computed = num_cached
        seq.num_shared = len(matched) * size
        if seq.num_preempted == 0:
            seq.num_cached = min(num_cached, seq.num_prompt)
        chunk = self._take(seq, length)
        self.blocks.announce(seq)
        return chunk

    def _queue(self, seq: Sequence) -> list[Sequence]:
        return self.scoring if seq.is_scored else self.waiting

    def _may_start(self, seq: Sequence) -> bool:
        return self.paused is None or (self.paused is PauseMode.FINISH and seq.num_preempted > 0)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.num_special -= seq.is_special
        self.blocks.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT
