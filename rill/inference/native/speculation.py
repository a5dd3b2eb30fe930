"""Drafts of the next tokens, from what was said before: by the sequence itself, or by another answer to its prompt.

    A        … so the sum is 7 . Check : so the sum ▮                the last three tokens stood there before,
    draft                                            is 7 . Check    and this is what followed

A draft is looked at, not believed. One step computes its tokens as rows of their own, samples after each row as ever,
by (seed, position), and takes what was sampled as long as it is what was drafted, and the one after. So a request has
the tokens that it would have had without drafts: a drafted x is accepted with probability p(x), after temperature and
filters, and otherwise the token comes from what is left of p, which is rejection sampling of a draft that is certain
of itself. Drafts decide how many steps that takes and nothing else.

They pay where few sequences run, for a step costs about the same with a few more rows, and where somebody repeats
something. A sequence whose drafts come true is given longer ones; one whose drafts fail waits, twice as long each time.
Called by the scheduler and the core, in the engine's thread.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import repeat

from rill.inference.native.sequence import Sequence

NGRAM = 3
"""Tokens that must have stood together before."""
FIRST_LENGTH = 4
"""Of a sequence's first draft, and of the first after a failure."""
FIRST_PAUSE, LAST_PAUSE = 8, 256
"""Tokens without a draft after one of which nothing came true; twice as many after each more."""

Gram = tuple[int, ...]


class Speculator:
    def __init__(self, num_tokens: int, num_rows: int) -> None:
        """num_tokens: of the longest draft; num_rows: of a step, newest tokens and drafts of all together."""
        self._num_tokens = num_tokens
        self._num_rows = num_rows
        self._states: dict[str, _State] = {}
        self._groups: weakref.WeakValueDictionary[object, _Group] = weakref.WeakValueDictionary()

    def add(self, seq: Sequence) -> None:
        """It begins. What answers to one prompt say is found by all of them that still run."""
        num_asked = seq.num_prompt - seq.request.num_generated
        key = (tuple(seq.tokens[:num_asked]), seq.request.adapter, seq.request.cache_salt)
        group = self._groups.get(key)
        first = 0 if group is None else max(0, num_asked - NGRAM)  # the prompt is the first one's to read
        if group is None:
            group = self._groups[key] = _Group()
        self._states[seq.id] = _State(_Text(seq.tokens, first), group)

    def drop(self, seq: Sequence) -> None:
        """It has ended."""
        state = self._states.pop(seq.id, None)
        if state is not None:
            state.group.ended.append(state.text)

    def propose(self, running: Sequence_[Sequence]) -> list[list[int]] | None:
        """A draft for each of them, which may be empty; None where a step of drafts is not worth it.

        Of tokens in flight nothing is known: then a proposal says no more than that it is worth waiting for them.
        """
        if not running or self._num_rows < 2 * len(running):
            return None
        most = min(self._num_tokens, self._num_rows // len(running) - 1)
        found = [self._draft(seq, most) for seq in running]
        return found if sum(map(len, found)) >= len(running) else None

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        if not num_drafted:
            return
        state = self._states[seq.id]
        if num_accepted:
            state.pause = 0
            state.length = 2 * num_drafted if num_accepted == num_drafted else num_accepted + 1
        else:
            state.pause = min(2 * state.pause or FIRST_PAUSE, LAST_PAUSE)
            state.resume_at = len(seq.tokens) + state.pause
            state.length = FIRST_LENGTH

    def _draft(self, seq: Sequence, most: int) -> list[int]:
        state, tokens = self._states[seq.id], seq.tokens
        state.text.read(state.group)
        most = min(most, state.length, seq.max_tokens - seq.num_tokens - 1)
        if most < 1 or len(tokens) < max(NGRAM, state.resume_at):
            return []
        gram = tuple(tokens[-NGRAM:])
        at = state.text.after.get(gram)  # it is the likeliest to go on like itself
        if at is None:
            source, at = state.group.find(gram)
            return source[at : at + most].tolist()
        # Shorter where it goes round in a circle of fewer tokens: once more, then.
        round_ = tokens[at : at + most].tolist()
        return (round_ * -(-most // len(round_)))[:most]


class _Text:
    """What one sequence holds, by its n-grams."""

    def __init__(self, tokens: array[int], first: int) -> None:
        self.tokens = tokens
        self.after: dict[Gram, int] = {}
        """Where what followed an n-gram begins, at the last place where it stood."""
        self._num_read = first

    def read(self, group: _Group) -> None:
        """What is new, as far as a token follows it."""
        tokens, begin, end = self.tokens, self._num_read, len(self.tokens) - NGRAM
        if end <= begin:
            return
        grams = list(zip(*(tokens[begin + i : end + i] for i in range(NGRAM)), strict=True))
        places = range(begin + NGRAM, end + NGRAM)
        self.after.update(zip(grams, places, strict=True))
        group.after.update(zip(grams, zip(repeat(tokens), places), strict=True))
        self._num_read = end


class _Group:
    """The answers to one prompt; it ends with the last that runs."""

    def __init__(self) -> None:
        self.after: dict[Gram, tuple[array[int], int]] = {}
        self.ended: list[_Text] = []
        """Not read to their end: while many run nobody drafts, and it would be for nothing."""

    def find(self, gram: Gram) -> tuple[array[int], int]:
        while self.ended:
            self.ended.pop().read(self)
        return self.after.get(gram, (array("i"), 0))


@dataclass(slots=True)
class _State:
    text: _Text
    group: _Group
    length: int = field(default=FIRST_LENGTH)
    """Of its next draft, at most."""
    pause: int = 0
    resume_at: int = 0
