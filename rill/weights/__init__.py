"""Version-stamped weights from the trainer to the engines, over several transports, verified."""

from rill.weights.base import (
    TRANSPORTS,
    Publisher,
    Receiver,
    TransportConfig,
    Verify,
    WeightManifest,
    open_publisher,
    open_receiver,
    take_part,
)
from rill.weights.canary import Canary, CanaryProof, CanaryReport, Tolerance
from rill.weights.resharding import ShardSpec
from rill.weights.sync import (
    LocalTarget,
    LocalTargets,
    Pulled,
    PullTargets,
    SyncReport,
    WeightSync,
    WeightSyncConfig,
)

__all__ = [
    "Canary",
    "CanaryProof",
    "CanaryReport",
    "LocalTarget",
    "LocalTargets",
    "PullTargets",
    "Pulled",
    "SyncReport",
    "Tolerance",
    "WeightSync",
    "WeightSyncConfig",
    "TRANSPORTS",
    "Publisher",
    "Receiver",
    "ShardSpec",
    "TransportConfig",
    "Verify",
    "WeightManifest",
    "open_publisher",
    "open_receiver",
    "take_part",
]
