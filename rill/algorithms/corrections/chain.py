"""Several corrections at once: weights multiply, and a token stays in the denominator if all keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce, TokenBatch
from rill.algorithms.corrections import CORRECTIONS
from rill.algorithms.corrections.base import Correction, CorrectionWeights, weight_metrics
from rill.config.base import OneOf, PartConfig
from rill.errors import ConfigError


class Chain(Correction):
    class Config(PartConfig):
        type: Literal["chain"] = "chain"
        parts: tuple[Annotated[PartConfig, OneOf(CORRECTIONS)], ...] = Field(min_length=1)
        """Applied together, e.g. [{ type = "sequence_mask" }, { type = "tis" }]."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.parts: list[Correction] = [CORRECTIONS.load(part.type)(part) for part in config.parts]
        if sum(Need.STATISTICS in part.needs for part in self.parts) > 1:
            raise ConfigError(
                "only one correction of a chain can set normalise: each would undo the other's mean"
            )
        self.needs = frozenset().union(*(part.needs for part in self.parts))
        self.uses_rollout_ratio = any(part.uses_rollout_ratio for part in self.parts)
        # Of the parts that have bounds of their own: a mask by lag or divergence bounds no ratio.
        own = [part.bounds for part in self.parts if part.bounds is not Correction.bounds]
        if own:
            self.bounds = (max(low for low, _ in own), min(high for _, high in own))

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        weights_N, kept_N = torch.ones_like(batch.mask_N), torch.ones_like(batch.mask_N)
        metrics: dict[str, Metric] = {}
        for number, part in enumerate(self.parts):
            result = part.weights(batch)
            weights_N = weights_N * result.weights_N
            kept_N = kept_N if result.kept_N is None else kept_N * result.kept_N
            name = f"correction/{number}_{self.config.parts[number].type}"
            metrics |= {key.replace("correction", name, 1): value for key, value in result.metrics.items()}
        metrics |= weight_metrics(weights_N, batch.mask_N)
        return CorrectionWeights(weights_N=weights_N, kept_N=kept_N, metrics=metrics)

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        figures: dict[str, Tensor] = {}
        for part in self.parts:
            figures |= part.statistics(batches, reduce)
        return figures
