"""Advantages, losses, corrections, KL and filters: pure functions over flat tokens, assembled by Algorithm."""

from rill.algorithms.advantages import ADVANTAGES
from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope
from rill.algorithms.aggregation import Aggregation
from rill.algorithms.algorithm import Algorithm, AlgorithmConfig
from rill.algorithms.base import LossSum, Metric, Need, Reduce, TokenBatch, divisor, one_rank
from rill.algorithms.corrections import CORRECTIONS
from rill.algorithms.filters import DropReason, Verdict
from rill.algorithms.losses import LOSSES
from rill.algorithms.mismatch import finish_metrics
from rill.algorithms.presets import PRESETS

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "PRESETS",
    "AdvantageBatch",
    "Advantages",
    "Aggregation",
    "Algorithm",
    "AlgorithmConfig",
    "DropReason",
    "LossSum",
    "Metric",
    "Need",
    "Reduce",
    "Scope",
    "TokenBatch",
    "Verdict",
    "divisor",
    "finish_metrics",
    "one_rank",
]
