"""One request on its way through the engine: its tokens, its place in the KV cache, its results so far.

Owned by the engine's thread alone; nothing here is locked. The scheduler gives and takes its slot, the block manager
fills `block_ids`, the engine appends what was sampled.

    tokens        p p p p p p g g g g ?          p prompt, g generated, ? sampled on the device, not yet read
    num_computed  ──────────────────►│           keys and values in the cache, or on their way there
    num_tokens    ────────────────────►│         len(tokens) + num_in_flight
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rill.inference.base import Completion, Delta, Request, TopTokens
from rill.inference.native.detokenizer import StopMatcher
from rill.inference.native.logit_edits import SequenceEdits
from rill.models.pictures import Positions
from rill.types import Floats, StopReason

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Identity, not equality: two requests with the same tokens are two sequences."""

    is_scored: ClassVar[bool] = False
    """Whether it computes log-probabilities of its own tokens and generates none."""

    request: Request
    seed: int
    arrival: int
    """Counts submissions; ties of priority are served in this order."""
    future: Future[Any] = field(default_factory=Future)
    """Of its Completion, or of what was computed for a ScoredSequence."""
    on_delta: Callable[[Delta], None] | None = None
    stop_matcher: StopMatcher | None = None
    ends: Mapping[int, StopReason] = field(default_factory=dict)
    """Every token that ends it, and as what. Others may share it."""
    edits: SequenceEdits | None = None
    """What its parameters change in single logits."""
    max_tokens: int = 0
    """Prompt and completion together never exceed this."""
    rope: tuple[Positions, int] | None = None
    """Of a prompt with pictures: where its tokens stand, [3, num_prompt], and how far later ones are from their
    index."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_prompt: int = 0
    num_in_flight: int = 0
    num_computed: int = 0
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """The likeliest tokens at each place, where the request asked for them."""
    num_cached: int = 0
    num_reported: int = 0
    """Generated tokens already given to on_delta."""
    next_delta_at: float = 0.0
    """Until then new tokens wait for others (Request.delta_interval_s)."""

    is_finished: bool = False
    slot: int = NO_SLOT
    """Row in the runner's per-sequence tables while it runs."""
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the leading full blocks, as far as they have been worked out."""
    num_published: int = 0
    """Leading blocks that are in the prefix cache, put there by this sequence or found there."""
    num_shared: int = 0
    """Leading tokens whose blocks were found in the cache: they are read and never written."""
    root_key: bytes = b""
    """Version, adapter and salt under which block_keys were worked out."""
    num_preempted: int = 0
    routed_experts: Any = None
    """[num_tokens, L, K] once it has ended, where the engine records them."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def order(self) -> tuple[int, int]:
        return (self.request.priority, self.arrival)

    @property
    def is_special(self) -> bool:
        """It needs more of a step than the model's next token: its steps are taken one at a time."""
        return self.edits is not None or self.request.num_top_logprobs > 0

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> StopReason | None:
        """Take sampled tokens, up to the first that ends it; the reason to stop after it, if there is one."""
        reason = None
        if self.stop_matcher is not None or not self.ends.keys().isdisjoint(tokens):
            count, reason = self._first_end(tokens)
            tokens, logprobs = tokens[:count], logprobs[:count]
        self.tokens.fromlist(tokens)
        self.logprobs.fromlist(logprobs)
        self.versions.fromlist([version] * len(tokens))
        if self.edits is not None:
            self.edits.add(tokens)
        if reason is None and len(self.tokens) >= self.max_tokens:
            return StopReason.LENGTH
        return reason

    def _first_end(self, tokens: list[int]) -> tuple[int, StopReason | None]:
        """How many of the tokens are taken, and why no more."""
        count, reason = len(tokens), None
        if not self.ends.keys().isdisjoint(tokens):
            at = next(i for i, token in enumerate(tokens) if token in self.ends)
            count, reason = at + 1, self.ends[tokens[at]]
        if self.stop_matcher is not None:
            # An end by id comes first where both are there, and its own text is not looked at.
            found = self.stop_matcher.push(tokens[: count - (reason is not None)])
            if found is not None:
                return found, StopReason.STOP
        return count, reason

    def take_delta(self, reason: StopReason | None = None) -> Delta:
        start = self.num_reported
        self.num_reported = self.num_generated
        return Delta(request_id=self.id, stop_reason=reason, **self._sampled(start))

    def completion(self, reason: StopReason) -> Completion:
        matched = self.stop_matcher.matched if self.stop_matcher is not None else None
        return Completion(
            request_id=self.id,
            stop_reason=reason,
            stop_text=matched if reason is StopReason.STOP else None,
            num_cached_tokens=self.num_cached,
            routed_experts=self.routed_experts,
            **self._sampled(0),
        )

    def _sampled(self, start: int) -> dict[str, Any]:
        """Fields of `Sampled`, of what was generated from there on."""
        top, count = None, self.request.num_top_logprobs
        if count:
            ids = np.array([ids for ids, _ in self.top[start:]], dtype=np.int32)
            values = np.array([values for _, values in self.top[start:]], dtype=np.float32)
            top = TopTokens(token_ids=ids.reshape(-1, count), logprobs=values.reshape(-1, count))
        return {
            "token_ids": np.frombuffer(self.tokens[self.num_prompt + start :], np.int32),
            "logprobs": np.frombuffer(self.logprobs[start:], np.float32),
            "versions": np.frombuffer(self.versions[start:], np.int32),
            "top": top,
        }


@dataclass(slots=True, eq=False)
class ScoredSequence(Sequence):
    """Computes the log-probability of every one of its tokens, or an embedding, and generates none."""

    is_scored: ClassVar[bool] = True

    temperature: float = 1.0
    is_embedding: bool = False
    """What is wanted is the hidden state of its last token."""
    scores: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
