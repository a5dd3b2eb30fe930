"""Owns every KV block: who holds it, what it contains, and which one to give up next.

A block holds the keys and values of `block_size` consecutive tokens in all layers. Full blocks are published in
the prefix cache under a key that chains everything they depend on:

    root   = digest(policy version, adapter, salt)
    key[0] = digest(root,   tokens of block 0)
    key[i] = digest(key[i-1], tokens of block i, and the pictures that its placeholders stand for)

so two sequences share a block exactly when all its tokens and all tokens before them were computed by the same
weights. Keys of runs of blocks are remembered by the whole run: samples of one prompt begin with the same tokens, and
the next turn of a conversation with the same thousands of them. A block is in one of four states:

    free ──allocate──► held (private) ──publish──► held (cached) ──last release──► idle (cached, LRU)
     ▲                      └──────release──────►free                    ├──find──► held (cached)
     └───────────────────────────────eviction, flush─────────────────────┘

Block 0 is never handed out: rows that must not write (padding, tokens already cached) write there.
A published block may still be on its way to being written: attention in each layer reads after that layer's
writes of the whole batch, so a sequence scheduled in the same step may already use it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache

from rill.inference.native.sequence import Sequence

NULL_BLOCK = 0
RUN = 16
"""Blocks whose keys are remembered together, at most."""


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._num_refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[bytes, int] = {}
        self._coming: dict[bytes, Sequence] = {}
        """Keys that a running sequence will publish: others wait for it rather than compute the same."""
        self._runs: OrderedDict[bytes, list[bytes]] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    # --- prefix cache ------------------------------------------------------------------------------------

    @staticmethod
    @lru_cache(maxsize=64)
    def root_key(version: int, adapter: str, salt: str) -> bytes:
        return _digest(repr((version, adapter, salt)).encode())

    def match(self, seq: Sequence, root: bytes) -> list[int]:
        """The cached blocks that hold the longest known prefix of this sequence. Takes no references."""
        if seq.root_key != root:
            seq.root_key = root
            seq.block_keys.clear()
        found: list[int] = []
        for key in self._keys(seq, len(seq.tokens) // self.block_size):
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_awaited(self, seq: Sequence, num_matched: int) -> bool:
        """Whether another running sequence is about to compute the first block that this one lacks."""
        if num_matched >= len(seq.block_keys):
            return False
        owner = self._coming.get(seq.block_keys[num_matched])
        return owner is not None and owner is not seq

    def hold(self, seq: Sequence, blocks: Iterable[int]) -> None:
        """Give the sequence references on blocks that match() found."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._idle[block]
            self._num_refs[block] += 1
            seq.block_ids.append(block)
        seq.num_published = len(seq.block_ids)

    def announce(self, seq: Sequence) -> None:
        """Let others know which full blocks this sequence is going to publish."""
        for key in seq.block_keys[seq.num_published :]:  # match() has worked them all out
            self._coming.setdefault(key, seq)

    def publish(self, seq: Sequence) -> None:
        """Put the full blocks whose tokens are known and computed (or being computed) into the cache."""
        num_full, before = min(seq.num_computed, len(seq.tokens)) // self.block_size, seq.num_published
        if num_full <= before:
            return
        coming, cached, key_of = self._coming, self._cached, self._key_of
        keys = self._keys(seq, num_full)
        for key, block in zip(keys[before:], seq.block_ids[before:], strict=False):
            if coming.get(key) is seq:
                del coming[key]
            if key not in cached and key_of[block] is None:
                cached[key] = block
                key_of[block] = key
        seq.num_published = max(before, len(keys))

    def flush(self) -> None:
        """Forget all cached contents. Blocks that sequences hold stay theirs and are no longer shared."""
        for block in self._idle:
            self._free.append(block)
        self._idle.clear()
        for block in self._cached.values():
            self._key_of[block] = None
        self._cached.clear()

    # --- blocks ------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Make room for the first num_tokens tokens. That there are blocks enough is the scheduler's to see to."""
        need = -(-num_tokens // self.block_size) - len(seq.block_ids)
        assert need <= self.num_free, f"{need} blocks were asked for, and {self.num_free} are free"
        free, num_refs = self._free, self._num_refs
        for _ in range(need):
            block = free.pop() if free else self._evict()
            num_refs[block] = 1
            seq.block_ids.append(block)

    def free(self, seq: Sequence) -> None:
        """Return all blocks; the tail first, so that it is evicted before the prefix it depends on."""
        for key in seq.block_keys[seq.num_published :]:
            if self._coming.get(key) is seq:
                del self._coming[key]
        num_refs, key_of = self._num_refs, self._key_of
        for block in reversed(seq.block_ids):
            num_refs[block] = left = num_refs[block] - 1
            assert left >= 0, f"block {block} was released twice"
            if left == 0:
                if key_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None
        seq.block_ids.clear()
        seq.num_published = 0

    def _evict(self) -> int:
        """The idle block that was left longest ago."""
        block, _ = self._idle.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._cached[key]
        self._key_of[block] = None
        return block

    def _keys(self, seq: Sequence, num_full: int) -> list[bytes]:
        """Of its first full blocks; none of a sequence that shares nothing."""
        if not self.enable_prefix_cache or seq.is_scored:
            return []
        keys, size = seq.block_keys, self.block_size
        first, words, pictures = len(keys), size * 4, seq.request.pictures
        if first >= num_full:
            return keys[:num_full]
        tokens = seq.tokens[first * size : num_full * size].tobytes()
        while (index := len(keys)) < num_full:
            parent, at = keys[-1] if keys else seq.root_key, (index - first) * words
            if num_full - index > 1 and not pictures:
                keys += self._keys_of_run(parent, tokens[at : at + RUN * words])
            else:
                shown = _shown(seq, index * size, (index + 1) * size) if pictures else b""
                keys.append(_digest(parent + tokens[at : at + words] + shown))
        return keys

    def _keys_of_run(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """Of up to RUN blocks that come after the parent."""
        name = parent + tokens
        found = self._runs.get(name)
        if found is not None:
            self._runs.move_to_end(name)
            return found
        found = []
        words = self.block_size * 4
        for at in range(0, len(tokens), words):
            parent = _digest(parent + tokens[at : at + words])
            found.append(parent)
        self._runs[name] = found
        if len(self._runs) > self.num_blocks // RUN + 64:
            self._runs.popitem(last=False)
        return found


_empty = hashlib.blake2b(digest_size=16)


def _digest(content: bytes) -> bytes:
    hashed = _empty.copy()  # two thirds of the time that a new one takes
    hashed.update(content)
    return hashed.digest()


def _shown(seq: Sequence, start: int, end: int) -> bytes:
    """Which parts of which pictures lie in a block: placeholders alone look all the same."""
    seen = [p for p in seq.request.pictures if p.start < end and p.end > start]
    return "".join(f"{p.key}{p.start - start}:{p.rows}x{p.columns};" for p in seen).encode()
