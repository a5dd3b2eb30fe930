"""The processor, as an accelerator: a slot per core, gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rill.runtime.device.accelerator import Accelerator


class Cpu(Accelerator):
    torch_name = "cpu"

    def devices(self) -> Sequence[int]:
        return range(os.cpu_count() or 1)
