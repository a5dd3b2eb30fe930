"""A kind of device that is one file."""

from __future__ import annotations

from collections.abc import Sequence

from rill.runtime.device.accelerator import Accelerator
from rill.runtime.worker import Worker


class Npu(Accelerator):
    visible_env = "TEST_NPUS"
    torch_name = "npu"

    def devices(self) -> Sequence[int]:
        return range(3)


class Seated(Worker):
    def seat(self) -> tuple[str, list[str]]:
        return self.device, [device.options.get("address", "") for device in self.devices]
