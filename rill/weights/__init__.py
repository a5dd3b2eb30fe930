"""Version-stamped weights from the trainer to the engines, over several transports, verified."""

from rill.weights.auto import chosen_transport
from rill.weights.base import (
    TRANSPORTS,
    Publisher,
    Receiver,
    TransportConfig,
    Verify,
    open_publisher,
    open_receiver,
    seated,
    take_part,
)
from rill.weights.canary import Canary, CanaryProof, CanaryReport, Tolerance
from rill.weights.manifest import SealedManifest, WeightManifest
from rill.weights.sync import (
    Pulled,
    PullTarget,
    PullTargets,
    SyncReport,
    ThreadedTargets,
    WeightSync,
    WeightSyncConfig,
)

__all__ = [
    "Canary",
    "CanaryProof",
    "CanaryReport",
    "ThreadedTargets",
    "PullTarget",
    "PullTargets",
    "Pulled",
    "SealedManifest",
    "SyncReport",
    "Tolerance",
    "WeightSync",
    "WeightSyncConfig",
    "TRANSPORTS",
    "Publisher",
    "Receiver",
    "TransportConfig",
    "Verify",
    "WeightManifest",
    "chosen_transport",
    "open_publisher",
    "open_receiver",
    "seated",
    "take_part",
]
