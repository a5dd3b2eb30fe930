"""By which transport weights reach their readers, from where everybody is placed. Called once, by the assembly."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rill.runtime.device.accelerator import CUDA
from rill.runtime.device.device import Device
from rill.runtime.device.placement import resolve
from rill.weights import chosen_transport
from rill.workflows.sections import SyncConfig

log = logging.getLogger(__name__)


def routed(
    sync: SyncConfig,
    devices: Sequence[Device],
    *,
    actor: str,
    pulling: Iterable[str | None],
    stay_on_gpu: bool,
) -> SyncConfig:
    """`sync` with the transport that the placement asks for, where the recipe leaves it open.

    pulling: the placements of the groups that take the weights; None: a group that is not there.
    stay_on_gpu: groups that share a GPU keep their memory on it, and their engines can read weights from it.
    """
    publisher = resolve(actor, devices)[0]
    ends = [publisher, *(seat for place in pulling if place is not None for seat in resolve(place, devices))]
    first = {seat.devices[0].id: seat.devices[0].kind for seat in ends}
    transport = chosen_transport(
        sync.transport,
        is_one_machine=len({seat.node_id for seat in ends}) == 1,
        is_one_gpu=stay_on_gpu and list(first.values()) == [CUDA],
    )
    log.info("weights travel by %s", transport.type)
    return sync.model_copy(update={"transport": transport})
