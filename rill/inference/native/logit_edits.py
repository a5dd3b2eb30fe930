"""What a request's parameters change in single logits of its row: penalties, bias, forbidden ids, a grammar's mask.

A sequence's part is kept as arrays that grow with its tokens: a step costs what is new, not all that was ever said. The
engine's thread owns it; batch.py collects the rows of a step, the samplers apply them.

Axes: S sampled row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rill.inference.native.guide import GuideMatcher
from rill.types import SamplingParams

Longs = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]
Entries = list[tuple[int, Longs, Singles]]
"""(row, tokens, values); no token occurs twice in one of them."""


@dataclass(slots=True)
class LogitEdits:
    """Of all rows of a step."""

    penalised: Entries = field(default_factory=list)  # values: the repetition penalty
    lowered: Entries = field(default_factory=list)  # presence and frequency together
    biased: Entries = field(default_factory=list)
    masks: list[tuple[int, npt.NDArray[np.uint8]]] = field(default_factory=list)
    """(row, the tokens that a grammar allows next, as bits, the lowest first)."""

    def __bool__(self) -> bool:
        return bool(self.penalised or self.lowered or self.biased or self.masks)


class _Counts:
    """How often each token came, as arrays."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._place: dict[int, int] = {}
        self._tokens = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = self._place.setdefault(token, len(self._place))
            if at == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[at] = token
            self._counts[at] += 1

    def arrays(self) -> tuple[Longs, Singles]:
        size = len(self._place)
        return self._tokens[:size], self._counts[:size]


class SequenceEdits:
    """Those of one sequence."""

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        *,
        num_generated: int,
        end_ids: Iterable[int],
        guide: GuideMatcher | None,
    ) -> None:
        """`tokens`: all so far, the last `num_generated` of them generated: presence and frequency count those."""
        self.guide = guide
        self._params = params
        self._has_lowered = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = _Counts(tokens) if params.repetition_penalty != 1 else None
        self._said = _Counts(tokens[len(tokens) - num_generated :]) if self._has_lowered else None
        self._bias = _as_arrays(dict(params.logit_bias))
        self._end_ids = frozenset(end_ids)
        self._early_bias = _as_arrays(dict(params.logit_bias) | dict.fromkeys(self._end_ids, float("-inf")))

    @staticmethod
    def are_needed(params: SamplingParams, guide: GuideMatcher | None) -> bool:
        return (
            guide is not None
            or bool(params.logit_bias)
            or params.min_new_tokens > 0
            or params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    @property
    def need_history(self) -> bool:
        """Whether the next logits depend on which tokens were sampled, beyond the model itself."""
        return self.guide is not None or self._seen is not None or self._said is not None

    def add(self, tokens: Sequence[int]) -> None:
        """These were sampled."""
        for counts in (self._seen, self._said):
            if counts is not None:
                counts.add(tokens)
        if self.guide is not None:
            self.guide.add(tokens)

    def collect(self, edits: LogitEdits, row: int, num_new: int) -> None:
        """For the next token, after `num_new` of this request."""
        params = self._params
        if self._seen is not None:
            tokens, _ = self._seen.arrays()
            edits.penalised.append((row, tokens, np.full(len(tokens), params.repetition_penalty, np.float32)))
        if self._said is not None:
            tokens, counts = self._said.arrays()
            amounts = params.presence_penalty + np.float32(params.frequency_penalty) * counts
            edits.lowered.append((row, tokens, amounts.astype(np.float32)))
        is_early = num_new < params.min_new_tokens
        if self.guide is not None:
            bits = self.guide.allowed()
            edits.masks.append((row, bits))
            is_early = is_early and self._can_go_on(bits)
        tokens, values = self._early_bias if is_early else self._bias
        if len(tokens):
            edits.biased.append((row, tokens, values))

    def _can_go_on(self, bits: npt.NDArray[np.uint8]) -> bool:
        """Whether a grammar allows anything but an end."""
        rest = bits.copy()
        for token in (end for end in self._end_ids if end >> 3 < len(rest)):
            rest[token >> 3] &= ~np.uint8(1 << (token & 7))
        return bool(rest.any())


def apply_edits(logits_SV: torch.Tensor, edits: LogitEdits) -> None:
    """In place; all but the masks, which belong to the sampled distribution and not to the reported one."""
    if edits.penalised:
        rows, tokens, penalty = _joined(edits.penalised, logits_SV.device)
        old = logits_SV[rows, tokens]
        logits_SV[rows, tokens] = torch.where(old > 0, old / penalty, old * penalty)
    if edits.lowered:
        rows, tokens, amount = _joined(edits.lowered, logits_SV.device)
        logits_SV[rows, tokens] -= amount
    if edits.biased:
        rows, tokens, bias = _joined(edits.biased, logits_SV.device)
        logits_SV[rows, tokens] += bias


def apply_masks(logits_SV: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """-inf where a grammar excludes a token; rows without one as they are."""
    vocab = logits_SV.shape[1]
    is_forbidden_SV = np.zeros((logits_SV.shape[0], vocab), dtype=np.bool_)
    for row, bits in edits.masks:
        allowed = np.unpackbits(bits, bitorder="little", count=min(vocab, 8 * len(bits)))
        is_forbidden_SV[row] = True
        is_forbidden_SV[row, : len(allowed)] = allowed == 0
    return logits_SV.masked_fill(torch.from_numpy(is_forbidden_SV).to(logits_SV.device), float("-inf"))


def _as_arrays(values: dict[int, float]) -> tuple[Longs, Singles]:
    return np.array(list(values), dtype=np.int64), np.array(list(values.values()), dtype=np.float32)


def _joined(entries: Entries, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = np.repeat([row for row, _, _ in entries], [len(tokens) for _, tokens, _ in entries])
    tokens = np.concatenate([tokens for _, tokens, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    index = torch.from_numpy(np.stack([rows, tokens])).to(device)
    return index[0], index[1], torch.from_numpy(values).to(device)
