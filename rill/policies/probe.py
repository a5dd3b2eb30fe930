"""The canary of a robot's policy: what trainer and policy workers both compute for fixed observations after a sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rill.policies.base import Policy
from rill.types import Floats, Observation, RobotSpec, TokenIds

PROBES = 32
CANARY_LENGTH = 1 + 2 * PROBES


def probes(spec: RobotSpec) -> list[Observation]:
    """Observations that both sides of a sync know."""
    rng = np.random.default_rng(0)
    size = spec.image_size
    return [
        Observation(
            state=rng.standard_normal(spec.state_size).astype(np.float32),
            images={c: rng.integers(0, 256, (size, size, 3), np.uint8) for c in spec.cameras},
            instruction=spec.tasks[n % len(spec.tasks)] if spec.tasks else "",
        )
        for n in range(PROBES)
    ]


def probe(policy: Policy, sequences: Sequence[TokenIds]) -> list[Floats]:
    """For the canary: what one seed draws for the probes, by its log-probabilities, and the probes' values."""
    seen = probes(policy.spec)
    decision = policy.act(seen, [0] * len(seen))
    found = np.concatenate([[0.0], decision.logprobs_BJ[:, 0], decision.values_B]).astype(np.float32)
    return [found for _ in sequences]
