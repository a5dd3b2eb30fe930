"""The last proof after a sync: engine and trainer give the same log-probabilities to the same fixed tokens.

Checksums prove that bytes arrived; only this proves that the engine *uses* them (a packed head that kept the old
embedding, a cache that outlived its version, a name that was mapped to the wrong layer).

The difference is judged per token, |log π_engine − log π_trainer|, by its mean and its maximum. What rounding alone
makes of it depends on the precision of the engine, so the limits do too; they are far below what one missed
optimizer step of a learning run makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rill.errors import ConfigError, StaleWeightsError
from rill.types import Floats, PolicyVersion, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest differences that count as the same weights, in nats."""

    mean: float
    largest: float


TOLERANCES = {
    "float32": Tolerance(mean=1e-3, largest=1e-2),
    "bfloat16": Tolerance(mean=3e-2, largest=0.5),
    "float16": Tolerance(mean=1e-2, largest=0.15),
    "float8": Tolerance(mean=0.15, largest=2.0),
}
"""By the lower of both sides' precisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """How far an engine's log-probabilities lie from the trainer's."""

    engine: str
    version: PolicyVersion
    mean: float
    largest: float
    num_tokens: int
    worst: str
    """Where the largest difference is, in words."""
    tolerance: Tolerance

    @property
    def is_same(self) -> bool:
        return self.mean <= self.tolerance.mean and self.largest <= self.tolerance.largest

    def raise_if_stale(self) -> None:
        if not self.is_same:
            raise StaleWeightsError(
                f"engine {self.engine} says version {self.version} but answers with other weights: log-probabilities "
                f"of {self.num_tokens} fixed tokens differ by {self.mean:.3g} on average (allowed "
                f"{self.tolerance.mean:g}) and by {self.largest:.3g} at most (allowed {self.tolerance.largest:g}), "
                f"worst at {self.worst}"
            )


class Canary:
    """Fixed token sequences and the comparison.

    >>> canary = Canary.random(vocab_size=151_936, seed=0)
    >>> report = canary.compare("rollout[0]", version, engine.score(canary.sequences), trainer_logprobs)
    >>> report.raise_if_stale()
    """

    def __init__(
        self, sequences: Sequence[TokenIds], *, dtype: str = "float32", tolerance: Tolerance | None = None
    ) -> None:
        if not sequences or any(len(s) < 2 for s in sequences):
            raise ConfigError("a canary needs sequences of at least two tokens")
        if tolerance is None and dtype not in TOLERANCES:
            raise ConfigError(f"no canary tolerance for dtype {dtype!r}: known are {', '.join(TOLERANCES)}")
        self.sequences = [np.asarray(s, dtype=np.int32) for s in sequences]
        self.tolerance = tolerance or TOLERANCES[dtype]

    @classmethod
    def random(
        cls,
        vocab_size: int,
        *,
        seed: int = 0,
        num_sequences: int = 2,
        length: int = 32,
        dtype: str = "float32",
        tolerance: Tolerance | None = None,
    ) -> Canary:
        """Tokens drawn once from the whole vocabulary, so that most of the embedding and of the head is looked at."""
        rng = np.random.default_rng(seed)
        sequences = [rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(num_sequences)]
        return cls(sequences, dtype=dtype, tolerance=tolerance)

    def compare(
        self,
        engine: str,
        version: PolicyVersion,
        engine_logprobs: Sequence[Floats],
        trainer_logprobs: Sequence[Floats],
    ) -> CanaryReport:
        """Position 0 of a sequence has no log-probability and is left out."""
        differences = []
        for sequence, ours, theirs in zip(self.sequences, engine_logprobs, trainer_logprobs, strict=True):
            if len(ours) != len(sequence) or len(theirs) != len(sequence):
                raise StaleWeightsError(
                    f"engine {engine}: the canary has {len(sequence)} tokens, the engine scored {len(ours)} and the "
                    f"trainer {len(theirs)}"
                )
            gap = np.abs(np.asarray(ours[1:], dtype=np.float64) - np.asarray(theirs[1:], dtype=np.float64))
            differences.append(np.where(np.isfinite(gap), gap, np.inf))
        flat = np.concatenate(differences)
        row = int(np.argmax([d.max() for d in differences]))
        at = int(np.argmax(differences[row]))
        return CanaryReport(
            engine=engine,
            version=version,
            mean=float(flat.mean()),
            largest=float(flat.max()),
            num_tokens=flat.size,
            worst=(
                f"sequence {row}, position {at + 1}, token id {int(self.sequences[row][at + 1])}: engine "
                f"{float(engine_logprobs[row][at + 1]):.4f}, trainer {float(trainer_logprobs[row][at + 1]):.4f}"
            ),
            tolerance=self.tolerance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryProof:
    """What an engine must answer after it took a version: travels to the engine with the manifest."""

    canary: Canary
    expected: Sequence[Floats]
    """The trainer's log-probabilities of the canary's sequences under that version."""

    def check(
        self, engine: str, version: PolicyVersion, score: Callable[[Sequence[TokenIds]], Sequence[Floats]]
    ) -> CanaryReport:
        return self.canary.compare(engine, version, score(self.canary.sequences), self.expected)
