"""Which replica has seen which prefix: what makes routing prefix-aware.

A prompt is cut into blocks; each block's key is chained with the one before it, so equal keys mean equal prefixes. The
index is a guess about the replicas' caches, bounded and least-recently-used: being wrong costs a prefill, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from rill.types import TokenIds

_BLOCK_TOKENS = 32


class PrefixIndex:
    """Not thread-safe: the router holds its lock around it."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._seen_by: OrderedDict[int, set[str]] = OrderedDict()

    def match(self, token_ids: TokenIds, salt: str) -> dict[str, int]:
        """Replica -> tokens of the prompt that it has probably cached. Replicas with none are absent."""
        matched: dict[str, int] = {}
        still: set[str] | None = None
        for key, num_tokens in _keys(token_ids, salt):
            seen = self._seen_by.get(key)
            if seen is None:
                break
            still = set(seen) if still is None else still & seen
            if not still:
                break
            self._seen_by.move_to_end(key)
            matched.update(dict.fromkeys(still, num_tokens))
        return matched

    def insert(self, token_ids: TokenIds, salt: str, replica: str) -> None:
        for key, _ in _keys(token_ids, salt):
            self._seen_by.setdefault(key, set()).add(replica)
            self._seen_by.move_to_end(key)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)

    def forget(self, replica: str | None = None) -> None:
        """Everything, or everything about one replica."""
        if replica is None:
            self._seen_by.clear()
            return
        for seen in self._seen_by.values():
            seen.discard(replica)


def _keys(token_ids: TokenIds, salt: str) -> Iterator[tuple[int, int]]:
    """(key, tokens up to and including the block). The last block may be short: equal short prompts match too."""
    key = hash(salt)
    for start in range(0, len(token_ids), _BLOCK_TOKENS):
        block = token_ids[start : start + _BLOCK_TOKENS]
        key = hash((key, block.tobytes()))
        yield key, start + len(block)
