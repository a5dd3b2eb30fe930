"""What the runtime must know of a kind of device: one small class, one file per kind, found by its name.

Another kind than those of cpu.py and cuda.py is a subclass in a module of your own:

    ACCELERATORS.register("npu", "my_lab.npu:Npu")
    Cluster(devices="npu:auto")

Needed where processes must be shown their own devices by a variable of the environment, where torch knows them, or
where nodes can say themselves how many they have. A device of any other `kind` can be placed without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rill.errors import UnsupportedError
from rill.registry import Registry

CPU, CUDA = "cpu", "cuda"

ACCELERATORS = Registry(
    "accelerator", {CPU: "rill.runtime.device.cpu:Cpu", CUDA: "rill.runtime.device.cuda:Cuda"}
)


class Accelerator:
    """A kind of device. The defaults are those of something that torch does not know and nobody can count."""

    visible_env = ""
    """The variable that tells a process the numbers of its own devices of this kind; it then counts them from 0."""
    torch_name = ""
    """What torch calls it: `self.device` is "npu:0" for "npu"."""
    collective_backend = "gloo"
    """What torch.distributed moves its tensors with."""
    has_ipc = False
    """Whether one process can open memory of another by a handle."""

    def devices(self) -> Sequence[int] | None:
        """The numbers of those that this process may use, found without touching them. None: cannot be known."""
        return None

    def memory_bytes(self, device: str) -> tuple[int, int]:
        """Free and total memory of a device, by its torch name."""
        raise UnsupportedError(f"the memory of {device} is not known")

    def held_bytes(self, device: str) -> tuple[int, int]:
        """What this process holds of a device, by its torch name, and the most it could hold beside what others do.
        Zeros: not known."""
        return 0, 0

    def synchronize(self, device: Any) -> None:
        """Wait for what this thread has started on the device's current stream."""

    def export(self, tensor: Any) -> Any:
        """A handle of the tensor's memory, small and picklable; the memory stays the sender's."""
        raise UnsupportedError(f"memory on {tensor.device} cannot be opened by another process")

    def open(self, handle: Any) -> Any:
        """The tensor behind a handle that another process exported, on the same device."""
        raise UnsupportedError(f"{type(self).__name__} opens no memory of other processes")


def accelerator(name: str) -> Accelerator:
    """Of a kind of device, whether somebody has described it or not."""
    made = ACCELERATORS.load(name)() if name in ACCELERATORS else Accelerator()
    assert isinstance(made, Accelerator), f"{name} is registered as {ACCELERATORS[name]}, no Accelerator"
    return made


def accelerator_of(tensor: Any) -> tuple[str, Accelerator] | None:
    """The kind of device that a torch tensor lies on, by its name."""
    for name in ACCELERATORS:
        kind = accelerator(name)
        if kind.torch_name == tensor.device.type:
            return name, kind
    return None
