"""Proof after each sync that engines answer with the trainer's weights: both say the log-probabilities of fixed tokens.

The tokens are drawn once from the model's vocabulary, so every parameter that any token touches is exercised. A stale
cache, a half-applied update or a tied head that was not re-tied shows as a difference far above rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rill.errors import StaleWeightsError
from rill.inference.base import Engine, Feature
from rill.types import NOT_SAMPLED, Floats, Sample, TokenIds, Trajectory
from rill.weights.base import WeightManifest

NUM_TOKENS = 32
DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Mean difference in nats by the coarser of the two precisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What engines need to take new weights, and to prove that they have."""

    manifest: WeightManifest
    tokens: TokenIds
    logprobs: Floats | None
    """The trainer's own, at temperature 1; None: no canary."""

    @property
    def dtype(self) -> str:
        return self.manifest.tensors[0].dtype


def canary_sample(vocab_size: int) -> Sample:
    """Fixed tokens, dressed as a sample so that a trainer can score them."""
    token_ids = np.random.default_rng(7).integers(0, vocab_size, NUM_TOKENS).astype(np.int32)
    zeros = np.zeros(NUM_TOKENS, np.float32)
    trajectory = Trajectory(
        id="canary",
        group_id="canary",
        prompt_id="canary",
        token_ids=token_ids,
        logprobs=zeros,
        versions=np.full(NUM_TOKENS, NOT_SAMPLED, np.int32),
        loss_mask=np.ones(NUM_TOKENS, np.bool_),
        turn_ids=np.zeros(NUM_TOKENS, np.int32),
    )
    return Sample(trajectory=trajectory, advantages=zeros)


def compare(engine: Engine, publication: Publication, tolerance: float) -> float | None:
    """Mean difference in nats; raises StaleWeightsError when it is beyond rounding. None: nothing to compare."""
    if publication.logprobs is None or Feature.SCORE not in engine.features:
        return None
    engine_logprobs = engine.score([publication.tokens])[0]
    differences = np.abs(engine_logprobs - publication.logprobs)[1:]
    mean = float(differences.mean())
    limit = tolerance or DEFAULT_TOLERANCE[publication.dtype]
    if not mean <= limit:
        worst = int(differences.argmax()) + 1
        raise StaleWeightsError(
            f"version {publication.manifest.version}: engine and trainer differ by {mean:.3g} nats on the canary "
            f"(limit {limit:.3g}), most at token {worst}: {engine_logprobs[worst]:.4f} against "
            f"{publication.logprobs[worst]:.4f}. The engine does not hold the published weights, or runs at another "
            "precision: then set sync.canary_tolerance"
        )
    return mean
