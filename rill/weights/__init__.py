"""Version-stamped weights from the trainer to the engines, over several transports, verified."""

from rill.weights.auto import chosen_transport
from rill.weights.base import (
    Publisher,
    Receiver,
    TransportConfig,
    Verify,
    open_publisher,
    open_receiver,
    seated,
    take_part,
)
from rill.weights.canary import Canary, CanaryProof, Tolerance
from rill.weights.manifest import SealedManifest, WeightManifest
from rill.weights.sync import Pulled, ThreadedTargets, WeightSync

__all__ = [
    "Canary",
    "CanaryProof",
    "ThreadedTargets",
    "Pulled",
    "SealedManifest",
    "Tolerance",
    "WeightSync",
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
