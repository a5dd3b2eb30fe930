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
Where nothing was said before, a small model may draft (draft_model.py), as many tokens as pay: that follows from how
often they came true and from what a step of it costs beside one of the model. On a device that works ahead of the host,
where a draft must be waited for, a clock decides whether any do.
Called by the scheduler and the core, in the engine's thread.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

from rill.inference.native.sequence import Sequence

NGRAM = 3
"""Tokens that must have stood together before."""
FIRST_LENGTH = 4
"""Of a sequence's first draft, and of the first after a failure."""
FIRST_PAUSE, LAST_PAUSE = 8, 256
"""Tokens without a draft after one of which nothing came true; twice as many after each more."""

KEPT = 0.98
"""Of what was counted of a model's drafts, after each: some fifty count."""
HOPED = (4.0, 5.0)
"""Tokens of a model's drafts that came true, of so many: what is believed before there were any."""
FORGOTTEN = 0.002
"""Towards that, with each look at a model that does not pay: after some hundreds it is tried again."""
LOOKS, TRIED_LOOKS = 256, 8
"""Of so many looks at whether drafts are faster, so many are given to what was slower."""
TURNS_KEPT = 0.95
"""Of the times of turns, after each: some twenty count."""

Gram = tuple[int, ...]


class Drafter(Protocol):
    """A model that drafts."""

    max_drafted: int
    cost: float
    """Of a step of it, in steps of the model that is drafted for."""
    round_cost: float
    """Of waiting for a draft, and then for those who look at it, in such steps."""
    is_timed: bool
    """What they cost is seen by a clock alone."""

    def can_follow(self, seq: Sequence) -> bool: ...

    def draft(self, asked: list[tuple[Sequence, list[int]]]) -> None:
        """Fill each list with what may follow the sequence's newest token."""

    def drop(self, seq: Sequence) -> None: ...


class Speculator:
    def __init__(self, num_tokens: int, num_rows: int, model: Drafter | None = None) -> None:
        """num_tokens: of the longest draft; num_rows: of a step, newest tokens and drafts of all together; model: what
        drafts where nothing was said before."""
        self._num_tokens = num_tokens
        self._num_rows = num_rows
        self._model = model
        self._num_true, self._num_tried = HOPED
        self.pace = Pace() if model is not None and model.is_timed else None
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
        if self._model is not None:
            self._model.drop(seq)

    def propose(self, running: Sequence_[Sequence]) -> list[list[int]] | None:
        """A draft for each of them, which may be empty; None where a step of drafts is not worth it.

        Of tokens in flight nothing is known: then a proposal says no more than that it is worth waiting for them.
        """
        if not running or self._num_rows < 2 * len(running):
            return None
        most = min(self._num_tokens, self._num_rows // len(running) - 1)
        found = [self._draft(seq, most) for seq in running]
        if self._model is not None:
            self._make_room(self._model, running, found, min(most, self._model.max_drafted))
        return found if sum(map(len, found)) >= len(running) else None

    def complete(self, sequences: list[Sequence], drafts: list[list[int]]) -> None:
        """Before they are looked at: of what was proposed, those that the model drafts."""
        pairs = zip(sequences, drafts, strict=True)
        asked = [(seq, draft) for seq, draft in pairs if draft and self._states[seq.id].asks_model]
        if asked and self._model is not None:
            self._model.draft(asked)

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        if not num_drafted:
            return
        state = self._states[seq.id]
        if state.asks_model:
            self._num_true = KEPT * self._num_true + num_accepted
            # What came after the first wrong token was not tried.
            self._num_tried = KEPT * self._num_tried + min(num_drafted, num_accepted + 1)
        elif num_accepted:
            state.pause = 0
            state.length = 2 * num_drafted if num_accepted == num_drafted else num_accepted + 1
        else:
            state.pause = min(2 * state.pause or FIRST_PAUSE, LAST_PAUSE)
            state.resume_at = len(seq.tokens) + state.pause
            state.length = FIRST_LENGTH

    def _make_room(
        self, model: Drafter, running: Sequence_[Sequence], found: list[list[int]], most: int
    ) -> None:
        """In the drafts of those that would have none."""
        length = best_length(self._num_true / self._num_tried, model.cost, model.round_cost, most)
        if length and self.pace is not None and not self.pace.is_faster(len(running)):
            length = 0
        if not length:
            true, tried = HOPED
            self._num_true += FORGOTTEN * (true - self._num_true)
            self._num_tried += FORGOTTEN * (tried - self._num_tried)
        for seq, draft in zip(running, found, strict=True):
            state = self._states[seq.id]
            state.asks_model = not draft and model.can_follow(seq)
            if state.asks_model:
                draft += [0] * min(length, seq.max_tokens - seq.num_tokens - 1)

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


class Pace:
    """Seconds a token with drafts and without, by about how many sequences run."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[bool, int], _Times] = defaultdict(_Times)
        self._looks: Counter[int] = Counter()
        self._last = (False, 0, 0.0)

    def note(self, num_seqs: int, num_tokens: int, now: float, *, is_drafted: bool) -> None:
        """A turn of generation has been read. Time is counted between two of one kind: what lies before the first is
        not theirs."""
        kind = (is_drafted, num_seqs.bit_length())
        if self._last[:2] == kind:
            self._times[kind].add(now - self._last[2], num_tokens)
        self._last = *kind, now

    def pause(self) -> None:
        """Something else happens."""
        self._last = (False, 0, 0.0)

    def is_faster(self, num_seqs: int) -> bool:
        """With drafts. What was slower is tried again, for a few turns of many."""
        size = num_seqs.bit_length()
        plain, drafted = (self._times[kind, size] for kind in (False, True))
        if plain.num_turns < TRIED_LOOKS or drafted.num_turns < TRIED_LOOKS:
            return plain.num_turns >= TRIED_LOOKS
        self._looks[size] += 1
        is_faster = drafted.seconds * plain.num_tokens < plain.seconds * drafted.num_tokens
        return is_faster == (self._looks[size] % LOOKS >= TRIED_LOOKS)


@dataclass(slots=True)
class _Times:
    """Of turns of one kind; the newest count most."""

    num_turns: int = 0
    seconds: float = 0.0
    num_tokens: float = 0.0
    least: float = float("inf")
    """Seconds of the shortest turn: one that takes far longer met something else, a graph's capture say."""

    def add(self, seconds: float, num_tokens: int) -> None:
        self.num_turns += 1
        self.least = min(self.least, seconds)
        self.seconds = TURNS_KEPT * self.seconds + min(seconds, 4 * self.least)
        self.num_tokens = TURNS_KEPT * self.num_tokens + num_tokens


def best_length(rate: float, cost: float, round_cost: float, most: int) -> int:
    """Of a draft whose tokens come true at this rate: what makes most tokens for the time. 0 where none pays. Costs, of
    each token and of all together, are in steps."""
    tokens, best, best_length = 1.0, 1.0, 0
    for length in range(1, most + 1):
        tokens += rate**length
        if (found := tokens / (1 + round_cost + cost * length)) > best:
            best, best_length = found, length
    return best_length


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
    asks_model: bool = False
    """Its draft is the model's affair."""
