"""The transport by placement: `sync.transport.type = "auto"`, the default of every workflow.

A workflow knows where trainer and engines will be before it starts them, and asks here which transport that means; both
ends are then given that one. Nothing is ever sent over "auto" itself.
"""

from __future__ import annotations

from typing import Any, Literal

from rill.config import PartConfig
from rill.errors import UnsupportedError
from rill.weights.base import TRANSPORTS, TransportConfig


class AutoTransport:
    class Config(TransportConfig):
        type: Literal["auto"] = "auto"

    @staticmethod
    def publisher(config: Config) -> Any:
        names = ", ".join(name for name in TRANSPORTS if name != "auto")
        raise UnsupportedError(
            'a workflow turns the transport "auto" into another one by its placement; where you open publishers and '
            f"receivers yourself, name one of: {names}"
        )

    receiver = publisher


def chosen_transport(config: PartConfig, *, is_one_machine: bool, is_one_gpu: bool) -> PartConfig:
    """What `config` means for ends that are placed so; itself unless it is "auto". Its options go along.

    is_one_gpu: all ends share one GPU, and its memory holds two more copies of the weights beside everything else.
    """
    if not isinstance(config, AutoTransport.Config):
        return config
    name = "tcp" if not is_one_machine else "cuda_ipc" if is_one_gpu else "shm"
    options = config.model_dump(exclude={"type"}, exclude_unset=True)
    chosen: PartConfig = TRANSPORTS.load(name).Config(**options)
    return chosen
