"""A small model of the same vocabulary that drafts what was not said before (speculation.py).

It reads along with the sequences that it drafts for, in a cache of its own whose blocks have the numbers of theirs: a
sequence's blocks are its blocks here too, and nothing has to be allocated, freed or found again. Each reads all of its
tokens itself, shared ones too, which writes the same numbers into a shared block once more.

    sequence    t t t t n          n newest                     t t t t n a b x
    here        t t t t n a b c    it draws a, b and c          t t t t n a b ▮     what came true has been read

It draws with the temperature, the filters and the random numbers of the request, by (seed, position): where it thinks
as the model does, it says the same. Its weights stay as they were loaded. Called by the speculator and the core, in the
engine's thread.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rill.errors import ConfigError
from rill.inference.native.batch import BatchBuilder
from rill.inference.native.model_runner import ModelRunner
from rill.inference.native.runners import build_runner
from rill.inference.native.scheduler import Chunk, Work
from rill.inference.native.sequence import Sequence
from rill.models.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.inference.native.engine import NativeEngine

MAX_STEPS = 16
"""Of a turn."""


class DraftModel:
    def __init__(
        self, config: NativeEngine.Config, target: ModelRunner, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        drafting = config.draft_model
        assert drafting is not None
        if tokenizer is not None and (drafting.tokenizer or drafting.path):
            check_words(tokenizer, load_tokenizer(drafting))
        self.max_drafted = min(config.num_speculative_tokens, MAX_STEPS - 1)
        own = {
            "model": drafting, "draft_model": None, "num_speculative_tokens": 0,
            "num_scheduler_steps": self.max_drafted + 1, "max_num_seqs": target.max_num_seqs,
            "device": str(target.device), "tensor_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto",
            "batch_invariant": False, "routed_experts": False,
        }  # fmt: skip
        self.runner = build_runner(config.model_copy(update=own), None)
        self.cost = self.runner.step_bytes / target.step_bytes
        self.round_cost = target.round_bytes / target.step_bytes
        self.is_timed = target.is_overlapped
        self._num_words, self._num_said = self.runner.num_words, target.num_words
        self._budget, size = config.max_batched_tokens, config.block_size
        self._builder = BatchBuilder(target.max_num_seqs, -(-self.runner.max_len // size), size)
        self._read: dict[str, _Reading] = {}

    def can_follow(self, seq: Sequence) -> bool:
        """It reads no pictures, and no further than its own context."""
        return seq.rope is None and seq.num_tokens + self.max_drafted < self.runner.max_len

    def draft(self, asked: list[tuple[Sequence, list[int]]]) -> None:
        """Fill each list, longest first, with what may follow the sequence's newest token. Nothing is in flight, and
        the sequences have blocks for it."""
        asked.sort(key=lambda one: -len(one[1]))
        readings = [self._reading(seq) for seq, _ in asked]
        mirrors = [reading.mirror for reading in readings]
        # It reads its last token too: where all come true, that is one of the sequence's.
        counts = [len(draft) + 1 for _, draft in asked]
        with self.runner.active():
            self._catch_up(mirrors)
            for mirror, count in zip(mirrors, counts, strict=True):
                mirror.num_computed += count
            work = Work(mirrors, counts, [], [], has_special=False)
            drawn = self.runner.launch(self._builder.build(work))().tokens_KS.T
        for (_, draft), mirror, drawn_K in zip(asked, mirrors, drawn, strict=True):
            tokens = drawn_K[: len(draft)].tolist()
            mirror.tokens.extend(tokens)
            draft[:] = [token if token < self._num_said else 0 for token in tokens]

    def drop(self, seq: Sequence) -> None:
        """It has ended."""
        self._read.pop(seq.id, None)

    def forget(self) -> None:
        """The cache has been given back."""
        self._read.clear()
        self._builder.forget()

    def _reading(self, seq: Sequence) -> _Reading:
        """Up to date with what the sequence says; at least its newest token is still to be read."""
        reading, seat = self._read.get(seq.id), (seq.slot, seq.num_preempted)
        if reading is None or (reading.mirror.slot, reading.mirror.num_preempted) != seat:
            mirror = Sequence(
                request=seq.request, seed=seq.seed, arrival=seq.arrival, num_prompt=seq.num_prompt, slot=seq.slot,
                num_preempted=seq.num_preempted,
            )  # fmt: skip
            reading = self._read[seq.id] = _Reading(mirror)
        mirror = reading.mirror
        mirror.block_ids = seq.block_ids
        # A token beyond its vocabulary is read as its last one: nothing sensible follows, and nothing breaks.
        said = array("i", [min(token, self._num_words - 1) for token in seq.tokens[reading.num_true :]])
        drafted = mirror.tokens[reading.num_true :]
        pairs = enumerate(zip(said, drafted, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), min(len(said), len(drafted)))
        del mirror.tokens[reading.num_true + same :]
        mirror.tokens.extend(said[same:])
        mirror.num_computed = min(mirror.num_computed, reading.num_true + same, len(mirror.tokens) - 1)
        reading.num_true = len(mirror.tokens)
        self._builder.seat(mirror)
        return reading

    def _catch_up(self, mirrors: list[Sequence]) -> None:
        """Read all but the newest tokens."""
        while behind := [mirror for mirror in mirrors if mirror.num_computed < len(mirror.tokens) - 1]:
            chunks, budget = [], self._budget
            for mirror in behind:
                start = mirror.num_computed
                if length := min(len(mirror.tokens) - 1 - start, budget):
                    mirror.num_computed += length
                    budget -= length
                    chunks.append(Chunk(mirror, start, length, is_last=False))
            self.runner.launch(self._builder.build(Work([], [], [], chunks, has_special=False)))()


@dataclass(slots=True)
class _Reading:
    """How far a sequence has been read."""

    mirror: Sequence
    """The sequence as the runner here sees it: its tokens, then those that were drafted last."""
    num_true: int = 0
    """Of the mirror's tokens, those that are the sequence's own."""


def check_words(tokenizer: PreTrainedTokenizerBase, drafting: PreTrainedTokenizerBase) -> None:
    """The draft model reads and writes the same tokens; either may have some more at its end."""
    own, other = ({i: word for word, i in t.get_vocab().items()} for t in (tokenizer, drafting))
    for token in own.keys() & other.keys():
        if own[token] != other[token]:
            raise ConfigError(
                f"draft_model has another vocabulary than model: token {token} is {other[token]!r} there and "
                f"{own[token]!r} here; name a model of the same family, or leave draft_model unset"
            )
